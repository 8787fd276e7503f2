"""Bulk copies happen later, complete on mbarriers and groups, and need a proxy fence."""

from contextlib import nullcontext

import numpy as np
import pytest
from litmus import store_in_bulk, wait_for

from nbep.emulator import DataRace, DeadlockError, EmulatorError, Misaligned, ProxyFence, World, current_thread

SEEDS = range(12)
FLAG = 32  # behind a row of 32 bytes
MBARRIER = 256  # behind the stage


def test_reading_before_the_mbarrier_sees_old_bytes_under_some_seed(launch):
    x, seen = np.full(64, 7, np.int32), np.zeros(1, np.int32)

    def impatient(x, seen):
        t = current_thread()
        t.store_shared(0, "s32", 1, "weak")
        t.mbarrier_init(MBARRIER, 1)
        t.bulk_load(0, x, 256, MBARRIER)
        t.mbarrier_arrive_expect_tx(MBARRIER, 256)
        for _ in range(4):
            t.syncwarp(1)
        t.store(seen, "s32", t.load_shared(0, "s32", "weak"), "weak", "gpu")

    results = set()
    for seed in SEEDS:
        launch(impatient, x, seen, smem_bytes=264, seed=seed)
        results.add(int(seen[0]))
    assert results == {1, 7}


def test_stage_overwritten_before_the_store_has_read_it_is_seen(launch):
    y = np.zeros(4, np.int32)

    def careless(y, wait):
        t = current_thread()
        t.store_shared(0, "v4", (1, 1, 1, 1), "weak")
        t.fence_proxy_async()
        t.bulk_store(y, 0, 16)
        t.bulk_commit_group()
        if wait:
            t.bulk_wait_group_read(0)
        t.store_shared(0, "v4", (2, 2, 2, 2), "weak")
        t.bulk_wait_group(0)

    def results(wait):
        found = set()
        for seed in SEEDS:
            launch(careless, y, wait, smem_bytes=264, seed=seed)
            found.add(tuple(y.tolist()))
        return found

    assert results(True) == {(1, 1, 1, 1)}
    assert (2, 2, 2, 2) in results(False)


def test_bulk_store_without_a_proxy_fence_is_an_error(launch):
    def unfenced(y):
        t = current_thread()
        t.store_shared(16, "s32", 5, "weak")
        t.bulk_store(y, 16, 16)

    with pytest.raises(ProxyFence, match=r"byte 16 was stored by thread 0 with no fence\.proxy\.async since"):
        launch(unfenced, np.zeros(4, np.int32), smem_bytes=64)


@pytest.mark.parametrize("way", ["stored, then copied out", "loaded, then overwritten", "stored, then overwritten"])
@pytest.mark.parametrize("num_threads", [32, 64])
@pytest.mark.parametrize(
    ("fences_before", "fences_behind", "is_enough"),
    [("all", "none", True), ("none", "issuer", True), ("issuer", "none", False), ("writer", "none", True),
     ("bystander", "none", False), ("none", "writer", False)],
)  # fmt: skip
def test_checked_decides_by_order_whether_a_proxy_fence_is_in_the_right_place(
    launch, num_threads, fences_before, fences_behind, is_enough, way
):
    """The last thread stores or loads, thread 0 starts the copy, and they meet in between."""
    names = {0: "issuer", 1: "bystander", num_threads - 1: "writer"}

    def fence(t, who):
        if who == "all" or names.get(t.thread_idx) == who:
            t.fence_proxy_async()

    def copy(x, y):
        t = current_thread()
        if t.thread_idx == 0:
            t.mbarrier_init(64, 1)
            if way.startswith("loaded"):
                t.bulk_load(0, x, 16, 64)
                t.mbarrier_arrive_expect_tx(64, 16)
        t.barrier(0, t.block_dim)
        if t.thread_idx == t.block_dim - 1:
            if way.startswith("loaded"):
                while not t.mbarrier_try_wait(64, 0):
                    pass
                t.load_shared(0, "v4", "weak")
            else:
                t.store_shared(0, "v4", (1, 2, 3, 4), "weak")
        fence(t, fences_before)
        if t.block_dim == 32:
            t.syncwarp(0xFFFFFFFF)
        else:
            t.barrier(0, 64)
        fence(t, fences_behind)
        if t.thread_idx == 0:
            if way.endswith("out"):
                t.bulk_store(y, 0, 16)
                t.bulk_commit_group()
                t.bulk_wait_group(0)
            else:
                t.bulk_load(0, x, 16, 64)
                t.mbarrier_arrive_expect_tx(64, 16)
                while not t.mbarrier_try_wait(64, int(way.startswith("loaded"))):
                    pass

    found = 0
    x, y = np.zeros(4, np.int32), np.zeros(4, np.int32)
    for seed in SEEDS:
        try:
            launch(copy, x, y, smem_bytes=72, block=num_threads, seed=seed, memory_model="checked")
        except ProxyFence as error:
            found += f"byte 0 was {way.partition(',')[0]} by thread {num_threads - 1}" in str(error)
    assert found == (0 if is_enough else len(SEEDS))


