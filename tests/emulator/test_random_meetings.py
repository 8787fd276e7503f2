"""Lanes that meet, and messages: `checked` finds the races that vector clocks of single lanes find.

A program is a list of events, drawn in an order that can happen. It has no choices: what orders two accesses orders
them in each run, and an oracle of a few lines says which are not ordered.
"""

import random

import pytest
from every_schedule import run_all
from parts import both_parts

from nbep.emulator import DataRace, World, current_thread

WARPS, LANES = 2, 3
THREADS = [32 * warp + lane for warp in range(WARPS) for lane in range(LANES)]
SEEDS = range(6)


def draw(seed):
    """Events: (store or load, a thread, a cell); (meet, threads of a warp); (send, two threads, a flag).

    Most accesses that would race with those before them are left out.
    """
    draws = random.Random(seed)
    events = []
    for flag in range(draws.randint(6, 16)):
        what = draws.random()
        if what < 0.5:
            access = draws.choice(("store", "store", "load")), draws.choice(THREADS), draws.randrange(2)
            if draws.random() < 0.05 or not has_race([*events, access]):
                events.append(access)
        elif what < 0.85:
            warp = draws.randrange(WARPS)
            lanes = draws.sample(range(LANES), draws.randint(2, LANES))
            events.append(("meet", *sorted(32 * warp + lane for lane in lanes)))
        else:
            events.append(("send", *draws.sample(THREADS, 2), flag))
    return events


def has_race(events):
    """Whether two accesses to a cell, one of them a store, are not ordered."""
    clocks = {thread: dict.fromkeys(THREADS, 0) for thread in THREADS}
    before = []
    for name, *of in events:
        if name in ("store", "load"):
            thread, cell = of
            for other, at, other_cell, is_store in before:
                if other_cell == cell and (is_store or name == "store") and clocks[thread][other] < at:
                    return True
            clocks[thread][thread] += 1
            before.append((thread, clocks[thread][thread], cell, name == "store"))
        else:
            who = of if name == "meet" else of[:2]
            known = {thread: max(clocks[one][thread] for one in who) for thread in THREADS}
            for one in who if name == "meet" else who[1:]:
                clocks[one] = dict(known)
    return False


def run(events, strategy, seed=0):
    """Whether a run finds a race."""
    world = World(1, seed, memory_model="checked", strategy=strategy)
    cells = world.ranks[0].space.allocate(512, "cells", zero=True)

    def kernel(base):
        t = current_thread()
        for name, *of in events:
            if t.thread_idx not in (of if name == "meet" else of[:2] if name == "send" else of[:1]):
                continue
            if name == "meet":
                t.syncwarp(sum(1 << one % 32 for one in of))
            elif name == "send" and t.thread_idx == of[0]:
                t.store(base + 64 + 16 * of[2], "s32", 1, "release", "cta")
            elif name == "send":
                while t.load(base + 64 + 16 * of[2], "s32", "acquire", "cta") == 0:
                    t.spin(1 << 62)
            elif name == "store":
                t.store(base + 16 * of[1], "s32", 1, "weak", "cta")
            else:
                t.load(base + 16 * of[1], "s32", "weak", "cta")

    def host():
        stream = world.ranks[0].create_stream("main")
        stream.launch(kernel, (cells.address,), 1, 32 * WARPS)
        stream.synchronize()

    try:
        world.run([host])
    except DataRace:
        return True
    return False


def finds_race(events):
    """Whether some schedule does."""
    return True in run_all(lambda strategy: run(events, strategy))[1]


@pytest.mark.parametrize("seeds", both_parts([range(60)], [range(60, 300)], long=[range(300, 2000)]))
def test_every_schedule_finds_just_the_races_that_there_are(seeds):
    found = [(seed, finds_race(draw(seed))) for seed in seeds]
    assert found == [(seed, has_race(draw(seed))) for seed in seeds]
    assert len({is_found for _, is_found in found}) == 2


@pytest.mark.parametrize("seeds", both_parts([range(40)], [range(60, 300)], long=[range(300, 1000)]))
def test_no_seed_calls_a_race_what_is_ordered(seeds):
    for seed in seeds:
        events = draw(seed)
        if not has_race(events):
            assert not any(run(events, "uniform", other) for other in SEEDS), (seed, events)


def test_lanes_that_meet_know_nothing_of_one_that_does_not():
    """Lane 2 stores, and leaves. Lanes 0 and 1 meet, and lane 0 reads."""
    events = [("store", 2, 0), ("meet", 0, 1), ("load", 0, 0)]
    assert finds_race(events)
    assert all(run(events, "uniform", seed) for seed in range(20))


def test_who_met_a_lane_takes_what_it_knows_to_the_next_meeting():
    assert not finds_race([("store", 2, 0), ("meet", 1, 2), ("meet", 0, 1), ("load", 0, 0)])
    assert finds_race([("meet", 1, 2), ("store", 2, 0), ("meet", 0, 1), ("load", 0, 0)])
    assert not finds_race([("store", 2, 0), ("meet", 1, 2), ("send", 1, 32, 0), ("load", 32, 0)])
    assert finds_race([("store", 2, 0), ("meet", 0, 1), ("send", 1, 32, 0), ("load", 32, 0)])


def test_who_arrives_and_goes_on_tells_nothing_of_what_comes_after():
    """Warp 0 arrives at a barrier, and one of its lanes stores behind that. Warp 1 waits there, and reads."""

    def program(strategy):
        world = World(1, 0, memory_model="checked", strategy=strategy)
        cell = world.ranks[0].space.allocate(16, "cell", zero=True)

        def kernel(address):
            t = current_thread()
            if t.warp == 1:
                t.barrier(1, 64)
                t.load(address, "s32", "weak", "cta")
            else:
                t.barrier_arrive(1, 64)
                if t.lane == 0:
                    t.store(address, "s32", 1, "weak", "cta")
                    t.fence("acq_rel", "cta")

        def host():
            stream = world.ranks[0].create_stream("main")
            stream.launch(kernel, (cell.address,), 1, 64)
            stream.synchronize()

        world.run([host])

    with pytest.raises(DataRace):
        run_all(program)
