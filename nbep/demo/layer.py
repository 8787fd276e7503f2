"""A Mixture-of-Experts layer that is spread over ranks: each rank has tokens of its own and owns some of the experts.

gate --> get_dispatch_layout --> dispatch --> experts --> combine
rank's own tokens                             rank's own experts, weighted   rank's own tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import nbep
from nbep import reference
from nbep.host.ranks.comm import InProcessComm
from nbep.workloads.cases import routes_of

PHASES = ("gate", "layout", "dispatch", "experts", "combine", "done")
EnterPhase = Callable[[int, str], None]  # rank, phase

# Two channels, chunks of two tokens, rings of six slots: fewer than the tokens of a ring, so that senders wait.
CONFIG = nbep.Config(num_sms=4, num_max_nvl_chunked_send_tokens=2, num_max_nvl_chunked_recv_tokens=6)


@dataclass(frozen=True)
class Settings:
    """num_tokens are those of one rank, num_experts those of all ranks."""

    num_ranks: int = 4
    num_tokens: int = 48
    hidden: int = 128
    num_experts: int = 8
    num_topk: int = 2
    seed: int = 7
    fp8: bool = False


@dataclass(frozen=True)
class Model:
    """Inputs and weights of all ranks.

    x              of each rank: [num_tokens, hidden] bf16
    gate_weight    [hidden, num_experts] float32, the same on all ranks
    expert_weight  [num_experts, hidden, hidden] float32; rank r owns the r-th share
    """

    x: list[np.ndarray]
    gate_weight: np.ndarray
    expert_weight: np.ndarray


@dataclass(frozen=True)
class RankResult:
    """What one rank had and got; names as in nbep.Buffer."""

    topk_idx: np.ndarray
    topk_weights: np.ndarray
    sent: Any  # x as it was dispatched: bf16, or a pair of FP8 and scales
    layout: reference.Layout
    recv_x: Any
    recv_topk_idx: np.ndarray
    recv_topk_weights: np.ndarray
    num_recv_tokens_per_expert_list: list[int]
    handle: nbep.DispatchHandle
    expert_output: np.ndarray
    combined_x: np.ndarray
    combined_topk_weights: np.ndarray | None


def make_model(settings: Settings) -> Model:
    """Random inputs and weights, all from the seed."""
    rng = np.random.default_rng(settings.seed)
    hidden = settings.hidden
    x = [rng.standard_normal((settings.num_tokens, hidden), np.float32) for _ in range(settings.num_ranks)]
    return Model(
        [array.astype(reference.BF16) for array in x],
        rng.standard_normal((hidden, settings.num_experts), np.float32),
        rng.standard_normal((settings.num_experts, hidden, hidden), np.float32) / np.float32(np.sqrt(hidden)),
    )


def run_layer(comm: InProcessComm, settings: Settings, model: Model, enter: EnterPhase) -> RankResult:
    """The layer on one rank. enter(rank, phase) is called as each phase begins."""
    rank = comm.rank
    buffer = nbep.Buffer(comm, num_nvl_bytes=CONFIG.get_nvl_buffer_size_hint(2 * settings.hidden, comm.size))

    enter(rank, "gate")
    topk_idx, topk_weights = reference.gate(model.x[rank], model.gate_weight, settings.num_topk)

    enter(rank, "layout")
    routes = routes_of(buffer.get_dispatch_layout(topk_idx, settings.num_experts))

    enter(rank, "dispatch")
    sent = nbep.per_token_cast_to_fp8(model.x[rank]) if settings.fp8 else model.x[rank]
    received: Any = buffer.dispatch(sent, topk_idx=topk_idx, topk_weights=topk_weights, config=CONFIG, **routes)
    recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens, handle, _ = received  # none of them is None with top-k

    enter(rank, "experts")
    expert_input = nbep.per_token_cast_back(*recv_x) if settings.fp8 else recv_x
    share = settings.num_experts // comm.size
    own_experts = model.expert_weight[rank * share : (rank + 1) * share]
    expert_output = apply_experts(expert_input, recv_topk_idx, recv_topk_weights, own_experts)

    enter(rank, "combine")
    combined_x, combined_topk_weights, _ = buffer.combine(
        expert_output, handle, topk_weights=recv_topk_weights, config=CONFIG
    )
    buffer.destroy()
    enter(rank, "done")
    layout = reference.Layout(**{name: routes[name] for name in reference.Layout._fields})
    return RankResult(
        topk_idx, topk_weights, sent, layout, recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens, handle,
        expert_output, combined_x, combined_topk_weights,
    )  # fmt: skip


def apply_experts(
    recv_x: np.ndarray, recv_topk_idx: np.ndarray, recv_topk_weights: np.ndarray, expert_weight: np.ndarray
) -> np.ndarray:
    """One matrix product for each expert, over all tokens that chose it; a token's weighted results are added up.

    Args:     recv_x [n, hidden] bf16; recv_topk_idx [n, num_topk] local or -1; recv_topk_weights [n, num_topk];
              expert_weight [num_local_experts, hidden, hidden] float32
    Returns:  [n, hidden] bf16, added up in float32
    """
    total = np.zeros(recv_x.shape, np.float32)
    for expert, weight in enumerate(expert_weight):
        rows, choices = np.nonzero(recv_topk_idx == expert)
        result = recv_x[rows].astype(np.float32) @ weight
        total[rows] += recv_topk_weights[rows, choices, None] * result
    return total.astype(reference.BF16)
