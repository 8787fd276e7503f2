"""Both compilers make the same of a kernel: no thread can execute memory instructions in an order that is new."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from nbep.device import compilers
from nbep.device.orders import only_in

PTX = """
.visible .entry kernel(
	.param .u64 kernel_param_0
)
{{
	ld.param.u64 	%rd1, [kernel_param_0];
$L__BB0_1:
	ld.acquire.sys.global.s32 %r1, [%rd1];
	setp.eq.s32 	%p1, %r1, 0;
	@%p1 bra 	$L__BB0_1;
{}
	ret;

}}
"""
PAYLOAD, FLAG = "\tst.global.s32 [%rd2], %r1;", "\tst.release.sys.global.s32 [%rd3], %r1;"
SMALL = ("get_dispatch_layout", "combine")
# Kernels whose flow graphs show it. The others' have paths that no thread takes, in different places, or are not
# compared yet; see docs/compilers.md.
SHOWN = (
    *SMALL,
    "cached_notify_combine",
    "cached_notify_dispatch",
    "direct_combine",
    "direct_dispatch",
    "dispatch",
    "internode_cached_notify",
    "internode_combine",
    "internode_combine-IbgdaNetwork",
    "internode_dispatch",
    "internode_dispatch-IbgdaNetwork",
    "internode_notify_dispatch",
    "internode_notify_dispatch-IbgdaNetwork",
    "low_latency_combine",
    "low_latency_combine-DeduplicatedShape",
)
CASES = [
    *((name, "sm_90") for name in SMALL),
    *(pytest.param(name, arch, marks=pytest.mark.long) for name in SMALL for arch in ("sm_80", "sm_100")),
    *(pytest.param(name, "sm_90", marks=pytest.mark.long) for name in SHOWN if name not in SMALL),
]
INSTRUCTION = re.compile(r"\b(?:(?:ld|st|atom|red)\.(?!param|local)|fence\.|bar\.|mbarrier\.|cp\.async)[\w.:]+")


def test_a_store_that_moved_across_a_release_is_found():
    kernel, moved = PTX.format(f"{PAYLOAD}\n{FLAG}"), PTX.format(f"{FLAG}\n{PAYLOAD}")
    assert only_in(moved, kernel) == ["ld.acquire.sys.global.s32", "st.release.sys.global.s32"]


def test_an_instruction_that_is_gone_is_found():
    assert only_in(PTX.format(PAYLOAD), PTX.format(f"{PAYLOAD}\n{FLAG}"))[-1] == "end"


def test_the_layout_of_blocks_makes_no_difference():
    turned = f"\tbra.uni $L__BB0_3;\n$L__BB0_2:\n{FLAG}\n\tret;\n$L__BB0_3:\n{PAYLOAD}\n\tbra.uni $L__BB0_2;"
    kernel, other = PTX.format(f"{PAYLOAD}\n{FLAG}"), PTX.format(turned)
    assert only_in(kernel, other) is None
    assert only_in(other, kernel) is None


def test_a_compiler_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("NBEP_COMPILER", "gcc")
    with pytest.raises(ValueError, match=r"NBEP_COMPILER: got 'gcc'; must be numba-cuda or mlir"):
        compilers.chosen_name()


def ptx_of(compiler, arch, name, folder):
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "nbep", "compile", "--arch", arch, "--kernel", name, "--ptx", str(folder)]
    environment = {**os.environ, "NBEP_COMPILER": compiler}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return (folder / f"{name}.{arch}.ptx").read_text()


@pytest.mark.thorough
@pytest.mark.skipif(find_spec("numba_cuda_mlir") is None, reason="numba-cuda-mlir is not installed: nbep[mlir]")
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_numba_cuda_mlir_gives_no_thread_a_new_order(name, arch, tmp_path):
    kernel, other = (ptx_of(one, arch, name, tmp_path / one) for one in compilers.MODULES)
    assert set(INSTRUCTION.findall(other)) == set(INSTRUCTION.findall(kernel))
    assert only_in(other, kernel) is None


@pytest.mark.skipif(find_spec("numba_cuda_mlir") is None, reason="numba-cuda-mlir is not installed: nbep[mlir]")
@pytest.mark.parametrize(
    "lost", ['asm sideeffect "fence.acq_rel.sys;", ""()', 'asm "fence.acq_rel.sys;", "~{memory}"()']
)
def test_a_kernel_whose_fence_could_move_is_refused(lost):
    from nbep.device.compilers.numba_cuda_mlir import LostOrder, _mark_convergent

    _mark_convergent('  call void asm sideeffect "fence.acq_rel.sys;", "~{memory}"()')
    with pytest.raises(LostOrder, match="fence_acq_rel_sys lost its side effect or its memory clobber"):
        _mark_convergent(f"  call void {lost}")
