"""Compiled code stops where Python reports something, and nowhere else: random programs, and races under `checked`."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from drawn_programs import draw
from engine_programs import of_oracle, run
from engine_runs import end_of
from litmus_programs import in_oracle, random_program
from oracle_programs import SHAPES
from parts import both_parts

import nbep
from nbep.device import primitives as ptx
from nbep.emulator import World
from nbep.emulator.engine import state
from nbep.emulator.engine.checked_world import CheckedWorld
from nbep.lab.litmus import PROGRAMS
from nbep.lang import I32, In, InOut, kernel

NEVER = 1 << 62
ORDERED = state.REASONS[state.RACE]


def programs_of(part):
    """Drawn for both engines, those of the oracle, and litmus tests."""
    for seed in range(20 * part, 20 * (part + 1)):
        yield seed, draw(seed)
    for seed in range(2 * part, 2 * (part + 1)):
        yield from ((seed, of_oracle(shape(seed))) for shape in SHAPES.values())
    for seed, program in enumerate([*PROGRAMS[part::8], *map(random_program, range(8 * part, 8 * (part + 1)))]):
        yield seed, of_oracle(in_oracle(program))


@pytest.mark.parametrize("memory_model", both_parts(["checked"], ["delayed"]))
@pytest.mark.parametrize("part", both_parts([0, 1], range(2, 8)))
def test_random_programs_end_alike(part, memory_model):
    """At the same primitive call, and with the same memory, signals and draws where nothing is wrong."""
    ends: Counter[str | None] = Counter()
    strategy = "late" if memory_model == "delayed" and part % 2 else "uniform"
    for seed, program in programs_of(part):
        interpreted, compiled = (
            end_of(partial(run, program=program), len(program.hosts), engine, seed, memory_model, strategy=strategy)
            for engine in ("python", "compiled")
        )
        ends[interpreted.error] += 1
        if interpreted.error is None:
            assert compiled == interpreted, (seed, program)
        else:
            assert compiled.error is not None, (seed, program, interpreted)
            if interpreted.error == "DataRace" and not compiled.error.startswith("a host"):
                assert compiled.error.endswith(ORDERED), (seed, program)
                assert compiled.at == interpreted.at, (seed, program)
    assert ends[None] >= 20
    assert ends["DataRace"] >= 20 or memory_model == "delayed"


@pytest.mark.parametrize("seeds", both_parts([range(60)], [range(60, 240)]))
def test_clocks_that_are_used_again_hide_no_race(seeds, monkeypatch):
    """A warp that gets the clock of one whose launch is over at once: what that has done is not known by it."""
    again: list[int] = []
    new_clock = CheckedWorld.new_clock

    def used_clock(self):
        if not self._retired:
            return new_clock(self)
        again.append(1)
        return self._retired.popleft()

    monkeypatch.setattr(CheckedWorld, "new_clock", used_clock)
    for seed in seeds:
        program = draw(f"again {seed}")
        interpreted, compiled = (
            end_of(partial(run, program=program), len(program.hosts), engine, seed) for engine in ("python", "compiled")
        )
        assert interpreted.error is None or compiled.error is not None, seed
    assert len(again) > 20


@kernel(max_threads=64)
def hand_over(memory: InOut, inputs: In, kind: I32):
    """Thread 0 stores, and tells thread 40 by a relaxed store; kind 1: which loads that; 2: and as constant."""
    if ptx.thread_idx() == 0:
        ptx.st_weak_s32(memory, ptx.ld_weak_s32(inputs))
        ptx.st_relaxed_sys_s32(memory + 64, 1)
    elif ptx.thread_idx() == 40:
        while ptx.ld_relaxed_sys_s32(memory + 64) == 0:
            ptx.wait_expired(NEVER)
        if kind == 1:
            ptx.ld_weak_s32(memory)
        elif kind == 2:
            ptx.ld_nc_s32(memory)


def spawned(engine, kind, change=False):
    """A run of it: what memory is, or the error as text."""

    def main(comm):
        memory, inputs = np.zeros(64, np.int32), np.full(4, 7, np.int32)
        stream = comm.runtime.create_stream("own")
        for _ in range(2):
            comm.runtime.launch(stream, hand_over, 1, 64, 0, memory, inputs, kind)
        if change:
            inputs[:] = 8
        stream.synchronize()
        return memory.tolist()

    try:
        return nbep.spawn(main, 1, "emulator", memory_model="checked", engine=engine)
    except nbep.EmulatorError as error:
        return type(error).__name__, str(error), error.__notes__


@pytest.mark.parametrize(("kind", "change"), [(1, False), (2, False), (0, True)])
def test_the_report_is_that_of_python(kind, change):
    """Also of an input that the host changes."""
    compiled = spawned("compiled", kind, change)
    assert compiled == spawned("python", kind, change)
    assert compiled[0] == "DataRace"


def test_a_false_alarm_costs_only_time(monkeypatch):
    """What Python does counts: a detector that forgets what is before a kernel in its stream gives the right result."""
    worlds = []
    start, explain = CheckedWorld.start_launch, World.__init__
    monkeypatch.setattr(World, "__init__", lambda self, *a, **b: worlds.append(type(self)) or explain(self, *a, **b))
    monkeypatch.setattr(
        CheckedWorld, "start_launch", lambda self, launch, stores, loads: start(self, launch, 0 * stores, 0 * loads)
    )
    assert spawned("compiled", 0) == spawned("python", 0)
    first = worlds.index(CheckedWorld)
    assert worlds[first + 1] is World  # which has run it again
