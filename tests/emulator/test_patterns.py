"""Programs that PTX orders in less common ways, and some that look ordered and are not: what "checked" says of them.

It finds nothing in the ones, and a race in the others under every seed, and says why. What is about two cells is
written as steps of a litmus test (see nbep/lab/litmus/programs.py); what is about warps and copies, as kernels.

Source: PTX ISA, Memory Consistency Model (Release and Acquire Patterns, Causality Order), Async proxy
"""

import pytest
from every_schedule import run_all
from litmus import (
    DATA,
    FLAG,
    FLAG_2,
    MBARRIER,
    load_in_bulk,
    put,
    read_payload,
    run_together,
    store_in_bulk,
    take,
    wait_for,
    write_words,
)

from nbep.emulator import DataRace, Uninitialized
from nbep.lab.litmus import Program
from nbep.lab.litmus.runs import run

WRITE, READ = "st.weak d 1; st.release f 1", "wait.acquire f 1; ld.weak r0 d"


def stores(count):
    return "; ".join(f"st.relaxed f {number + 1}" for number in range(count))


# Threads, each on a rank of its own.
ORDERED = {
    "relaxed store behind a release": (f"{WRITE}; st.relaxed f 2", "wait.acquire f 2; ld.weak r0 d"),
    "acquire behind a relaxed load of the same cell": (WRITE, "wait.relaxed g 1; st.relaxed f 2",
        "wait.relaxed f 1; st.relaxed g 1; wait.acquire f 2; ld.weak r0 d"),
    "narrow fence behind a wide one": ("st.weak d 1; fence.acq_rel; fence.acq_rel.cta; st.relaxed f 1", READ),
    "flag that its reader resets": ("st.relaxed f 1", "wait.relaxed f 1; st.weak f 0"),
    "flag that another rank passes on": ("st.relaxed f 1", "wait.relaxed f 1; st.release g 1",
        "wait.acquire g 1; ld.weak r0 f"),
    "flag that a thread passes on by a fence": ("st.relaxed f 1", "wait.relaxed f 1; fence.acq_rel; st.relaxed g 1",
        "wait.relaxed g 1; fence.acq_rel; st.weak f 1"),
    "relaxed adds that one has waited for": (*(f"add.relaxed r{number} f 1" for number in range(4)),
        "wait.relaxed f 4; st.release g 1", "wait.acquire g 1; st.weak f 0"),
    "flag that others have overwritten": ("st.relaxed f 3; st.relaxed f 1; st.release g 1",
        "wait.acquire g 1; st.relaxed f 2; st.release g 2", "wait.acquire g 2; st.weak f 0"),
    "flag that is read before it is overwritten": (
        "st.relaxed f 1",
        "wait.relaxed f 1; st.relaxed f 2; st.release g 1",
        "wait.acquire g 1; ld.weak r0 f",
    ),
    "polls that are over before a reset": (
        *(f"ld.relaxed r{number} f; add.relaxed s{number} g 1" for number in range(3)),
        "wait.relaxed g 3; st.release f 1", "wait.acquire f 1; st.weak f 0"),
    "many heads before a reset": (f"{stores(200)}; st.release g 1", "wait.relaxed f 10; wait.acquire g 1; st.weak f 0"),
}  # fmt: skip
# And what the report says of them.
UNORDERED = {
    "flag whose scope is the writer's GPU": (("st.relaxed.gpu f 1", "wait.relaxed f 1"),
        "the scope of (the|this) store to `cells` of rank 1: f .* is too small: gpu, but between ranks it takes sys"),
    "narrow fence of the writer": (("st.weak d 1; fence.acq_rel.gpu; st.relaxed f 1", READ),
        "the scope of the fence before the store to `cells` of rank 1: f .* is too small"),
    "narrow fence of the reader": ((WRITE, "wait.relaxed f 1; fence.acq_rel.gpu; ld.weak r0 d"),
        "the scope of the fence after the load of `cells` of rank 1: f .* is too small"),
    "narrow release between ranks": (("st.weak d 1; st.release.gpu f 1", READ),
        "the scope of (the|this) store to `cells` of rank 1: f .* is too small"),
    "chain through a narrow atomic": (("st.weak d 1; add.release r0 f 1", "wait.relaxed f 1; add.relaxed.gpu r1 f 1",
            "wait.acquire f 2; ld.weak r2 d"), "f .*(are|is) too small"),
    "flag that is passed on without a release": (
        ("st.relaxed f 1", "wait.relaxed f 1; st.relaxed g 1", "wait.acquire g 1; ld.weak r0 f"),
        "weak order, but another thread stores to it"),
    "flag that is passed on before it was read": (
        ("st.relaxed f 1", "st.release g 1; wait.relaxed f 1", "wait.acquire g 1; st.weak f 2"),
        "the second has waited for nothing|too weak"),
    "what was stored before a relaxed flag that is passed on": (
        ("st.weak d 1; st.relaxed f 1", "wait.relaxed f 1; st.release g 1", "wait.acquire g 1; ld.weak r0 d"),
        "both too weak|nothing at all orders the store before this load"),
    "first of two flags in a cell": (("st.relaxed f 1; st.relaxed g 1",
            "wait.relaxed g 1; st.relaxed f 2; st.release g 2", "wait.acquire g 2; ld.weak r0 f"),
        "releases? (and acquire )?nothing, and no fence|it has weak order"),
    "head of which the last value alone was read": (
        (f"{stores(100)}; st.relaxed g 1", "wait.relaxed g 1; wait.relaxed f 100; st.weak f 0"),
        "are both too weak to order one store"),
    "weak reset below a flag": (("st.weak f 3; st.relaxed f 1; st.relaxed g 1", "wait.relaxed g 1; ld.acquire r0 f"),
        "are both too weak to order the store"),
    "narrow store below a wide one": (("st.relaxed.gpu f 1; st.relaxed.gpu g 1",
            "wait.relaxed.gpu g 1; st.relaxed f 2; st.release g 2", "wait.acquire g 2; ld.relaxed r0 f"),
        "too small: gpu"),
    "poll below a flag": (("ld.relaxed r0 f", "st.release f 1", "wait.acquire f 1; st.weak f 0"),
        "is too weak: it has weak order, but another thread loads it"),
}  # fmt: skip


