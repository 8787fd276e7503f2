"""Litmus tests of the memory model "checked": which accesses something orders, and what is said of the others."""

import re

import pytest
from litmus import SEEDS, pass_message, races, wait_for

from nbep.device.primitives import fault_reported
from nbep.emulator import DataRace, World, current_thread

PAYLOAD, TAIL, HEAD, STARTED = 0, 32, 64, 96


def store_and(publish):
    def write(t, ring):
        if t.thread_idx == t.block_dim - 1:
            t.store(ring + PAYLOAD, "s32", 1, "weak", "cta")
        publish(t, ring + TAIL)

    return write


def load_payload(t, ring):
    assert t.load(ring + PAYLOAD, "s32", "weak", "cta") == 1


def read(t, ring):
    wait_for(ring + TAIL)
    load_payload(t, ring)


def store_tail(order, scope="sys"):
    def publish(t, tail):
        if t.thread_idx == 0:
            t.store(tail, "s32", 1, order, scope)

    return publish


@pytest.mark.parametrize(
    ("meet", "block", "is_enough"),
    [
        (lambda t: t.barrier(1, 64), 64, True),
        (lambda t: t.barrier(1, 64) if t.thread_idx < 32 else t.barrier_arrive(1, 64), 64, True),
        (lambda t: t.syncwarp(0xFFFFFFFF), 32, True),
        (lambda t: t.shfl("idx", 0xFFFFFFFF, 0, 0), 32, False),
        (lambda t: t.vote("any", 0xFFFFFFFF, True), 32, False),
        (lambda t: None, 64, False),
    ],
    ids=["bar.sync", "bar.arrive", "syncwarp", "shfl", "vote", "nothing"],
)
def test_a_release_speaks_for_those_that_its_thread_has_met(meet, block, is_enough):
    def publish(t, tail):
        meet(t)
        store_tail("release")(t, tail)

    found = races(store_and(publish), read, ranks=2, block=block)
    assert found == 0 if is_enough else found > 0


def take_payload(t, ring):
    """A reader that moves the head, with a relaxed store, when it has taken the payload."""
    read(t, ring)
    t.store(ring + HEAD, "s32", 1, "relaxed", "sys")


def store_twice(wait):
    """A writer that stores to the payload again, from its last lane, after wait(t, head)."""

    def write(t, ring):
        if t.thread_idx == t.block_dim - 1:
            t.store(ring + PAYLOAD, "s32", 1, "weak", "cta")
            t.store(ring + TAIL, "s32", 1, "release", "sys")
        wait(t, ring + HEAD)
        if t.thread_idx == t.block_dim - 1:
            t.store(ring + PAYLOAD, "s32", 1, "weak", "cta")

    return write


def lane_0_waits_and(meet):
    def wait(t, head):
        if t.thread_idx == 0:
            wait_for(head, "relaxed")
        meet(t)

    return wait


@pytest.mark.parametrize(
    "meet", [lambda t: t.vote("all", 0xFFFFFFFF, True), lambda t: t.shfl("idx", 0xFFFFFFFF, 0, 0)], ids=["vote", "shfl"]
)
def test_a_vote_or_a_shuffle_does_not_say_that_a_load_is_over(meet):
    """Neither among the lanes of a warp, nor for what one of them has heard."""

    def load_and_meet(t, ring):
        if t.thread_idx == 0:
            t.load(ring + PAYLOAD, "s32", "weak", "cta")
        meet(t)
        if t.thread_idx == 1:
            t.store(ring + PAYLOAD, "s32", 1, "weak", "cta")

    assert races(load_and_meet, lambda t, ring: None, ranks=1, block=32) == len(SEEDS)
    assert races(store_twice(lane_0_waits_and(meet)), take_payload, ranks=2, block=32) == len(SEEDS)


def test_the_report_names_both_threads_both_lines_and_the_cell_that_was_polled():
    with pytest.raises(DataRace) as caught:
        pass_message(store_and(store_tail("relaxed")), read, ranks=2)
    lines = [re.sub(r"py:\d+", "py:N", line) for line in str(caught.value).splitlines()]
    assert [re.sub(r"at \S*(test_data_races|litmus)", r"at \1", line) for line in lines] == [
        (
            "the store to `memory` of rank 1: byte 32 is too weak to order the store before this load: "
            "with relaxed.sys order it releases nothing, and no fence comes before it"
        ),
        "  at test_data_races.py:N (write)",
        '      t.store(ring + PAYLOAD, "s32", 1, "weak", "cta")',
        "    stored with weak order by rank 0, kernel `write`, block 0, warp 0, lane 0 (thread 0)",
        "  at test_data_races.py:N (load_payload)",
        '      assert t.load(ring + PAYLOAD, "s32", "weak", "cta") == 1',
        "    loaded with weak order by rank 1, kernel `read`, block 0, warp 0, lane 0 (thread 0)",
        "  weak load of 4 bytes that another thread has stored",
        "  in `memory` of rank 1: byte 0",
        "  signal in `memory` of rank 1: byte 32",
        "    at test_data_races.py:N (publish)",
        '        t.store(tail, "s32", 1, order, scope)',
        "      stored with relaxed.sys order by rank 0, kernel `write`, block 0, warp 0, lane 0 (thread 0)",
        "    at litmus.py:N (wait_for)",
        '        while t.load(flag, "s32", order, scope) < at_least:',
        "      loaded with acquire.sys order by rank 1, kernel `read`, block 0, warp 0, lane 0 (thread 0)",
    ]


def test_two_launches_of_a_kernel_can_be_distinguished():
    world = World(1, memory_model="checked")
    cell = world.ranks[0].space.allocate(8, "cell", zero=True)

    def store(cell):
        t = current_thread()
        t.atomic("add", cell + 4, "s32", 1, "relaxed", "sys")
        wait_for(cell + 4, "relaxed", at_least=2)
        t.store(cell, "s32", 1, "weak", "cta")

    streams = [world.ranks[0].create_stream(name) for name in ("one", "two")]
    for stream in streams:
        stream.launch(store, (cell.address,), 1, 1)
    with pytest.raises(DataRace) as caught:
        streams[0].synchronize()
    assert sorted(re.findall(r"kernel `store`(.*), block", str(caught.value))) == ["", ", launch 2"]


def test_nothing_is_checked_once_a_kernel_has_reported_a_fault():
    def read_at_once(report):
        def read(t, ring):
            wait_for(ring + TAIL, "relaxed")
            report()
            t.load(ring + PAYLOAD, "s32", "weak", "cta")

        return read

    assert races(store_and(store_tail("release")), read_at_once(lambda: None), ranks=2) == len(SEEDS)
    assert races(store_and(store_tail("release")), read_at_once(fault_reported), ranks=2) == 0
