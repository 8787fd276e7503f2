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
from nbep.specimens.workloads.cases import Case, to_numpy, to_target
from nbep.specimens.workloads.intranode import Options, Outcome, dispatch_arguments, outcome_of

PHASES = ("layout", "dispatch", "experts", "combine", "done")
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
    """What all ranks begin with: tokens and what the gate makes of them, and the experts.

    expert_weight  [num_experts, hidden, hidden] float32; rank r owns the r-th share
    """

    case: Case
    expert_weight: np.ndarray

    def own_experts(self, rank: int) -> np.ndarray:
        share = self.case.num_experts // self.case.num_ranks
        return self.expert_weight[rank * share : (rank + 1) * share]


@dataclass(frozen=True)
class Result:
    """What one rank sent, what its experts made of what came, and what it got."""

    sent: Any
    expert_output: np.ndarray
    outcome: Outcome


def make_model(settings: Settings) -> Model:
    """Random inputs and weights, all from the seed; the gate chooses the experts."""
    rng = np.random.default_rng(settings.seed)
    shape = settings.num_tokens, settings.hidden
    x = [rng.standard_normal(shape, np.float32).astype(reference.BF16) for _ in range(settings.num_ranks)]
    gate_weight = rng.standard_normal((settings.hidden, settings.num_experts), np.float32)
    weights = rng.standard_normal((settings.num_experts, settings.hidden, settings.hidden), np.float32)
    gates = [reference.gate(of_rank, gate_weight, settings.num_topk) for of_rank in x]
    topk_idx, topk_weights = [idx for idx, _ in gates], [of_rank for _, of_rank in gates]
    layouts = [reference.get_dispatch_layout(idx, settings.num_experts, settings.num_ranks) for idx in topk_idx]
    case = Case(settings.seed, settings.num_ranks, settings.num_experts, x, topk_idx, topk_weights, layouts)
    return Model(case, weights / np.float32(np.sqrt(settings.hidden)))


def run_layer(comm: InProcessComm, settings: Settings, model: Model, enter: EnterPhase) -> Result:
    """The layer on one rank. enter(rank, phase) is called as each phase begins."""
    rank, case, options = comm.rank, model.case, options_of(settings)
    buffer = nbep.Buffer(comm, num_nvl_bytes=CONFIG.get_nvl_buffer_size_hint(2 * settings.hidden, comm.size))

    enter(rank, "layout")
    layout, arguments = dispatch_arguments(buffer, case, options, rank)

    enter(rank, "dispatch")
    if settings.fp8:
        arguments["x"] = nbep.per_token_cast_to_fp8(to_target(case.x[rank]))
    outcome = outcome_of(options, layout, *buffer.dispatch(**arguments)[:5])

    enter(rank, "experts")
    received = outcome.on_host()
    tokens = to_numpy(nbep.per_token_cast_back(*outcome.recv_x)) if settings.fp8 else received.recv_x
    choices = received.recv_topk_idx, received.recv_topk_weights
    expert_output = reference.expert_layer(tokens, *choices, model.own_experts(rank))

    enter(rank, "combine")
    outcome.combined_x, outcome.combined_topk_weights, _ = buffer.combine(
        to_target(expert_output), outcome.handle, topk_weights=outcome.recv_topk_weights, config=CONFIG
    )
    buffer.destroy()
    enter(rank, "done")
    return Result(to_numpy(arguments["x"]), expert_output, outcome.on_host())


def options_of(settings: Settings) -> Options:
    return Options(config=CONFIG, fp8="row" if settings.fp8 else None, zero_copy=False)


@dataclass(frozen=True)
class AfterExperts(Options):
    """Options of the layer for the reference, whose combine takes what the ranks' experts made."""

    outputs: tuple[np.ndarray, ...] = ()

    def reference_combine(self, case: Case, x: list[np.ndarray], dispatched: list, **options: Any) -> list:
        return reference.combine(list(self.outputs), dispatched, **options)
