"""Which look reads which store: each store that was read has an arrow, and nothing else has."""

import pytest
from parts import both_parts
from traced_runs import MODES, traced_run

from nbep.device.primitives import ld_acquire_sys_s32, st_release_sys_s32
from nbep.emulator import World
from nbep.lab.trace import Trace
from nbep.lab.trace.events import Cell, Event, readings

CELL = Cell.parse(0, "flag")


def happened(*what: tuple[int, str, int, str]) -> list[Event]:
    """Events from (rank, what, value, order), a step each."""
    return [
        Event(step, kind, rank, "kernel", 0, 0, 0, "kernel", CELL, value, order)
        for step, (rank, kind, value, order) in enumerate(what)
    ]


def pairs(*what: tuple[int, str, int, str]) -> list[tuple[int, int]]:
    return [tuple(pair) for pair in readings(happened(*what))]


def test_a_look_reads_the_latest_store_of_its_value():
    assert pairs((0, "store", 1, "release"), (0, "store", 2, "release"), (1, "see", 2, "acquire")) == [(1, 2)]


def test_a_store_that_arrives_late_is_read_although_the_next_one_was_issued():
    assert pairs((0, "store", 1, ""), (0, "store", 2, ""), (1, "see", 1, ""), (1, "see", 2, "")) == [(0, 2), (1, 3)]


def test_each_thread_that_looks_has_an_arrow_and_the_one_that_stored_has_none():
    assert pairs((0, "store", 1, ""), (0, "see", 1, ""), (1, "see", 1, ""), (2, "see", 1, "")) == [(0, 2), (0, 3)]


def test_who_reads_an_atomic_reads_what_it_was_added_to():
    assert pairs((0, "store", 1, "release"), (1, "atomic", 3, "relaxed"), (2, "see", 3, "acquire")) == [(1, 2), (0, 2)]


def test_who_reads_a_store_does_not_read_what_it_overwrote():
    assert pairs((0, "atomic", 1, "release"), (1, "store", 3, "relaxed"), (2, "see", 3, "acquire")) == [(1, 2)]


def test_an_atomic_that_acquires_reads_what_stood_there():
    assert pairs((0, "atomic", 1, "acq_rel"), (1, "atomic", 2, "acq_rel"), (2, "atomic", 3, "release")) == [(0, 1)]


@pytest.mark.parametrize("mode", both_parts(MODES[:2], thorough=MODES[2:]))
def test_a_look_comes_after_the_store_that_it_reads(mode):
    events = traced_run(mode).events()
    found = list(readings(events))
    assert len(found) > 20
    for stored, seen in found:
        assert events[stored].cell == events[seen].cell
        assert events[stored].step <= events[seen].step


def test_each_signal_of_a_barrier_to_another_rank_is_read_by_who_waits_for_it_there():
    events = traced_run("intranode").events(["store", "atomic", "see"], cell="barrier_signal")
    found = list(readings(events))
    signals = [i for i, event in enumerate(events) if event.what != "see" and event.rank != event.cell.owner]
    assert len(signals) == 4  # of two barriers, between two ranks
    for signal in signals:
        (seen,) = [events[pair.seen] for pair in found if pair.stored == signal]
        assert seen.rank == events[signal].cell.owner
        assert seen.call == events[signal].call
        assert seen.cell.text == f"barrier_signal[rank {events[signal].rank}]"


def test_a_value_that_is_stored_again_is_seen_again():
    def kernel(flag):
        for value in (1, 1, 2):
            st_release_sys_s32(flag, value)
            ld_acquire_sys_s32(flag)
            ld_acquire_sys_s32(flag)

    trace = Trace()
    world = World(1, seed=1, tracer=trace)

    def host():
        flag = world.ranks[0].space.allocate(4, "flag", zero=True)
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (flag.address,), 1, 1)
        stream.synchronize()

    world.run([host])
    assert [event.value for event in trace.events("see", cell="flag")] == [1, 1, 2]
