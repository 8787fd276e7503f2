"""One decoding step of a Mixture-of-Experts layer in low-latency mode, in two micro-batches that overlap.

 batch a   gate, dispatch |- - - - - - - -| hook, experts, combine |- - - - - - - - - - - - - -| hook
 batch b                    gate, dispatch |- - - - - - - - - - - -| hook, experts, combine |- - -| hook

What is sent in one batch travels while the other one computes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nbep import reference
from nbep.demo.layer import EnterPhase, Model, Settings
from nbep.host.ranks.comm import InProcessComm
from nbep.specimens.workloads.cases import Case
from nbep.specimens.workloads.low_latency import HOOK, Options, Trip, make_buffer

PHASES = ("dispatch", "experts", "combine", "done")
NUM_BATCHES = 2


def batches_of(case: Case) -> list[Case]:
    """The tokens of each rank in micro-batches; the first has one more if their number is odd."""

    def parts(arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
        return [[np.array_split(array, NUM_BATCHES)[number] for array in arrays] for number in range(NUM_BATCHES)]

    batches = zip(parts(case.x), parts(case.topk_idx), parts(case.topk_weights), strict=True)
    return [replace(case, x=x, topk_idx=idx, topk_weights=weights, layouts=[]) for x, idx, weights in batches]


def options_of(settings: Settings, batch: Case, deduplicate: bool) -> Options:
    """With room for the larger batch."""
    spare = max(-(-settings.num_tokens // NUM_BATCHES), 1) - max(1, *batch.num_tokens)
    return Options(settings.fp8, deduplicate=deduplicate, dispatch_as=HOOK, combine_as=HOOK, spare=spare)


class Batch(Trip):
    """One micro-batch of a rank. expert_weight [num_local_experts, hidden, hidden]; output: what the experts made"""

    expert_weight: np.ndarray
    output: np.ndarray

    def expert_output(self) -> np.ndarray:
        self.output = apply_own_experts(self.outcome.dispatched, self.expert_weight)
        return self.output


def run_step(
    comm: InProcessComm, settings: Settings, model: Model, enter: EnterPhase, deduplicate: bool
) -> list[Batch]:
    """The step on one rank, micro-batch by micro-batch. enter(rank, phase) is called as each phase begins."""
    rank = comm.rank
    trips = [(case, options_of(settings, case, deduplicate)) for case in batches_of(model.case)]
    buffer = make_buffer(comm, trips)
    batches = [Batch(buffer, *trip) for trip in trips]
    enter(rank, "dispatch")
    for batch in batches:
        batch.expert_weight = model.own_experts(rank)
        batch.send_dispatch()
    enter(rank, "experts")
    for batch in batches:
        batch.receive_dispatch()
        batch.send_combine()
    enter(rank, "combine")
    for batch in batches:
        batch.receive_combine()
    buffer.destroy()
    enter(rank, "done")
    return batches


def apply_own_experts(received: reference.LowLatencyDispatched, expert_weight: np.ndarray) -> np.ndarray:
    """One matrix product for each expert, over the rows that came for it; the others are 0.

    Returns:  [num_local_experts, rows, hidden] bf16
    """
    values, scales = received.recv_x, received.recv_x_scales
    output = np.zeros(values.shape, reference.BF16)
    for local_expert, count in enumerate(received.recv_count):
        rows = values[local_expert, :count]
        if scales is not None:
            rows = reference.per_token_cast_back(rows, scales[local_expert, :count])
        output[local_expert, :count] = rows.astype(np.float32) @ expert_weight[local_expert]
    return output
