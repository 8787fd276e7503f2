"""Numbers that nbep's own kernels are launched with: LLVM takes them for not negative, and a launch checks it."""

import re

import pytest
from target import spawn

from nbep.device.compiler_hints import assume_sizes
from nbep.device.jit import KernelSpec, kernel
from nbep.device.primitives import st_weak_s64
from nbep.device.types import F32, I32, I64, Out

MODULE = """declare void @"other"(i64)
define void @"name"(i64 %"out", i32 %"sizes.0", float %"scale", i64 %"num_bytes") convergent
{
entry:
  %".1" = alloca i64
  ret void
}
"""


@kernel()
def note_groups(out: Out, num_columns: I32, scale: F32, num_bytes: I64):
    st_weak_s64(out, num_columns // 128 + num_bytes // 16)


PARAMS = note_groups.kernel_spec.params


def test_each_number_is_assumed_where_the_kernel_begins_but_no_address_and_no_float():
    text = assume_sizes(MODULE, PARAMS)
    entry = text[text.index("entry:") : text.index("alloca")]
    assert re.findall(r"icmp sge (\S+ \S+), 0", entry) == ['i32 %"sizes.0"', 'i64 %"num_bytes"']
    assert entry.count("call void @llvm.assume(i1 ") == 2
    assert text.count("declare void @llvm.assume(i1)") == 1


def test_another_number_of_parameters_is_an_error():
    with pytest.raises(ValueError, match="a kernel of 3 parameters has 4 in LLVM"):
        assume_sizes(MODULE, PARAMS[:3])


@pytest.mark.compile
def test_a_division_by_a_power_of_two_is_a_shift_in_own_kernels_alone(monkeypatch):
    pytest.importorskip("numba_cuda")
    from nbep.device.compile import compile_to_ptx

    rounds_down = re.compile(r"shr\.s(32|64) .*, (31|63);")
    assert rounds_down.search(compile_to_ptx(note_groups.kernel_spec, (9, 0)))
    monkeypatch.setattr(KernelSpec, "is_own", True)
    assert not rounds_down.search(compile_to_ptx(note_groups.kernel_spec, (9, 0)))


@pytest.mark.emulator_only("a GPU does not check it")
@pytest.mark.parametrize("numbers", [(-1, 0.5, 16), (128, 0.5, -16)])
def test_an_own_kernel_gets_no_negative_number(numbers, monkeypatch):
    def main(comm):
        comm.runtime.launch(comm.runtime.create_stream("stream"), note_groups, 1, 32, 0, 0, *numbers)

    monkeypatch.setattr(KernelSpec, "is_own", True)
    with pytest.raises(AssertionError, match=r"got -1.*; the compiler takes it for a number that is not negative"):
        spawn(main, 1)