class WritersTogether(Program):
    """All threads but the last on one rank, in blocks of their own."""

    @property
    def places(self):
        return [*((0, block) for block in range(len(self.threads) - 1)), (1, 0)]


def runner(name, threads):
    """A function (seed, strategy)."""
    kind = WritersTogether if name.startswith("narrow store") else Program
    program = kind(name, threads, "ranks", {})
    return lambda seed, strategy=None: run(program, "checked", seed, strategy)


def runner_of(kernels):
    return lambda seed, strategy="uniform": run_together(kernels(), seed, strategy=strategy)


# --- kernels that are ordered


def narrow_acquire_of_what_a_neighbour_has_added():
    def add(t, memory):
        if t.block_idx == 0:
            if t.thread_idx == 0:
                t.atomic("add", memory + FLAG, "s32", 1, "release", "sys")
        elif t.thread_idx == 0:
            wait_for(memory + FLAG, "relaxed", "gpu")
            put(t, memory + DATA)
            t.atomic("add", memory + FLAG, "s32", 1, "release", "gpu")
        else:
            wait_for(memory + FLAG, "relaxed", "gpu", at_least=2)
            t.load(memory + FLAG, "s32", "acquire", "cta")
            take(t, memory + DATA)

    return [(0, add, 2, 2)]


def flag_that_a_thread_of_the_block_has_read():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    def read(t, memory):
        if t.thread_idx == 40:
            wait_for(memory + FLAG, "relaxed")
        t.barrier(0, 64)
        take(t, memory + FLAG)

    return [(0, write, 1, 1), (1, read, 1, 64)]


