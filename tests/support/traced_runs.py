"""One traced run of each mode, small and cached: what can be made of a trace is tested on all of them."""

from contextlib import suppress
from functools import cache
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from cases import make_case
from intranode import Options, round_trip
from parts import both_parts

import nbep
from nbep.device.kernels.internode import coordinator
from nbep.device.protocols import teams
from nbep.lab.notebook import edit
from nbep.lab.trace import Trace

MODES = ("intranode", "low latency", "internode", "ibgda")
EACH_MODE = both_parts(MODES[:2], thorough=MODES[2:])  # for `pytest.mark.parametrize`
CASE = make_case(3, num_ranks=2, num_tokens=[9, 4], num_topk=2, hidden=16)
NUM_RANKS = {"intranode": 2, "low latency": 2, "internode": 4, "ibgda": 4}
NUM_TOKENS, HIDDEN = 4, 128


@cache
def traced_run(mode: str) -> Trace:
    """Two calls of dispatch and combine in low latency and between nodes; inside a node and with queues one."""
    trace = Trace()
    if mode == "intranode":
        options = Options(nbep.Config(2, 2, 4))  # one channel, chunks of two tokens, rings of four
        nbep.spawn(round_trip, 2, "emulator", (CASE, options), 7, tracer=trace)
    elif mode == "low latency":
        nbep.spawn(_low_latency, 2, "emulator", seed=5, tracer=trace)
    else:
        nbep.spawn(_internode, 4, "emulator", (mode,), 3, tracer=trace)
    return trace


@cache
def hanging_run() -> Trace:
    """Inside a node the first two tails arrive; those that follow are lost, and receivers wait."""
    primitives, count = teams.ptx, 0

    def lose(address, value):
        nonlocal count
        count += 1
        if count <= 2:
            primitives.st_release_sys_s32(address, value)

    trace = Trace()
    teams.ptx = SimpleNamespace(**{**vars(primitives), "st_release_sys_s32": lose})
    try:
        nbep.spawn(round_trip, 2, "emulator", (CASE, Options(nbep.Config(2, 2, 4))), 7, tracer=trace)
    except nbep.DeadlockError:
        return trace
    finally:
        teams.ptx = primitives
    raise AssertionError("the run does not hang")


@cache
def hanging_run_between_nodes() -> Trace:
    """RDMA heads are published too late, as in notebook 13: senders wait for them, and receivers for tokens."""
    trace = Trace()
    in_threes = "publish_slots(ctx._replace(sizes=ctx.sizes._replace(num_max_rdma_send_tokens=3))"
    late = edit(coordinator.publish_heads, "publish_slots(ctx", in_threes)
    with late, suppress(nbep.DeadlockError):
        nbep.spawn(_internode, 4, "emulator", ("internode",), 3, tracer=trace)
        raise AssertionError("the run does not hang")
    return trace


def _low_latency(comm):
    rdma_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, 2, 4)
    buffer = nbep.Buffer(comm, num_rdma_bytes=rdma_bytes, low_latency_mode=True)
    x = np.full((NUM_TOKENS, HIDDEN), comm.rank, ml_dtypes.bfloat16)
    topk_idx = (np.arange(NUM_TOKENS)[:, None] + [0, 2]) % 4
    weights = np.full((NUM_TOKENS, 2), 0.5, np.float32)
    for _ in range(2):
        recv_x, _, handle, _, hook = buffer.low_latency_dispatch(
            x, topk_idx, NUM_TOKENS, 4, use_fp8=False, return_recv_hook=True
        )
        hook()
        _, _, hook = buffer.low_latency_combine(recv_x, topk_idx, weights, handle, return_recv_hook=True)
        hook()
    buffer.destroy()


def _internode(comm, mode):
    tokens = np.arange(NUM_TOKENS)
    x = np.repeat((10 * comm.rank + tokens)[:, None], 64, axis=1).astype(ml_dtypes.bfloat16)
    topk_idx = np.stack([tokens + comm.rank + 1, 3 * tokens + comm.rank], axis=1) % 8
    weights = np.full(topk_idx.shape, 0.5, np.float32)
    transport = {"transport": "ibgda"} if mode == "ibgda" else {}
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 18, num_rdma_bytes=1 << 17, num_nvl_peers=2, **transport)
    per_rank, per_node, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(topk_idx, 8)
    config = nbep.Config(2, 1, 4, 1, 2)  # one channel, rings of four and of two slots, chunks of one
    for _ in range(1 if mode == "ibgda" else 2):
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x, None, per_rank, per_node, is_token_in_rank, per_expert, topk_idx, weights, config=config
        )
        buffer.combine(recv_x, handle, config=config)
    buffer.destroy()
