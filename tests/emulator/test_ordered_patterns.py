"""Programs that PTX orders in less common ways: the memory model "checked" finds nothing in them.

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


def relaxed_store_behind_a_release():
    def write(t, memory):
        put(t, memory + DATA)
        t.store(memory + FLAG, "s32", 1, "release", "sys")
        t.store(memory + FLAG, "s32", 2, "relaxed", "sys")

    def read(t, memory):
        wait_for(memory + FLAG, at_least=2)
        take(t, memory + DATA)

    return [(0, write, 1, 1), (1, read, 1, 1)]


def acquire_behind_a_relaxed_load_of_the_same_cell():
    def write(t, memory):
        put(t, memory + DATA)
        t.store(memory + FLAG, "s32", 1, "release", "sys")

    def overwrite(t, memory):
        wait_for(memory + FLAG_2, "relaxed")
        t.store(memory + FLAG, "s32", 2, "relaxed", "sys")

    def read(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.store(memory + FLAG_2, "s32", 1, "relaxed", "sys")
        wait_for(memory + FLAG, at_least=2)
        take(t, memory + DATA)

    return [(0, write, 1, 1), (1, overwrite, 1, 1), (2, read, 1, 1)]


def narrow_fence_behind_a_wide_one():
    def write(t, memory):
        put(t, memory + DATA)
        t.fence("acq_rel", "sys")
        t.fence("acq_rel", "cta")
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    return [(0, write, 1, 1), (1, read_payload, 1, 1)]


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


def flag_that_its_reader_resets():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    def reset(t, memory):
        wait_for(memory + FLAG, "relaxed")
        put(t, memory + FLAG, 0)

    return [(0, write, 1, 1), (1, reset, 1, 1)]


def flag_that_another_rank_passes_on():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    def pass_on(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.store(memory + FLAG_2, "s32", 1, "release", "sys")

    def read(t, memory):
        wait_for(memory + FLAG_2)
        take(t, memory + FLAG)

    return [(0, write, 1, 1), (1, pass_on, 1, 1), (2, read, 1, 1)]


def flag_that_a_thread_passes_on_by_a_fence():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    def pass_on(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.fence("acq_rel", "sys")
        t.store(memory + FLAG_2, "s32", 1, "relaxed", "sys")

    def read(t, memory):
        wait_for(memory + FLAG_2, "relaxed")
        t.fence("acq_rel", "sys")
        put(t, memory + FLAG)

    return [(0, write, 1, 1), (0, pass_on, 1, 1), (1, read, 1, 1)]


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


def relaxed_adds_that_one_has_waited_for():
    def add(t, memory):
        t.atomic("add", memory + FLAG, "s32", 1, "relaxed", "sys")

    def reset(t, memory):
        wait_for(memory + FLAG, "relaxed", at_least=4)
        t.store(memory + FLAG_2, "s32", 1, "release", "sys")

    def read(t, memory):
        wait_for(memory + FLAG_2)
        t.store(memory + FLAG, "s32", 0, "weak", "sys")

    return [(0, add, 2, 1), (1, add, 2, 1), (1, reset, 1, 1), (2, read, 1, 1)]


def flag_that_others_have_overwritten():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 3, "relaxed", "sys")
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 1, "release", "sys")

    def overwrite(t, memory):
        wait_for(memory + FLAG_2)
        t.store(memory + FLAG, "s32", 2, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 2, "release", "sys")

    def reset(t, memory):
        wait_for(memory + FLAG_2, at_least=2)
        put(t, memory + FLAG, 0)

    return [(0, write, 1, 1), (1, overwrite, 1, 1), (2, reset, 1, 1)]


def flag_that_is_read_before_it_is_overwritten():
    def write(t, memory):
        t.store(memory + FLAG, "s32", 1, "relaxed", "sys")

    def overwrite(t, memory):
        wait_for(memory + FLAG, "relaxed")
        t.store(memory + FLAG, "s32", 2, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 1, "release", "sys")

    def read(t, memory):
        wait_for(memory + FLAG_2)
        t.load(memory + FLAG, "s32", "weak", "cta")

    return [(0, write, 1, 1), (1, overwrite, 1, 1), (2, read, 1, 1)]


def polls_that_are_over_before_a_reset():
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


def many_heads_before_a_reset():
    def move(t, memory):
        for head in range(200):
            t.store(memory + FLAG, "s32", head + 1, "relaxed", "sys")
        t.store(memory + FLAG_2, "s32", 1, "release", "sys")

    def reset(t, memory):
        wait_for(memory + FLAG, "relaxed", at_least=10)
        wait_for(memory + FLAG_2)
        put(t, memory + FLAG, 0)

    return [(0, move, 1, 1), (1, reset, 1, 1)]


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


PATTERNS = [
    relaxed_store_behind_a_release,
    acquire_behind_a_relaxed_load_of_the_same_cell,
    narrow_fence_behind_a_wide_one,
    narrow_acquire_of_what_a_neighbour_has_added,
    flag_that_its_reader_resets,
    first_of_two_bulk_groups,
    proxy_fence_of_the_one_who_stored,
    flag_that_another_rank_passes_on,
    flag_that_a_thread_passes_on_by_a_fence,
    flag_that_a_thread_of_the_block_has_read,
    flag_that_a_lane_of_the_warp_has_read,
    relaxed_adds_that_one_has_waited_for,
    flag_that_others_have_overwritten,
    flag_that_is_read_before_it_is_overwritten,
    polls_that_are_over_before_a_reset,
    many_heads_before_a_reset,
    bulk_load_of_what_the_block_has_stored_in_bulk,
    consumers_that_wait_for_their_producers_copy,
    halves_that_two_warps_fill_and_empty,
    older_arrivals_that_are_waited_for_later,
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_nothing_is_found_in(pattern):
    for seed in range(12):
        run_together(pattern(), seed)
    run_all(lambda strategy: run_together(pattern(), 0, strategy=strategy), 100)