def flag_that_a_lane_of_the_warp_has_read():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "gpu")

    def read(t, memory):
        if t.thread_idx == 4:
            wait_for(memory + FLAG, "relaxed", "gpu")
        t.syncwarp(0xFF)
        take(t, memory + FLAG)

    return [(0, write, 1, 1), (0, read, 1, 8)]


def polls_of_many():
    def poll(t, memory):
        t.load(memory + FLAG, "s32", "relaxed", "sys")
        t.atomic("add", memory + FLAG_2, "s32", 1, "relaxed", "sys")

    def write(t, memory):
        wait_for(memory + FLAG_2, "relaxed", at_least=70)
        t.store(memory + FLAG, "s32", 1, "release", "sys")

    def reset(t, memory):
        wait_for(memory + FLAG)
        put(t, memory + FLAG, 0)

    return [(0, poll, 2, 35), (1, write, 1, 1), (2, reset, 1, 1)]


def first_of_two_bulk_groups():
    def write(t, memory):
        for i in range(16):
            t.store_shared(4 * i, "s32", 1, "weak")
        t.fence_proxy_async()
        for i in range(2):
            t.bulk_store(memory + DATA + 512 * i, 32 * i, 32)
            t.bulk_commit_group()
        t.bulk_wait_group(1)
        t.store(memory + FLAG, "s32", 1, "release", "sys")
        t.bulk_wait_group(0)

    return [(0, write, 1, 1), (1, read_payload, 1, 1)]


def proxy_fence_of_the_one_who_stored():
    def exchange(t, memory):
        if t.thread_idx == 40:
            for i in range(8):
                put(t, memory + DATA + 4 * i)
            t.fence_proxy_async_global()
        t.barrier(0, 64)
        if t.thread_idx == 0:
            load_in_bulk(t, memory + DATA)

    return [(0, exchange, 1, 64)]


def bulk_load_of_what_the_block_has_stored_in_bulk():
    def exchange(t, memory):
        if t.thread_idx == 40:
            store_in_bulk(t, memory + DATA)
            t.bulk_commit_group()
            t.bulk_wait_group(0)
        t.barrier(0, 64)
        if t.thread_idx == 0:
            load_in_bulk(t, memory + DATA)

    return [(0, exchange, 1, 64)]


def consumers_that_wait_for_their_producers_copy():
    def write(t, memory):
        write_words(t, memory)
        wait_for(memory + FLAG_2)
        put(t, memory + DATA, 2)

    def read(t, memory):
        if t.thread_idx == 0:
            t.mbarrier_init(MBARRIER, 1)
        t.barrier(0, 64)
        if t.thread_idx == 0:
            wait_for(memory + FLAG)
            t.fence_proxy_async_global()
            t.bulk_load(0, memory + DATA, 32, MBARRIER)
            t.mbarrier_arrive_expect_tx(MBARRIER, 32)
        elif t.thread_idx in (32, 33):  # only one of them says so
            while not t.mbarrier_try_wait(MBARRIER, 0):
                pass
            assert t.load_shared(0, "s32", "weak") == 1
            if t.thread_idx == 32:
                t.store(memory + FLAG_2, "s32", 1, "release", "sys")

    return [(0, write, 1, 1), (1, read, 1, 64)]


def halves_that_two_warps_fill_and_empty():
    """With a barrier for each half that is full, and one for each that is free, as double buffers have them."""

    def exchange(t, memory):
        for i in range(6):
            half = i % 2
            if t.warp == 0:
                if i >= 2:
                    t.barrier(3 + half, 64)
                t.store_shared(128 * half + 4 * t.lane, "s32", i, "weak")
                t.barrier_arrive(1 + half, 64)
            else:
                t.barrier(1 + half, 64)
                assert t.load_shared(128 * half + 4 * t.lane, "s32", "weak") == i
                if i < 4:
                    t.barrier_arrive(3 + half, 64)

    return [(0, exchange, 1, 64)]


