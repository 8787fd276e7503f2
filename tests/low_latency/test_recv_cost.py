"""The statistics are counted as DeepEP counts them: a written-out example, with a clock that every look advances."""

from collections import Counter

import numpy as np
import pytest
from cases import Case
from low_latency import STATS_BEFORE, Options, make_buffer, make_low_latency_case, num_max_tokens
from target import spawn

import nbep.device.primitives as ptx
from nbep.emulator import current_thread

pytestmark = pytest.mark.emulator_only("it replaces the clock of the kernels")

# Three ranks of two experts each. Rank 0 has nothing for rank 2, rank 1 has nothing at all.
CHOSEN = [[[0, 1], [0, 3], [0, -1]], np.zeros((0, 2)), [[5, -1], [0, 2]]]
EXPERTS_PER_RANK = 2
RECEIVED = [[4, 1], [1, 1], [0, 1]]  # by each rank's experts
LEFT_OUT = 2


@pytest.fixture
def ticking_clock(monkeypatch):
    """A wait takes one cycle, however long it is: what is added counts how often."""
    looks: Counter[int] = Counter()

    def tick() -> int:
        thread = id(current_thread())
        looks[thread] += 1
        return looks[thread]

    monkeypatch.setattr(ptx, "clock64", tick)


def example(deduplicate: bool) -> tuple[Case, Options]:
    case = make_low_latency_case(0, num_ranks=3, num_tokens=[3, 0, 2], num_topk=2, experts_per_rank=EXPERTS_PER_RANK)
    for rank, chosen in enumerate(CHOSEN):
        case.topk_idx[rank][:] = chosen
    return case, Options(deduplicate=deduplicate)


def statistics(comm, case: Case, options: Options, left_out: int | None = None):
    """The three statistics of one rank after a dispatch and a combine."""
    buffer = make_buffer(comm, [(case, options)], enable_shrink=True)
    stats = [np.full(n, STATS_BEFORE, d) for n, d in ((EXPERTS_PER_RANK, np.int32), (3, np.int64), (3, np.int64))]
    rank = comm.rank
    if rank == left_out:
        return stats
    if left_out is not None:
        buffer.low_latency_update_mask_buffer(left_out, True)
    weights = case.topk_weights[rank]
    recv_x, _, handle, *_ = buffer.low_latency_dispatch(
        case.x[rank],
        case.topk_idx[rank],
        num_max_tokens(case, options),
        case.num_experts,
        *stats[:2],
        use_fp8=False,
        deduplicate=options.deduplicate,
        topk_weights=weights if options.deduplicate else None,
    )
    buffer.low_latency_combine(recv_x, case.topk_idx[rank], weights, handle, combine_wait_recv_cost_stats=stats[2])
    return stats


@pytest.mark.parametrize("deduplicate", [False, True])
def test_each_expert_of_every_rank_adds_once(deduplicate, ticking_clock):
    by_rank = spawn(statistics, 3, example(deduplicate))
    for stats, received in zip(by_rank, RECEIVED, strict=True):
        recv, dispatch_wait, combine_wait = (values - STATS_BEFORE for values in stats)
        assert recv.tolist() == received
        assert dispatch_wait.tolist() == [EXPERTS_PER_RANK] * 3
        assert combine_wait.tolist() == [EXPERTS_PER_RANK] * 3


@pytest.mark.parametrize("deduplicate", [False, True])
def test_a_masked_rank_adds_nothing(deduplicate, ticking_clock):
    by_rank = spawn(statistics, 3, (*example(deduplicate), LEFT_OUT))
    for stats, received in zip(by_rank[:LEFT_OUT], ([3, 1], [0, 1]), strict=True):
        recv, dispatch_wait, combine_wait = (values - STATS_BEFORE for values in stats)
        assert recv.tolist() == received
        assert dispatch_wait.tolist() == [EXPERTS_PER_RANK, EXPERTS_PER_RANK, 0]
        assert combine_wait.tolist() == [EXPERTS_PER_RANK, EXPERTS_PER_RANK, 0]
