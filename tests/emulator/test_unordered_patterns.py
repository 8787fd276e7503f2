"""Programs that look ordered and are not: the memory model "checked" finds each under every seed, and says why."""

import pytest
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

from nbep.emulator import DataRace


def flag_whose_scope_is_the_writers_gpu():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "gpu")

    def poll(t, memory):
        wait_for(memory + FLAG, "relaxed")

    return [(0, write, 1, 1), (1, poll, 1, 1)], "the scope of one of them does not reach the other"


def fence_of_a_block_between_ranks():
    def write(t, memory):
        put(t, memory + DATA)
        t.fence("acq_rel", "gpu")
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    return [(0, write, 1, 1), (1, read_payload, 1, 1)], "this thread has acquired nothing that says so"


def narrow_fence_of_the_reader():
    def write(t, memory):
        put(t, memory + DATA)
        t.store(memory + FLAG, "s32", 1, "release", "sys")

    def read(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.fence("acq_rel", "gpu")
        take(t, memory + DATA)

    return [(0, write, 1, 1), (1, read, 1, 1)], "a relaxed load acquires nothing, unless a fence comes after it"


def narrow_release_between_ranks():
    def write(t, memory):
        put(t, memory + DATA)
        t.store(memory + FLAG, "s32", 1, "release", "gpu")

    return [(0, write, 1, 1), (1, read_payload, 1, 1)], "does not reach|between ranks both take scope sys at least"


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

    return [(0, write, 1, 1), (1, add, 1, 1), (2, read, 1, 1)], "does not reach"


def warps_that_meet_apart():
    def exchange(t, memory):
        t.store_shared(4 * t.thread_idx, "s32", 1, "weak")
        t.syncwarp()
        t.load_shared(4 * (t.thread_idx ^ 32), "s32", "weak")

    return [(0, exchange, 1, 64)], "nothing that says so|has stored nothing since|has released nothing since"


def store_behind_a_bar_arrive():
    def run(t, memory):
        if t.warp == 0:
            t.barrier(1, 33)
            t.load(memory + DATA, "s32", "weak", "cta")
        else:
            t.barrier_arrive(1, 33)
            put(t, memory + DATA)

    return [(0, run, 1, 33)], "since"


def copy_that_nobody_waits_for():
    def read(t, memory):
        wait_for(memory + FLAG)
        t.fence_proxy_async_global()
        t.store_shared(0, "s32", 0, "weak")
        t.mbarrier_init(MBARRIER, 1)
        t.bulk_load(0, memory + DATA, 32, MBARRIER)
        t.mbarrier_arrive_expect_tx(MBARRIER, 32)
        for _ in range(100):
            t.globaltimer()
        t.load_shared(0, "s32", "weak")

    return [(0, write_words, 1, 1), (1, read, 1, 1)], "nobody has waited on the mbarrier of that copy"


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
    ], "not waited on the mbarrier of that copy, nor met one that has"


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
    ], "not waited for that copy|released nothing since"


def bulk_load_of_own_stores_without_a_proxy_fence():
    def run(t, memory):
        for i in range(8):
            put(t, memory + DATA + 4 * i)
        load_in_bulk(t, memory + DATA)

    return [(0, run, 1, 1)], "of 32 bytes that this thread has stored(.|\n)*no fence.proxy.async.global"


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
