"""The kernels for buffers in the host's memory compile as the others do, and add to no cell that another GPU sees."""

import re

import pytest

from nbep.device.compile import compile_kernel, for_host_memory

KERNELS = for_host_memory()


@pytest.mark.thorough
@pytest.mark.compile
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_it_fits_its_registers_and_adds_nothing_to_a_cell_of_a_peer(name):
    compiled = compile_kernel(KERNELS[name])
    assert (compiled.report.spill_stores, compiled.report.stack_frame) == (0, 0)
    assert "st.release.sys.global.s32" in compiled.ptx
    # Two more change cells of scope sys on the GPU itself: the claim of a fault, and statistics of 64 bits.
    assert re.findall(r"atom\.\w+\.sys\.global\.add\.s32", compiled.ptx) == []
