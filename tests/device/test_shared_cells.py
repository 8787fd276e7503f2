"""Reports name what lies in the shared memory of nbep's kernels."""

import pytest

from nbep.device.kernels.intranode.combine import combine_smem_bytes
from nbep.device.kernels.library import shared_cells
from nbep.lab.check.catalogue import own_kernels, reached_from

pytestmark = pytest.mark.emulator_only("a GPU has no reports")


def test_every_kernel_with_shared_memory_has_names_for_it():
    kernels = own_kernels().values()
    using = {k.kernel_spec.name for k in kernels if any("smem_base" in f.__code__.co_names for f in reached_from(k))}
    assert len(using) > 5
    assert [name for name in using if shared_cells(name, (), 64, True) is None] == []
    assert shared_cells("a_kernel_of_a_user", (), 64, True) is None


def test_the_parts_of_combines_board_lie_behind_each_other():
    describe = shared_cells("combine", (), 96, True)
    names = [describe(offset) for offset in range(0, combine_smem_bytes(96), 4)]
    stems = [name.partition("[")[0] for name in names]
    assert list(dict.fromkeys(stems)) == ["rows", "weights", "shared_heads", "shared_tails"]
    assert stems == sorted(stems, key=["rows", "weights", "shared_heads", "shared_tails"].index)
    assert names[-1] == "shared_tails[src 7]"
