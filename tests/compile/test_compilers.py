"""Both compilers make the same of a kernel: no thread can execute memory instructions in an order that is new."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from processes import LIMIT_S

from nbep.device import compilers
from nbep.device.compile import load_kernels, with_variants
from nbep.device.orders import LostOrder, check_orders, only_in

KERNEL = """
define void @kernel(i64 %address) {{
entry:
  br label %poll
poll:
  %seen = call i32 asm sideeffect "ld.acquire", "=r,l,~{{memory}}"(i64 %address)
  %again = icmp eq i32 %seen, 0
  br i1 %again, label %poll, label %done
done:
{}
  ret void
}}
"""
PAYLOAD = '  call void asm sideeffect "st", "l,~{memory}"(i64 %address)'
FLAG = '  call void asm sideeffect "st.release", "l,~{memory}"(i64 %address)'
IN_ORDER = KERNEL.format(f"{PAYLOAD}\n{FLAG}")
LOAD, STORE, RELEASE = '"ld.acquire" ("=r,l,~{memory}")', '"st" ("l,~{memory}")', '"st.release" ("l,~{memory}")'

NEEDS_MLIR = pytest.mark.skipif(
    find_spec("numba_cuda_mlir") is None, reason="numba-cuda-mlir is not installed: the extra mlir"
)
SMALL = ("get_dispatch_layout", "combine")
CASES = [
    *((name, "sm_90") for name in SMALL),
    *(pytest.param(name, arch, marks=pytest.mark.long) for name in SMALL for arch in ("sm_80", "sm_100")),
    *(
        pytest.param(name, "sm_90", marks=pytest.mark.long)
        for name in with_variants(load_kernels().values())
        if name not in SMALL
    ),
]


def test_a_store_that_moved_across_a_release_is_found():
    assert only_in(KERNEL.format(f"{FLAG}\n{PAYLOAD}"), IN_ORDER) == [LOAD, RELEASE]


def test_an_instruction_that_is_gone_is_found():
    assert only_in(KERNEL.format(PAYLOAD), IN_ORDER) == [LOAD, STORE, "end"]


def test_an_instruction_of_llvm_that_touches_memory_of_others_is_found():
    exchange = "  %old = atomicrmw xchg i32* %cell, i32 0 monotonic"
    assert only_in(KERNEL.format(f"{PAYLOAD}\n{exchange}\n{FLAG}"), IN_ORDER)[-1].startswith("atomicrmw xchg")


def test_the_layout_of_blocks_makes_no_difference():
    turned = f"  br label %first\nsecond:\n{FLAG}\n  ret void\nfirst:\n{PAYLOAD}\n  br label %second\nnowhere:"
    assert only_in(IN_ORDER, KERNEL.format(turned)) is None
    assert only_in(KERNEL.format(turned), IN_ORDER) is None


def test_a_call_is_what_the_function_does():
    helper = f"define internal i32 @release(i64 %address) {{\n{FLAG}\n  ret i32 0\n}}\n"
    calls = KERNEL.format(f"{PAYLOAD}\n  %status = call i32 @release(i64 %address)") + helper
    assert only_in(calls, IN_ORDER) is None
    assert only_in(IN_ORDER, calls) is None


def test_a_way_of_the_source_that_no_thread_takes_may_go():
    both = "  br i1 %again, label %one, label %other\none:\n{}\n  br label %last\nother:\n{}\n  br label %last\nlast:"
    assert only_in(IN_ORDER, KERNEL.format(both.format(f"{PAYLOAD}\n{FLAG}", PAYLOAD))) is None
    assert only_in(KERNEL.format(both.format(f"{PAYLOAD}\n{FLAG}", PAYLOAD)), IN_ORDER) == [LOAD, STORE, "end"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"l,~{memory}"(', '"l"(', r'"st.release" became \("l"\), with a side effect'),
        ("asm sideeffect", "asm", r'"st.release" became \("l,~{memory}"\), without a side effect'),
    ],
    ids=["no memory clobber", "no side effect"],
)
def test_a_release_that_could_move_is_found(old, new, words):
    assert FLAG.replace(old, new) != FLAG
    with pytest.raises(LostOrder, match=words):
        check_orders(KERNEL.format(f"{PAYLOAD}\n{FLAG.replace(old, new)}"), IN_ORDER)


def test_a_compiler_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("NBEP_COMPILER", "gcc")
    with pytest.raises(ValueError, match=r"NBEP_COMPILER: got 'gcc'; must be numba-cuda or mlir"):
        compilers.chosen_name()


def compiled_by(compiler, arch, name):
    """The row of `nbep compile`. By mlir this compares the orders, too, or fails."""
    command = [sys.executable, "-m", "nbep", "compile", "--arch", arch, "--kernel", name, "--json"]
    environment = {**os.environ, "NBEP_COMPILER": compiler}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)[0]


@pytest.mark.thorough
@NEEDS_MLIR
@pytest.mark.parametrize(("name", "arch"), CASES)
def test_numba_cuda_mlir_compiles_the_kernel_with_the_same_kinds_of_ordered_instructions(name, arch):
    kernel, other = (compiled_by(one, arch, name)["ordered"] for one in compilers.MODULES)
    assert set(other) == set(kernel)


MOVED = """
from nbep.device.compile import CompileError, compile_kernel
from nbep.device.compilers import numba_cuda_mlir as compiler
from nbep.device.jit import kernel
from nbep.device.primitives import st_release_sys_s32, st_weak_s32
from nbep.device.types import Out

@kernel(max_threads=32)
def message(out: Out):
    st_weak_s32(out, 42)
    st_release_sys_s32(out + 128, 1)

right = compiler.get_llvmir

def moved(compiled):
    lines = right(compiled).split("\\n")
    first, second = [i for i, line in enumerate(lines) if "asm sideeffect" in line]
    lines.insert(second + 1, lines.pop(first))
    return "\\n".join(lines)

for compiler.get_llvmir in (right, moved):
    try:
        print(compile_kernel(message).name)
    except CompileError as error:
        print(error)
"""


@NEEDS_MLIR
def test_a_kernel_whose_store_has_moved_behind_its_release_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", MOVED],
        env={**os.environ, "NBEP_COMPILER": "mlir"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    compiled, refused = done.stdout.splitlines()
    assert compiled == "message"
    assert re.fullmatch(
        r"message for sm_90: the compiler lost an order of memory instructions, so the kernel is not run by it: a "
        r'thread can execute "st\.release\.sys\.global\.s32 .*" \(.*\) as its number 1, which the source does not say; '
        r"use NBEP_COMPILER=numba-cuda",
        refused,
    )