@pytest.mark.parametrize(("fencing_block", "is_enough"), [(0, False), (1, False), (2, True)])
def test_checked_asks_for_a_proxy_fence_of_global_memory_in_the_block_that_starts_the_copy(
    launch, fencing_block, is_enough
):
    """Block 0 stores, block 1 passes on that it has, block 2 copies."""

    def pass_on(memory, flags):
        t = current_thread()
        block = t.block_idx
        while block > 0 and t.load(flags + 4 * block, "s32", "acquire", "gpu") == 0:
            t.spin(1 << 62)
        if block == 0:
            t.store(memory, "s32", 1, "weak", "gpu")
        if block == fencing_block:
            t.fence_proxy_async_global()
        if block < 2:
            t.store(flags + 4 * block + 4, "s32", 1, "release", "gpu")
        else:
            t.mbarrier_init(0, 1)
            t.bulk_load(16, memory, 16, 0)
            t.mbarrier_arrive_expect_tx(0, 16)
            while not t.mbarrier_try_wait(0, 0):
                pass

    for seed in range(4):
        with nullcontext() if is_enough else pytest.raises(DataRace, match=r"no fence.proxy.async.global comes before"):
            arrays = np.zeros(4, np.int32), np.zeros(4, np.int32)
            launch(pass_on, *arrays, grid=3, smem_bytes=64, seed=seed, memory_model="checked")


def test_copies_outside_16_byte_units_are_errors(launch):
    with pytest.raises(Misaligned, match="multiples of 16"):
        launch(lambda y: current_thread().bulk_store(y, 4, 16), np.zeros(4, np.int32), smem_bytes=64)
    with pytest.raises(Misaligned, match="multiples of 16"):
        launch(lambda y: current_thread().bulk_store(y, 0, 8), np.zeros(4, np.int32), smem_bytes=64)


def test_leaving_while_a_store_still_reads_is_an_error(launch):
    def hasty(y):
        t = current_thread()
        t.store_shared(0, "v4", (1, 2, 3, 4), "weak")
        t.fence_proxy_async()
        t.bulk_store(y, 0, 16)

    with pytest.raises(EmulatorError, match=r"wait_group\.read is missing"):
        launch(hasty, np.zeros(4, np.int32), smem_bytes=64, seed=3)


def test_mbarrier_that_lacks_bytes_is_reported(launch):
    def expects_too_much(x):
        t = current_thread()
        t.mbarrier_init(MBARRIER, 1)
        t.bulk_load(0, x, 16, MBARRIER)
        t.mbarrier_arrive_expect_tx(MBARRIER, 32)
        while not t.mbarrier_try_wait(MBARRIER, 0):
            pass

    x = np.zeros(4, np.int32)
    for on_deadlock in ("raise", "expire"):  # nothing here looks at a clock
        with pytest.raises(DeadlockError, match="whose phase 0 still lacks"):
            launch(expects_too_much, x, smem_bytes=264, on_deadlock=on_deadlock)


def test_wait_for_an_mbarrier_can_be_bounded(launch):
    late = np.zeros(1, np.int32)

    def bounded(late):
        t = current_thread()
        t.mbarrier_init(MBARRIER, 1)
        deadline = t.globaltimer() + 1000
        while not t.mbarrier_try_wait(MBARRIER, 0):
            if t.spin(deadline):
                t.store(late, "s32", 1, "weak", "gpu")
                return

    launch(bounded, late, smem_bytes=264, on_deadlock="expire")
    assert late[0] == 1


def test_waiting_for_all_but_more_groups_than_there_are_waits_for_none(launch):
    """The stage is written again at once, so that some seed sends the later bytes."""

    def hasty(y):
        t = current_thread()
        for i in range(2):
            t.store_shared(16 * i, "v4", (1, 1, 1, 1), "weak")
            t.fence_proxy_async()
            t.bulk_store(y + 16 * i, 16 * i, 16)
            t.bulk_commit_group()
        t.bulk_wait_group_read(3)
        t.store_shared(0, "v4", (2, 2, 2, 2), "weak")
        t.bulk_wait_group(0)

    seen = set()
    for seed in SEEDS:
        y = np.zeros(8, np.int32)
        launch(hasty, y, smem_bytes=64, seed=seed)
        seen.add(int(y[0]))
    assert seen == {1, 2}


@pytest.mark.parametrize("waits_for", ["bulk_wait_group", "bulk_wait_group_read"])
def test_a_bulk_store_without_a_wait_is_not_over_when_its_thread_has_left(waits_for):
    """Rank 1 reads in a kernel of its own: that the kernel which stores has ended, only the stream of rank 0 knows."""

    def write(ring):
        t = current_thread()
        store_in_bulk(t, ring)
        t.bulk_commit_group()
        getattr(t, waits_for)(0)
        t.store(ring + FLAG, "s32", 1, "release", "sys")

    def wait(ring):
        wait_for(ring + FLAG)
        for _ in range(100):  # the other thread leaves meanwhile
            current_thread().globaltimer()

    def load(ring):
        current_thread().load(ring, "s32", "weak", "cta")

    def is_race(seed):
        world = World(2, seed, memory_model="checked", strategy="late")
        ring = world.ranks[1].space.allocate(64, "ring", zero=True)
        theirs = world.ranks[0].space.open(ring.handle).address
        world.ranks[0].create_stream("write").launch(write, (theirs,), 1, 1, 32)
        reading = world.ranks[1].create_stream("read")
        for kernel in (wait, load):
            reading.launch(kernel, (ring.address,), 1, 1)
        try:
            reading.synchronize()
        except DataRace as error:
            return "not been waited for: a wait_group is missing" in str(error)
        return False

    assert any(map(is_race, SEEDS)) == (waits_for == "bulk_wait_group_read")
