"""Stacks of threads, the switch between them, and what an overflow comes to."""

import ctypes
import random
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

import llvmlite.binding as llvm

from nbep.device.engine import Code
from nbep.emulator.engine import state, switch
from nbep.emulator.engine.state import DIRECTORY, TABLES, Tables
from nbep.emulator.engine.switch import GUARD_BYTES, STACK_BYTES, STACK_PITCH, Stacks, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
PING_PONG = """
@pointers = global [2 x i64] zeroinitializer
@count = global i64 0
@sum = global double 0.0
define void @other() {
start:
  br label %again
again:
  %kept = phi double [ 0.5, %start ], [ %next, %again ]
  %n = load i64, ptr @count
  %m = add i64 %n, 1
  store i64 %m, ptr @count
  %next = fadd double %kept, 1.0
  store double %next, ptr @sum
  %to = load i64, ptr @pointers
  call void @nbep_switch(ptr getelementptr ([2 x i64], ptr @pointers, i64 0, i64 1), i64 %to)
  br label %again
}
define i64 @run(i64 %pointer, i64 %times) {
start:
  store i64 %pointer, ptr getelementptr ([2 x i64], ptr @pointers, i64 0, i64 1)
  br label %again
again:
  %i = phi i64 [ 0, %start ], [ %next, %again ]
  %to = load i64, ptr getelementptr ([2 x i64], ptr @pointers, i64 0, i64 1)
  call void @nbep_switch(ptr @pointers, i64 %to)
  %next = add i64 %i, 1
  %more = icmp slt i64 %next, %times
  br i1 %more, label %again, label %done
done:
  %n = load i64, ptr @count
  ret i64 %n
}
define i64 @where_other() { ret i64 ptrtoint (ptr @other to i64) }
"""


@pytest.fixture(scope="module")
def ping_pong():
    from nbep.emulator.engine.build import target_machine

    module = llvm.parse_assembly(switch.switch_module() + PING_PONG)
    engine = llvm.create_mcjit_compiler(module, target_machine())
    engine.finalize_object()
    return engine


def test_a_thread_goes_on_where_it_has_given_way(ping_pong):
    stacks = Stacks(4)
    stacks.open(4)
    entry = ctypes.CFUNCTYPE(ctypes.c_int64)(ping_pong.get_function_address("where_other"))()
    run = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(ping_pong.get_function_address("run"))
    assert run(int(stacks.prepare(3, 1, entry)[0]), 1000) == 1000
    assert ctypes.c_double.from_address(ping_pong.get_global_value_address("sum")).value == 1000.5


@pytest.mark.parametrize(("platform", "machine"), [("win32", "x86_64"), ("linux", "riscv64")])
def test_a_machine_without_a_switch_is_named(platform, machine, monkeypatch):
    monkeypatch.setattr(switch.sys, "platform", platform)
    monkeypatch.setattr(switch, "machine", lambda: machine)
    assert {"win32": "win32", "linux": "riscv64"}[platform] in switch.why_not()


def test_below_each_stack_lies_a_guard():
    stacks = Stacks(3)
    stacks.open(3)
    for thread in range(3):
        top = stacks.begin + (thread + 1) * STACK_PITCH
        ctypes.memset(top - STACK_BYTES, 1, STACK_BYTES)
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [(int(a, 16), int(b, 16), rest[0]) for where, *rest in maps for a, b in [where.split("-")]]
    for thread in range(3):
        guard = stacks.begin + thread * STACK_PITCH
        assert any(a <= guard and guard + GUARD_BYTES <= b and mode == "---p" for a, b, mode in ranges)


def test_tables_begin_as_zeros_and_belong_to_one_run():
    one, other = Tables(), Tables()
    one.threads["rank"][5] = 3
    assert other.threads["rank"][5] == 0
    other.use()
    assert DIRECTORY[list(TABLES).index("threads")] == state.address_of(other.threads)
    assert one.run["calls"] == 0
    assert all(np.all(rows[:4].view(np.uint8) == 0) for rows in other.rows.values())


def test_random_numbers_are_those_of_python():
    from nbep.emulator.engine.stand_ins import SharedRandom

    theirs = random.Random(7)
    tables = Tables()
    ours = SharedRandom(tables, Code().machine(), theirs.getstate())
    assert [ours.random() for _ in range(2000)] == [theirs.random() for _ in range(2000)]
    assert [ours.randrange(4032) for _ in range(900)] == [theirs.randrange(4032) for _ in range(900)]
