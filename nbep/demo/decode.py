"""One decoding step of a Mixture-of-Experts layer in low-latency mode, in two micro-batches that overlap.

 batch a   gate, dispatch |- - - - - - - -| hook, experts, combine |- - - - - - - - - - - - - -| hook
 batch b                    gate, dispatch |- - - - - - - - - - - -| hook, experts, combine |- - -| hook

What is sent in one batch travels while the other one computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import nbep
from nbep import reference
from nbep.demo.layer import EnterPhase, Model, Settings
from nbep.host.low_latency.handle import LowLatencyHandle
from nbep.host.ranks.comm import InProcessComm

PHASES = ("dispatch", "experts", "combine", "done")
NUM_BATCHES = 2


@dataclass(frozen=True)
class BatchResult:
    """What one rank had and got in one micro-batch; names as in nbep.Buffer."""

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray
    recv_x: Any  # bf16, or a pair of FP8 and scales
    recv_count: np.ndarray
    handle: LowLatencyHandle
    expert_output: np.ndarray
    combined_x: np.ndarray


def batches_of(x: np.ndarray) -> list[np.ndarray]:
    """The tokens of one rank in micro-batches; the first has one more if their number is odd."""
    return np.array_split(x, NUM_BATCHES)


def run_step(
    comm: InProcessComm, settings: Settings, model: Model, enter: EnterPhase, deduplicate: bool
) -> list[BatchResult]:
    """The step on one rank, micro-batch by micro-batch. enter(rank, phase) is called as each phase begins."""
    rank = comm.rank
    num_max_tokens = max(-(-settings.num_tokens // NUM_BATCHES), 1)
    num_rdma_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(
        num_max_tokens, settings.hidden, comm.size, settings.num_experts
    )
    buffer = nbep.Buffer(comm, num_rdma_bytes=num_rdma_bytes, low_latency_mode=True)
    share = settings.num_experts // comm.size
    own_experts = model.expert_weight[rank * share : (rank + 1) * share]

    enter(rank, "dispatch")
    sent = []
    for x in batches_of(model.x[rank]):
        topk_idx, topk_weights = reference.gate(x, model.gate_weight, settings.num_topk)
        recv_x, recv_count, handle, _, hook = buffer.low_latency_dispatch(
            x,
            topk_idx,
            num_max_tokens,
            settings.num_experts,
            use_fp8=settings.fp8,
            return_recv_hook=True,
            deduplicate=deduplicate,
            topk_weights=topk_weights if deduplicate else None,
        )
        sent.append((hook, (x, topk_idx, topk_weights, recv_x, recv_count, handle)))

    enter(rank, "experts")
    returning = []
    for hook, batch in sent:
        assert hook is not None
        hook()
        _, topk_idx, topk_weights, recv_x, recv_count, handle = batch
        expert_output = apply_own_experts(recv_x, recv_count, own_experts)
        combined_x, _, hook = buffer.low_latency_combine(
            expert_output, topk_idx, topk_weights, handle, return_recv_hook=True
        )
        returning.append((hook, BatchResult(*batch, expert_output, combined_x)))

    enter(rank, "combine")
    for hook, _ in returning:
        assert hook is not None
        hook()
    buffer.destroy()
    enter(rank, "done")
    return [result for _, result in returning]


def apply_own_experts(recv_x: Any, recv_count: np.ndarray, expert_weight: np.ndarray) -> np.ndarray:
    """One matrix product for each expert, over the rows that came for it; the others are 0.

    Args:     recv_x, recv_count as low_latency_dispatch returns them; expert_weight [num_local_experts, hidden, hidden]
    Returns:  [num_local_experts, rows, hidden] bf16
    """
    values, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    output = np.zeros(values.shape, reference.BF16)
    for local_expert, count in enumerate(recv_count):
        rows = values[local_expert, :count]
        if scales is not None:
            rows = reference.per_token_cast_back(rows, scales[local_expert, :count])
        output[local_expert, :count] = rows.astype(np.float32) @ expert_weight[local_expert]
    return output
