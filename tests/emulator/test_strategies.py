"""Strategies choose who runs next: each in its own way, and the same for the same seed."""

from itertools import pairwise

import pytest

from nbep.emulator import World, current_thread

NUM_STORES = 20


class Order:
    """A tracer that notes who stores: (rank, block, warp)."""

    def __init__(self):
        self.stores = []

    def on_store(self, thread, *_):
        self.stores.append((thread.rank, thread.block_idx, thread.thread_idx // 32))


def count_up(cells, num_stores):
    t = current_thread()
    for i in range(num_stores):
        t.store(cells + 4 * (t.block_idx * t.block_dim + t.thread_idx), "s32", i, "weak", "cta")


def order_of_stores(strategy, seed, *, num_ranks=2, grid=2, block=64, **options):
    """Who stored when, in a run in which no rank waits for another."""
    order = Order()
    world = World(num_ranks, seed, tracer=order, strategy=strategy, **options)

    def host(rank):
        context = world.ranks[rank]
        cells = context.space.allocate(4 * grid * block, "cells", zero=True)
        stream = context.create_stream("stream")
        stream.launch(count_up, (cells.address, NUM_STORES), grid, block)
        stream.synchronize()

    world.run([lambda rank=rank: host(rank) for rank in range(num_ranks)])
    assert len(order.stores) == num_ranks * grid * block * NUM_STORES
    return order.stores


def changes(stores):
    """How often another one goes on than the one before."""
    return sum(a != b for a, b in pairwise(stores))


@pytest.mark.parametrize("seed", range(8))
def test_without_preemptions_the_groups_run_one_after_the_other(seed):
    stores = order_of_stores("few_preemptions:0", seed, num_ranks=1, grid=4)
    # Each warp runs to its end, or at least each block.
    assert changes(stores) == 7 or changes([block for _, block, _ in stores]) == 3


def test_few_preemptions_are_few():
    def most(strategy):
        return max(changes(order_of_stores(strategy, seed, grid=1)) for seed in range(3))

    # Lanes of a warp take turns only when one is preempted or has left.
    assert most("few_preemptions:3:2000") < most("uniform") / 10


def test_some_seeds_starve_a_rank_until_the_other_is_done():
    lasts = []
    for seed in range(12):
        stores = order_of_stores("starved", seed, grid=1)
        half = [rank for rank, _, _ in stores[: len(stores) // 2]]
        lasts.append(max(half.count(0), half.count(1)) / len(half))
    assert max(lasts) > 0.9


def publish_late(data, flag, order):
    t = current_thread()
    t.store(data, "s32", 1, "weak", "cta")
    t.store(flag, "s32", 1, order, "sys")


def first_seen(strategy, seed):
    """What another block sees of the data when the flag is up; the flag is relaxed and the stores arrive some time."""
    world = World(1, seed, memory_model="delayed", strategy=strategy)
    seen = []

    def message(data, flag):
        t = current_thread()
        if t.block_idx == 0:
            publish_late(data, flag, "relaxed")
            for _ in range(50):
                t.fence("weak", "cta")
            seen.append(t.world.ranks[0].space.segments[data >> 32].read(0, "s32"))

    def host():
        context = world.ranks[0]
        data = context.space.allocate(4, "data", zero=True)
        flag = context.space.allocate(4, "flag", zero=True)
        stream = context.create_stream("stream")
        stream.launch(message, (data.address, flag.address), 1, 1)
        stream.synchronize()

    world.run([host])
    return seen[0]


def test_late_stores_are_not_in_memory_while_anybody_can_run():
    seeds = range(30)
    assert sum(first_seen("late", seed) for seed in seeds) < sum(first_seen("uniform", seed) for seed in seeds)


@pytest.mark.parametrize(
    "strategy", ["fair", "", "uniform:1", "few_preemptions:x", "few_preemptions:1:0", "few_preemptions:1:2:3"]
)
def test_an_unknown_strategy_is_refused(strategy):
    with pytest.raises(ValueError, match="strategy: got"):
        World(1, strategy=strategy)


def test_the_first_error_is_reported_while_all_threads_stand_where_they_were():
    waiting = []

    def note_states(error):
        assert type(error).__name__ == "DeadlockError"
        waiting.extend(thread.gr_frame.f_code.co_name for thread in world.polling)

    world = World(1, on_failure=note_states)

    def wait_for_ever(cell):
        while current_thread().load(cell, "s32", "acquire", "sys") == 0:
            current_thread().spin(1 << 62)

    def host():
        context = world.ranks[0]
        cell = context.space.allocate(4, "cell", zero=True)
        stream = context.create_stream("stream")
        stream.launch(wait_for_ever, (cell.address,), 1, 2)
        stream.synchronize()

    with pytest.raises(RuntimeError, match="nothing can run"):
        world.run([host])
    assert len(waiting) == 2