def older_arrivals_that_are_waited_for_later():
    def exchange(t, memory):
        for number, half in ((3, 0), (4, 1)) if t.warp else ((4, 1), (3, 0)):
            if t.warp == 0:
                t.barrier(number, 64)
                continue
            t.store_shared(128 * half + 4 * t.lane, "s32", number, "weak")
            t.barrier_arrive(number, 64)
        if t.warp == 0:
            assert [t.load_shared(128 * half + 4 * t.lane, "s32", "weak") for half in range(2)] == [3, 4]

    return [(0, exchange, 1, 64)]


# --- kernels that are not, and what the report says of them


def warps_that_meet_apart():
    def exchange(t, memory):
        put(t, memory + DATA + 4 * t.thread_idx)
        t.syncwarp()
        t.load(memory + DATA + 4 * (t.thread_idx ^ 32), "s32", "weak", "cta")

    return [(0, exchange, 1, 64)], "no barrier is between the (store|load) and this (load|store) of `memory` of rank 0"


def store_behind_a_bar_arrive():
    def run(t, memory):
        if t.warp == 0:
            t.barrier(1, 33)
            t.load(memory + DATA, "s32", "weak", "cta")
        else:
            t.barrier_arrive(1, 33)
            put(t, memory + DATA)

    return [
        (0, run, 1, 33)
    ], "no barrier is between the (store|load) and this (load|store) of `memory` of rank 0: byte 0"


def flag_that_another_one_raises():
    """Each thread waits for itself: that thread 32 is still on its way to the flag is not what is wrong."""

    def write(t, memory):
        put(t, memory + DATA)

    def raise_flag(t, memory):
        t.store(memory + FLAG, "s32", 1, "release", "sys")

    def read(t, memory):
        if t.thread_idx % 32 == 0:
            for _ in range(20 * t.thread_idx):
                t.globaltimer()
            wait_for(memory + FLAG)
        if t.thread_idx == 0:
            for _ in range(100):
                t.globaltimer()
            take(t, memory + DATA)

    return [
        (0, write, 1, 1),
        (0, raise_flag, 1, 1),
        (1, read, 1, 64),
    ], "has waited for nothing that the other one, or its block, has stored; the last that it has waited for is "


def copy_that_nobody_waits_for():
    def read(t, memory):
        wait_for(memory + FLAG)
        t.fence_proxy_async_global()
        t.store_shared(0, "s32", 0, "weak")
        t.fence_proxy_async()
        t.mbarrier_init(MBARRIER, 1)
        t.bulk_load(0, memory + DATA, 32, MBARRIER)
        t.mbarrier_arrive_expect_tx(MBARRIER, 32)
        for _ in range(100):
            t.globaltimer()
        t.load_shared(0, "s32", "weak")

    return [
        (0, write_words, 1, 1),
        (1, read, 1, 1),
    ], "no thread has waited on the mbarrier at shared byte 256, which says when the bulk copy that writes "


def copy_that_another_warp_waits_for():
    def read(t, memory):
        if t.thread_idx == 0:
            wait_for(memory + FLAG)
            t.fence_proxy_async_global()
            load_in_bulk(t, memory + DATA)
            t.store(memory + FLAG_2, "s32", 1, "relaxed", "cta")
        elif t.thread_idx == 32:
            wait_for(memory + FLAG_2, "acquire", "cta")
            t.load_shared(0, "s32", "weak")

    return [(0, write_words, 1, 1), (1, read, 1, 64)], "the store to `memory` of rank 1: byte 96 is too weak"


def mbarrier_that_another_warp_has_made():
    def wait(t, memory):
        if t.thread_idx == 0:
            t.mbarrier_init(MBARRIER, 1)
            t.mbarrier_arrive(MBARRIER)
            t.store(memory + FLAG, "s32", 1, "relaxed", "cta")
        elif t.thread_idx == 32:
            wait_for(memory + FLAG, "relaxed", "cta")
            t.mbarrier_try_wait(MBARRIER, 0)

    return [(0, wait, 1, 64)], f"relaxed.cta load of 8 bytes(.|\n)*`shared memory`: byte {MBARRIER}"


