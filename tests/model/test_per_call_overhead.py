"""What `research.model.per_call_overhead` says of 32 ranks is what a run of them does."""

from collections import Counter

import numpy as np
import pytest
from target import spawn

import nbep
from nbep.device.kernels.parts import arrivals
from nbep.device.layout.low_latency import NUM_HALVES
from nbep.device.layout.low_latency_host import shape_of
from nbep.host.low_latency.memory import quarter_bytes_needed
from nbep.host.target.emulator import EmulatorRuntime
from research.model import per_call_overhead
from research.model.runs import tokens_of
from research.model.traffic import NETWORK, Traffic
from research.model.work import DISPATCH, Work

pytestmark = pytest.mark.emulator_only("it counts with the emulator's tracer")
WORK = Work("low_latency", 32, 8, 1, 128, 4, 32, seed=3)
CALL = per_call_overhead.Call(32, 32, 1, 4, num_blocks=1, num_threads=96)


def dispatch_twice(comm, traffic):
    """The second time all credits are given and taken that a call in a long row of calls gives and takes."""
    shape = shape_of(32, 32, 1, WORK.hidden, WORK.num_topk)
    num_bytes = 2 * NUM_HALVES * quarter_bytes_needed(shape)
    options = {"num_nvl_peers": 8, "transport": "ibgda", "num_qps_per_rank": 1, "check_calls": False}
    buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True, **options)
    x, topk_idx = tokens_of(WORK, comm.rank), WORK.topk_idx(comm.rank)
    for verb in ("first", DISPATCH):
        traffic.enter(comm.rank, verb)
        buffer.low_latency_dispatch(x, topk_idx, 1, 32, use_fp8=True)
    traffic.enter(comm.rank, "")
    buffer.destroy()


@pytest.mark.long
@pytest.mark.thorough
def test_a_run_of_32_ranks_waits_and_adds_as_often_as_the_table_says(monkeypatch):
    monkeypatch.setattr(EmulatorRuntime, "resident_blocks", lambda *_: 1)
    waits: Counter[str] = Counter()
    wait_until = arrivals.wait_until

    def counted(load, cell, is_over, expected, *bounds):
        waits[is_over.__name__] += 1
        return wait_until(load, cell, is_over, expected, *bounds)

    monkeypatch.setattr(arrivals, "wait_until", counted)
    traffic = Traffic(8)
    spawn(dispatch_twice, 32, (traffic,), tracer=traffic)
    topk_idx = np.stack([WORK.topk_idx(rank) for rank in range(32)])
    num_used = int((topk_idx >= 0).sum())
    unused = topk_idx.size - num_used

    assert waits["has_credit"] == 2 * (32 * per_call_overhead.credit_waits(CALL) - unused)
    assert waits["has_arrived"] == 2 * 32 * per_call_overhead.count_waits(CALL)
    network = traffic.tallies[DISPATCH, NETWORK]
    node_of = np.arange(32)[:, None, None] // 8
    assert network.messages == int(((topk_idx >= 0) & (topk_idx // 8 != node_of)).sum())
    assert sum(network.flags.values()) == 32 * per_call_overhead.adds_over_network(CALL)
    assert per_call_overhead.credit_waits_of_each_lane(CALL) > 6 * per_call_overhead.credit_waits(CALL)
