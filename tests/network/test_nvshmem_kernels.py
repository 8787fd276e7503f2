"""Kernels over NVSHMEM compile and link with its device library, without a GPU."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys

import nvshmem_package
import pytest
from parts import both_parts
from processes import LIMIT_S, once_per_run

from nbep.device.extras import install_line
from nbep.device.network import nvshmem_library

pytestmark = pytest.mark.compile

PROGRAM = """
import json, sys
from nbep.device.compile import compile_kernel, load_kernels, parse_arch, with_variants
from nbep.device.jit import over
from nbep.device.network.seam import Network
from nbep.device.network.nvshmem import NvshmemNetwork

cc, names = parse_arch(sys.argv[1]), sys.argv[2:]
rows = {}
for name, spec in with_variants(load_kernels().values()).items():
    if spec.hints.get("network") is Network and (not names or name in names):
        compiled = compile_kernel(over(spec.function, NvshmemNetwork), cc)
        report, cubin = compiled.report, compiled.cubin
        rows[name] = [report.registers, report.spill_stores, spec.threads_on(cc), cubin.hex()]
print(json.dumps({"kernels": rows}))
"""
# Bytes of a spill where it is more than USUAL_SPILL: (kernel, arch). A forwarder of combine holds more across the
# library's calls than those leave it: 25 words, 28 between many nodes, beside a call that takes microseconds. With 16
# warps a block there is no spill, but fewer sums are under way.
# A forwarder of dispatch spills ten words.
SPILLED = {
    ("internode_combine", "sm_90"): 100,
    ("internode_combine", "sm_100"): 24,
    ("internode_combine-704", "sm_90"): 112,
    ("internode_combine-704", "sm_100"): 112,
    ("internode_dispatch", "sm_90"): 40,
    ("internode_dispatch", "sm_100"): 44,
}
USUAL_SPILL = 16
INSTALL = re.escape(install_line("nvshmem"))
SYMBOLS = ("nvshmemi_device_state_d", "nvshmemi_device_lib_version_d", "nvshmemi_ibgda_device_state_d")


SMALL = "network_push"  # it writes, adds and waits for both; the short part compiles it alone


@pytest.fixture(scope="module", params=both_parts([f"sm_90, {SMALL}"], thorough=["sm_90"], long=["sm_80", "sm_100"]))
def compiled(request, tmp_path_factory):
    nvshmem_package.include_folder()
    arch, _, name = request.param.partition(", ")

    def compile_all():
        command = [sys.executable, "-c", PROGRAM, arch, *filter(None, [name])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rows = json.loads(once_per_run(tmp_path_factory, f"kernels over NVSHMEM for {request.param}", compile_all))
    return rows | {"arch": arch, "is_small": bool(name)}


def symbols(cubin: str) -> dict[str, tuple[bool, int]]:
    """Name -> whether it is global and defined, and its bytes; of the symbol table of an ELF file."""
    data = bytes.fromhex(cubin)
    start, count = int.from_bytes(data[0x28:0x30], "little"), int.from_bytes(data[0x3C:0x3E], "little")

    def words(section, first, last):
        return int.from_bytes(data[start + 64 * section + first : start + 64 * section + last], "little")

    found = {}
    for section in range(count):
        if words(section, 4, 8) == 2:  # SHT_SYMTAB
            names = words(words(section, 40, 44), 24, 32)
            first, size = words(section, 24, 32), words(section, 32, 40)
            for entry in range(first, first + size, 24):
                name = names + int.from_bytes(data[entry : entry + 4], "little")
                is_defined = data[entry + 6 : entry + 8] != b"\0\0"
                text = data[name : data.index(b"\0", name)].decode()
                num_bytes = int.from_bytes(data[entry + 16 : entry + 24], "little")
                found[text] = (data[entry + 4] >> 4 == 1 and is_defined, num_bytes)
    return found


def test_all_kernels_over_a_network_link(compiled):
    shapes = "", "-DeduplicatedShape"
    calls = {f"low_latency_{verb}{kind}" for verb in ("dispatch", "combine") for kind in shapes}
    names = {SMALL} if compiled["is_small"] else {*calls, "clean_low_latency_buffer", SMALL}
    assert names <= set(compiled["kernels"])


def test_blocks_of_the_usual_size_fit(compiled):
    """The library's functions are not inlined; a kernel has the registers of the one that needs most."""
    for name, (registers, spill_stores, threads, _) in compiled["kernels"].items():
        assert (registers + 7) // 8 * 8 * threads <= 1 << 16, name
        assert spill_stores <= SPILLED.get((name, compiled["arch"]), USUAL_SPILL), name