def bulk_store_that_is_not_committed():
    def write(t, memory):
        store_in_bulk(t, memory + DATA)
        t.bulk_wait_group(0)
        t.store(memory + FLAG, "s32", 1, "release", "sys")
        t.bulk_commit_group()
        t.bulk_wait_group(0)

    return [
        (0, write, 1, 1),
        (1, read_payload, 1, 1),
    ], "has not been waited for: a wait_group is missing before the store to `memory` of rank 1: byte 64"


def bulk_load_of_own_stores_without_a_proxy_fence():
    def run(t, memory):
        for i in range(8):
            put(t, memory + DATA + 4 * i)
        load_in_bulk(t, memory + DATA)

    return [
        (0, run, 1, 1)
    ], "no fence.proxy.async.global comes before the bulk load(.|\n)*of 32 bytes that this thread has stored"


def bulk_stores_to_the_same_bytes():
    def write(t, memory):
        store_in_bulk(t, memory + DATA)
        t.bulk_commit_group()
        t.bulk_wait_group(0)

    return [(0, write, 1, 1), (1, write, 1, 1)], "bulk store to 32 bytes that a bulk copy has stored"


ORDERED_KERNELS = [
    narrow_acquire_of_what_a_neighbour_has_added,
    flag_that_a_thread_of_the_block_has_read,
    flag_that_a_lane_of_the_warp_has_read,
    first_of_two_bulk_groups,
    proxy_fence_of_the_one_who_stored,
    bulk_load_of_what_the_block_has_stored_in_bulk,
    consumers_that_wait_for_their_producers_copy,
    halves_that_two_warps_fill_and_empty,
    older_arrivals_that_are_waited_for_later,
]
UNORDERED_KERNELS = [
    warps_that_meet_apart,
    store_behind_a_bar_arrive,
    flag_that_another_one_raises,
    copy_that_nobody_waits_for,
    copy_that_another_warp_waits_for,
    mbarrier_that_another_warp_has_made,
    bulk_store_that_is_not_committed,
    bulk_load_of_own_stores_without_a_proxy_fence,
    bulk_stores_to_the_same_bytes,
]


@pytest.mark.parametrize(
    "start",
    [
        *(pytest.param(runner(name, threads), id=name) for name, threads in ORDERED.items()),
        *(pytest.param(runner_of(kernels), id=kernels.__name__) for kernels in ORDERED_KERNELS),
        pytest.param(runner_of(polls_of_many), id="polls_of_many", marks=pytest.mark.thorough),
    ],
)
def test_nothing_is_found_in(start):
    for seed in range(8):
        start(seed)
    run_all(lambda strategy: start(0, strategy), 100)


@pytest.mark.parametrize(
    ("start", "why"),
    [
        *((runner(name, threads), why) for name, (threads, why) in UNORDERED.items()),
        *((runner_of(lambda kernels=kernels: kernels()[0]), kernels()[1]) for kernels in UNORDERED_KERNELS),
    ],
    ids=[*UNORDERED, *(kernels.__name__ for kernels in UNORDERED_KERNELS)],
)
def test_a_race_is_found_in(start, why):
    for seed in range(12):
        with pytest.raises(DataRace, match=why):
            start(seed)
    with pytest.raises((DataRace, Uninitialized)):
        run_all(lambda strategy: start(0, strategy), 100)


def test_who_arrives_and_goes_on_tells_nothing_of_what_comes_after():
    """Warp 0 arrives at a barrier, and one of its lanes stores behind that. Warp 1 waits there, and reads."""

    def exchange(t, memory):
        if t.warp == 1:
            t.barrier(1, 64)
            t.load(memory, "s32", "weak", "cta")
        else:
            t.barrier_arrive(1, 64)
            if t.lane == 0:
                put(t, memory)
                t.fence("acq_rel", "cta")

    with pytest.raises(DataRace):
        run_all(lambda strategy: run_together([(0, exchange, 1, 64)], 0, strategy=strategy))
