"""The table of NVSHMEM's structures is what the system's C compiler makes of NVSHMEM's own headers."""

import json
import shutil
import struct
import subprocess

import nvshmem_package
import pytest

from nbep.host.network.nvshmem_layout import LAYOUTS, MAX_CONST_KEYS, TYPE_RC

# The header includes rdma-core's mlx5dv.h, which is not in the wheel, for one structure of 48 bytes (struct
# mlx5_wqe_av, providers/mlx5/mlx5dv.h). And it is C++: in C a structure's tag is not a type.
MLX5DV = """
#include <linux/types.h>
struct mlx5_wqe_av {
    union {
        struct { __be32 qkey; __be32 reserved; } qkey;
        __be64 dc_key;
    } key;
    __be32 dqp_dct;
    __u8 stat_rate_sl, fl_mlid;
    __be16 rlid;
    __u8 reserved0[4], rmac[6], tclass, hop_limit;
    __be32 grh_gid_fl;
    __u8 rgid[16];
};
typedef struct nvshmemi_ibgda_device_local_only_mhandle nvshmemi_ibgda_device_local_only_mhandle;
"""


def probe_source() -> str:
    """A program that prints the layouts as JSON: for each structure its size, and place and size of each field."""
    lines = [
        "#include <assert.h>",
        "#include <stdbool.h>",
        "#include <stdio.h>",
        '#include "device_host/nvshmem_types.h"',
        '#include "device_host_transport/nvshmem_common_ibgda.h"',
        'int main(void) { printf("{");',
    ]
    for layout in LAYOUTS:
        lines.append(f'printf("\\"{layout.c_name}\\": {{\\"\\": [0, %zu]", sizeof({layout.c_name}));')
        for name in layout.fields:
            place = f"offsetof({layout.c_name}, {name}), sizeof((({layout.c_name} *)0)->{name})"
            lines.append(f'printf(", \\"{name}\\": [%zu, %zu]", {place});')
        lines.append('printf("}, ");')
    constants = ("NVSHMEMI_IBGDA_MAX_CONST_LKEYS", "NVSHMEMI_IBGDA_MAX_CONST_RKEYS", "NVSHMEMI_IBGDA_DEVICE_QP_TYPE_RC")
    lines.append(f'printf("\\"constants\\": [%d, %d, %d]}}", {", ".join(constants)}); return 0; }}')
    return "\n".join(lines)


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    include = nvshmem_package.include_folder()
    compiler = shutil.which("cc")
    if compiler is None:
        nvshmem_package.skip_or_fail("no C compiler: cc")
    folder = tmp_path_factory.mktemp("probe")
    (folder / "infiniband").mkdir()
    (folder / "infiniband" / "mlx5dv.h").write_text(MLX5DV)
    (folder / "probe.c").write_text(probe_source())
    command = [compiler, "-std=gnu11", f"-I{folder}", f"-I{include}", "-o", folder / "probe", folder / "probe.c"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(subprocess.run([folder / "probe"], capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.c_name)
def test_fields_are_where_the_compiler_puts_them(probed, layout):
    table = {name: [offset, struct.calcsize(f"<{code}")] for name, (offset, code) in layout.fields.items()}
    assert table | {"": [0, layout.num_bytes]} == probed[layout.c_name]


def test_constants_are_those_of_the_header(probed):
    assert probed["constants"] == [MAX_CONST_KEYS, MAX_CONST_KEYS, TYPE_RC]