def test_modules_have_the_constants_that_nvshmem_fills(compiled):
    """It finds them by name: nvshmemx_cumodule_init in NVSHMEM's src/host/init/init.cu."""
    cubins = [row[-1] for row in compiled["kernels"].values()]
    for cubin in cubins:
        found = symbols(cubin)
        assert [found[name] for name in SYMBOLS] == [(True, 848), (True, 12), (True, 8384)]


def test_the_package_is_the_version_that_these_sizes_are_of():
    nvshmem_package.include_folder()
    assert importlib.metadata.version("nvidia-nvshmem-cu13").startswith("3.8.")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: None)
    with pytest.raises(nvshmem_library.NvshmemMissing, match=rf"NVSHMEM is not installed: {INSTALL}$"):
        nvshmem_library.archive()


def test_a_package_without_its_device_library_is_named(monkeypatch, tmp_path):
    (tmp_path / "include").mkdir()
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda name: str(tmp_path / "include"))
    with pytest.raises(nvshmem_library.NvshmemMissing, match=r"libnvshmem_device\.a is not installed"):
        nvshmem_library.archive()


def test_nbep_starts_without_nvshmem():
    code = "import sys, nbep.host.buffer; print(*[name for name in sys.modules if 'nvshmem' in name])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert out.stdout.split() == []


@pytest.mark.parametrize(
    ("version", "is_enough"), [((3, 4, 5), False), ((3, 7, 9), False), ((3, 8, 0), True), ((4, 0, 0), True)]
)
def test_headers_that_are_too_old_are_refused_before_they_are_compiled(version, is_enough, tmp_path, monkeypatch):
    """What torch brings is older than what the kernels are linked with."""
    (tmp_path / "include" / "non_abi").mkdir(parents=True)
    names = ("MAJOR", "MINOR", "PATCH")
    defines = [f"#define NVSHMEM_VENDOR_{name}_VERSION {number}" for name, number in zip(names, version, strict=True)]
    (tmp_path / "include" / "non_abi" / "nvshmem_version.h").write_text("\n".join(["#pragma once", *defines]))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / nvshmem_library.ARCHIVE).write_bytes(b"")
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda _: str(tmp_path / "include"))
    if is_enough:
        assert nvshmem_library.archive().name == nvshmem_library.ARCHIVE
        return
    here = ".".join(map(str, version))
    why = rf"it needs nvidia-nvshmem-cu13 3\.8 or later; here is {here}: {INSTALL}"
    for call in (nvshmem_library.archive, lambda: nvshmem_library.libraries((9, 0))):
        with pytest.raises(nvshmem_library.NvshmemMissing, match=f"^transport='nvshmem': {why}$"):
            call()


def test_of_what_nvrtc_says_of_headers_the_first_errors_are_shown(tmp_path, monkeypatch):
    (tmp_path / "nvshmem.h").write_text("".join(f"typedef missing_{i} name_{i};\n" for i in range(90)))
    (tmp_path / "nvshmemx.h").write_text("")
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_header_directory", lambda _: str(tmp_path))
    with pytest.raises(RuntimeError, match="NVSHMEM's headers: NVRTC: NVRTC_ERROR_COMPILATION") as caught:
        nvshmem_library.compile_calls((9, 0))
    lines = str(caught.value).splitlines()
    assert "missing_0" in lines[1]
    assert len(lines) < 20
    assert lines[-1].endswith("more lines")
