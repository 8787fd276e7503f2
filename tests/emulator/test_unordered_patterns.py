"""Programs that look ordered and are not: the memory model "checked" finds each under every seed, and says why."""

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


def flag_whose_scope_is_the_writers_gpu():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "gpu")

    def poll(t, memory):
        wait_for(memory + FLAG, "relaxed")

    return [
        (0, write, 1, 1),
        (1, poll, 1, 1),
    ], "the scope of (the|this) store to `memory` of rank 1: byte 64 is too small: gpu, but between ranks it takes sys"


def fence_of_a_block_between_ranks():
    def write(t, memory):
        put(t, memory + DATA)
        t.fence("acq_rel", "gpu")
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    return [
        (0, write, 1, 1),
        (1, read_payload, 1, 1),
    ], "the scope of the fence before the store to `memory` of rank 1: byte 64 is too small"


def narrow_fence_of_the_reader():
    def write(t, memory):
        put(t, memory + DATA)
        t.store(memory + FLAG, "s32", 1, "release", "sys")

    def read(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.fence("acq_rel", "gpu")
        take(t, memory + DATA)

    return [
        (0, write, 1, 1),
        (1, read, 1, 1),
    ], "the scope of the fence after the load of `memory` of rank 1: byte 64 is too small"


def narrow_release_between_ranks():
    def write(t, memory):
        put(t, memory + DATA)
        t.store(memory + FLAG, "s32", 1, "release", "gpu")

    return [
        (0, write, 1, 1),
        (1, read_payload, 1, 1),
    ], "the scope of (the|this) store to `memory` of rank 1: byte 64 is too small"


def chain_through_a_narrow_atomic():
    def write(t, memory):
        put(t, memory + DATA)
        t.atomic("add", memory + FLAG, "s32", 1, "release", "sys")

    def add(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.atomic("add", memory + FLAG, "s32", 1, "relaxed", "gpu")

    def read(t, memory):
        wait_for(memory + FLAG, at_least=2)
        take(t, memory + DATA)

    return [(0, write, 1, 1), (1, add, 1, 1), (2, read, 1, 1)], "byte 64 (are|is) too small"


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


def flag_that_is_passed_on_without_a_release():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    def pass_on(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.store(memory + FLAG_2, "s32", 1, "relaxed", "sys")

    def read(t, memory):
        wait_for(memory + FLAG_2)
        take(t, memory + FLAG)

    return [(0, write, 1, 1), (1, pass_on, 1, 1), (2, read, 1, 1)], "weak order, but another thread stores to it"


def flag_that_is_passed_on_before_it_was_read():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    def pass_on(t, memory):
        t.store(memory + FLAG_2, "s32", 1, "release", "sys")
        wait_for(memory + FLAG, "relaxed")

    def write_again(t, memory):
        wait_for(memory + FLAG_2)
        put(t, memory + FLAG, 2)

    return [(0, write, 1, 1), (1, pass_on, 1, 1), (2, write_again, 1, 1)], "the second has waited for nothing|too weak"


def what_was_stored_before_a_relaxed_flag_that_is_passed_on():
    def write(t, memory):
        put(t, memory + DATA)
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    def pass_on(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.store(memory + FLAG_2, "s32", 1, "release", "sys")

    def read(t, memory):
        wait_for(memory + FLAG_2)
        take(t, memory + DATA)

    return [(0, write, 1, 1), (1, pass_on, 1, 1), (2, read, 1, 1)], "both too weak"


def first_of_two_flags_in_a_cell():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 1, "relaxed", "sys")

    def overwrite(t, memory):
        wait_for(memory + FLAG_2, "relaxed")
        t.store(memory + FLAG, "s32", 2, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 2, "release", "sys")

    def read(t, memory):
        wait_for(memory + FLAG_2, at_least=2)
        t.load(memory + FLAG, "s32", "weak", "cta")

    return [(0, write, 1, 1), (1, overwrite, 1, 1), (2, read, 1, 1)], "releases? (and acquire )?nothing, and no fence"


def head_of_which_the_last_value_alone_was_read():
    def move(t, memory):
        for head in range(100):
            t.store(memory + FLAG, "s32", head + 1, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 1, "relaxed", "sys")

    def reset(t, memory):
        wait_for(memory + FLAG_2, "relaxed")
        wait_for(memory + FLAG, "relaxed", at_least=100)
        put(t, memory + FLAG, 0)

    return [(0, move, 1, 1), (1, reset, 1, 1)], "are both too weak to order one store"


def weak_reset_below_a_flag():
    def write(t, memory):
        put(t, memory + FLAG, 3)
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 1, "relaxed", "sys")

    def poll(t, memory):
        wait_for(memory + FLAG_2, "relaxed")
        t.load(memory + FLAG, "s32", "acquire", "sys")

    return [(0, write, 1, 1), (1, poll, 1, 1)], "are both too weak to order the store"


def narrow_store_below_a_wide_one():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "gpu")
        t.store(memory + FLAG_2, "s32", 1, "relaxed", "gpu")

    def overwrite(t, memory):
        wait_for(memory + FLAG_2, "relaxed", "gpu")
        t.store(memory + FLAG, "s32", 2, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 2, "release", "sys")

    def poll(t, memory):
        wait_for(memory + FLAG_2, at_least=2)
        t.load(memory + FLAG, "s32", "relaxed", "sys")

    return [(0, write, 1, 1), (0, overwrite, 1, 1), (1, poll, 1, 1)], "too small: gpu"


def poll_below_a_flag():
    def poll(t, memory):
        t.load(memory + FLAG, "s32", "relaxed", "sys")

    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "release", "sys")

    def reset(t, memory):
        wait_for(memory + FLAG)
        put(t, memory + FLAG, 0)

    return [
        (0, poll, 1, 1),
        (1, write, 1, 1),
        (2, reset, 1, 1),
    ], "is too weak: it has weak order, but another thread loads it"


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

    return [
        (0, write_words, 1, 1),
        (1, read, 1, 64),
    ], "the store to `memory` of rank 1: byte 96 is too weak"


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


PATTERNS = [
    flag_whose_scope_is_the_writers_gpu,
    fence_of_a_block_between_ranks,
    narrow_fence_of_the_reader,
    narrow_release_between_ranks,
    chain_through_a_narrow_atomic,
    warps_that_meet_apart,
    store_behind_a_bar_arrive,
    flag_that_another_one_raises,
    flag_that_is_passed_on_without_a_release,
    flag_that_is_passed_on_before_it_was_read,
    what_was_stored_before_a_relaxed_flag_that_is_passed_on,
    first_of_two_flags_in_a_cell,
    head_of_which_the_last_value_alone_was_read,
    weak_reset_below_a_flag,
    narrow_store_below_a_wide_one,
    poll_below_a_flag,
    copy_that_nobody_waits_for,
    copy_that_another_warp_waits_for,
    mbarrier_that_another_warp_has_made,
    bulk_store_that_is_not_committed,
    bulk_load_of_own_stores_without_a_proxy_fence,
    bulk_stores_to_the_same_bytes,
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_a_race_is_found_in(pattern):
    for seed in range(12):
        kernels, why = pattern()
        with pytest.raises(DataRace, match=why):
            run_together(kernels, seed)
    with pytest.raises((DataRace, Uninitialized)):
        run_all(lambda strategy: run_together(kernels, 0, strategy=strategy), 100)
