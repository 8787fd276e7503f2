"""Litmus tests of the memory model "checked": which accesses something orders, and what is said of the others."""

import re

import numpy as np
import pytest
from litmus import MBARRIER, SEEDS, pass_message, races, store_in_bulk, wait_for

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


@pytest.mark.parametrize(("waits", "fences"), [(True, True), (False, True), (True, False)])
def test_bulk_copies_need_waits_and_the_proxys_fence(waits, fences):
    """A row goes by bulk copies from the writer to the ring, and from there to the reader's shared memory."""

    def write(t, ring):
        store_in_bulk(t, ring)
        t.bulk_commit_group()
        t.bulk_wait_group_read(0)
        if waits:
            t.bulk_wait_group(0)
        t.store(ring + TAIL, "s32", 1, "release", "sys")
        t.bulk_wait_group(0)

    def read_bulk(t, ring):
        t.mbarrier_init(MBARRIER, 1)
        wait_for(ring + TAIL)
        if fences:
            t.fence_proxy_async_global()
        t.bulk_load(0, ring, 32, MBARRIER)
        t.mbarrier_arrive_expect_tx(MBARRIER, 32)
        while not t.mbarrier_try_wait(MBARRIER, 0):
            pass
        t.load_shared(28, "s32", "weak")

    found = races(write, read_bulk, ranks=2)
    assert found == 0 if waits and fences else found > 0


def take_payload(head_first=False):
    """A reader that moves the head, with a relaxed store, when it has taken the payload, or before."""

    def read(t, ring):
        wait_for(ring + TAIL)
        if head_first:
            t.store(ring + HEAD, "s32", 1, "relaxed", "sys")
        load_payload(t, ring)
        if not head_first:
            t.store(ring + HEAD, "s32", 1, "relaxed", "sys")

    return read


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
    "wait", [lambda t, head: wait_for(head, "relaxed"), lane_0_waits_and(lambda t: t.syncwarp(0xFFFFFFFF))]
)
def test_a_relaxed_head_says_that_a_load_is_over(wait):
    assert races(store_twice(wait), take_payload(), ranks=2, block=32) == 0


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
    assert races(store_twice(lane_0_waits_and(meet)), take_payload(), ranks=2, block=32) == len(SEEDS)


def test_a_store_over_a_load_whose_end_is_not_signalled_is_found():
    def wait_for_nothing(t, head):
        for _ in range(200):
            t.globaltimer()

    assert races(store_twice(wait_for_nothing), take_payload(), ranks=2) > 0
    assert races(store_twice(lambda t, head: wait_for(head, "relaxed")), take_payload(head_first=True), ranks=2) > 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_bulk_load_is_over_when_its_mbarrier_has_been_waited_for(waits):
    def read_bulk(t, ring):
        t.mbarrier_init(MBARRIER, 1)
        wait_for(ring + TAIL)
        t.fence_proxy_async_global()
        t.bulk_load(0, ring, 32, MBARRIER)
        t.mbarrier_arrive_expect_tx(MBARRIER, 32)
        while waits and not t.mbarrier_try_wait(MBARRIER, 0):
            pass
        t.store(ring + HEAD, "s32", 1, "relaxed", "sys")

    writer = store_twice(lambda t, head: wait_for(head, "relaxed"))
    assert races(writer, read_bulk, ranks=2) == (0 if waits else len(SEEDS))


@pytest.mark.parametrize("waits", [True, False])
def test_a_stage_is_free_when_the_bulk_store_has_read_it(launch, waits):
    def store_two(y):
        t = current_thread()
        for i in range(2):
            for k in range(8):
                t.store_shared(4 * k, "s32", i, "weak")
            t.fence_proxy_async()
            t.bulk_store(y + 32 * i, 0, 32)
            t.bulk_commit_group()
            if waits:
                t.bulk_wait_group_read(0)
        t.bulk_wait_group(0)

    y = np.zeros(16, np.int32)
    if waits:
        launch(store_two, y, smem_bytes=64, memory_model="checked")
        np.testing.assert_array_equal(y, np.arange(16) // 8)
    else:
        with pytest.raises(
            DataRace,
            match=r"not been waited for: a wait_group.read is missing\n(.|\n)*  weak store to 4 bytes that a bulk copy",
        ):
            launch(store_two, y, smem_bytes=64, memory_model="checked")


def test_bytes_that_come_by_bulk_are_not_there_before_the_mbarrier(launch):
    def impatient(x):
        t = current_thread()
        t.store_shared(0, "s32", 1, "weak")
        t.fence_proxy_async()
        t.mbarrier_init(MBARRIER, 1)
        t.bulk_load(0, x, 256, MBARRIER)
        t.mbarrier_arrive_expect_tx(MBARRIER, 256)
        for _ in range(40):
            t.load_shared(0, "s32", "weak")

    def run_all():
        for seed in SEEDS:
            launch(impatient, np.zeros(64, np.int32), smem_bytes=264, seed=seed, memory_model="checked")

    with pytest.raises(DataRace, match="by a bulk copy of"):
        run_all()


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
