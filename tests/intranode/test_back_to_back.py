"""Calls of all shapes follow each other on one buffer.

A notify kernel resets the rings of its rank while peers may still be in the call before, whose rings lay elsewhere. So
what a late store, a late poll or a missing barrier would do shows here.
"""

import pytest
from calls import SlowRank, check_calls, check_steps, make_calls, make_steps
from parts import both_parts
from target import MEMORY_MODELS

KERNELS = "nbep.device.kernels.intranode"


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    both_parts([(2, range(1))], thorough=[(2, range(1, 4)), (4, range(1))], long=[(2, range(4, 18)), (4, range(1, 7))]),
)
def test_every_call_gets_the_references_bits(num_ranks, seeds, memory_model):
    for seed in seeds:
        check_calls(seed, make_calls(seed, num_ranks), memory_model=memory_model)


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(("num_ranks", "seeds"), both_parts([], thorough=[(2, range(3)), (4, range(1))]))
def test_calls_through_rings_and_without_get_the_references_bits_in_turn(num_ranks, seeds, memory_model):
    for seed in seeds:
        check_calls(seed, make_calls(seed, num_ranks, mixed=True), memory_model=memory_model)


SLOW_PLACES = [
    (f"{KERNELS}.notify_dispatch", "sum_counts"),
    (f"{KERNELS}.notify_dispatch", "count_channel_tokens"),
    (f"{KERNELS}.dispatch", "send_tokens"),
    (f"{KERNELS}.dispatch", "receive_offsets"),
    (f"{KERNELS}.dispatch", "copy_own_tokens"),
    (f"{KERNELS}.combine", "send_tokens"),
    (f"{KERNELS}.combine", "list_rows"),
]


@pytest.mark.emulator_only("one rank is made slow")
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    both_parts([], thorough=[(2, range(4)), (4, range(1))], long=[(2, range(4, 15)), (4, range(1, 7))]),
)
def test_hosts_that_run_ahead_of_a_slow_rank_get_the_references_bits(num_ranks, seeds, memory_model, monkeypatch):
    slow = SlowRank(monkeypatch, SLOW_PLACES)
    for seed in seeds:
        slow.rank, slow.reads = seed % num_ranks, (0, 5, 50)[seed % 3]
        check_steps(seed, *make_steps(seed, make_calls(seed, num_ranks)), memory_model=memory_model)
