"""Rounds of dispatch and combine, each with fresh routing and sizes, each compared bit for bit, until one is wrong.

    mpirun -n 8 nbep bench soak [--rounds 2000] [--seed 0]
    nbep bench soak --ranks 4 --rounds 50         virtual ranks on one card

Every rank makes the inputs of all ranks from the same seeds, so that it knows what must arrive: tokens by
source rank, then token; sums in float32 over ranks ascending, rounded once. Where the hidden size allows it, half of
the rounds send FP8. Half of the dispatches and half of the combines go without rings (zero_copy). A round that is
wrong, or in which a wait times out, ends the run with a report and exit code 1. Needs torch.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import nbep
from nbep.bench.harness.command import Parser, positive, run
from nbep.specimens.workloads.cases import routes_of

NUM_NVL_BYTES = 1 << 29
HIDDENS = (128, 2056, 2560, 7168)
MAX_TOKENS = 600
MAX_TOPK = 8
EXPERTS_PER_RANK = 8
PROGRESS_S = 10.0
DEVICE = "cuda"


class Plan(NamedTuple):
    """What all ranks agree on for one round."""

    hidden: int
    num_topk: int
    num_tokens: list[int]
    config: nbep.Config
    fp8: bool
    seed: int
    direct_dispatch: bool
    direct_combine: bool


class Inputs(NamedTuple):
    """One rank's inputs, as dispatch takes them. x is a pair for FP8; bf16 is what the receiver makes of it."""

    x: Any
    bf16: Any
    topk_idx: Any
    topk_weights: Any


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("soak", __doc__)
    parser.add_argument("--rounds", type=positive, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of all routings and sizes; the same seed, the same rounds")
    parser.add("ranks")
    return run("soak", parser.parse_args(argv), soak)


def soak(comm: Any, options: argparse.Namespace) -> bool:
    """Rounds on this rank, up to the first that any rank finds wrong. Returns whether none was."""
    num_zero_copy_bytes = nbep.Buffer.get_zero_copy_size_hint(MAX_TOKENS, max(HIDDENS), comm.size, MAX_TOPK)
    # Its GPU is torch's current one from here on.
    buffer = nbep.Buffer(comm, num_nvl_bytes=NUM_NVL_BYTES, num_zero_copy_bytes=num_zero_copy_bytes)
    plans = random.Random(options.seed)
    say = print if comm.rank == 0 else lambda *_, **__: None
    begin = last = time.perf_counter()
    for number in range(options.rounds):
        plan = make_plan(plans, comm.size)
        try:
            faults = run_round(comm.rank, comm.size, buffer, plan)
        except Exception as error:  # the peers' waits are over in a while, and then they are here too
            faults = [f"{type(error).__name__}: {error}"]
        everyone = comm.allgather(faults)
        if any(everyone):
            say(f"round {number} of seed {options.seed} on {comm.size} ranks is wrong: {plan}")
            for rank, wrong in enumerate(everyone):
                if wrong:
                    say(f"  rank {rank}: {', '.join(wrong)}", flush=True)
            break
        now = time.perf_counter()
        if now - last >= PROGRESS_S:
            say(f"{number + 1} of {options.rounds} rounds are right, {now - begin:.0f} s", flush=True)
            last = now
    else:
        seconds = time.perf_counter() - begin
        say(f"{options.rounds} rounds on {comm.size} ranks, all right, {seconds:.1f} s", flush=True)
    buffer.destroy()
    return not any(everyone)


def make_plan(plans: random.Random, num_ranks: int) -> Plan:
    """The next round. One rank in ten has no tokens, one hidden size in four is no multiple of 128."""
    hidden = plans.choice(HIDDENS)
    num_tokens = [0 if plans.random() < 0.1 else plans.randint(1, MAX_TOKENS) for _ in range(num_ranks)]
    num_sms, chunk = 2 * plans.randint(1, 4), plans.randint(1, 12)
    config = nbep.Config(num_sms, chunk, plans.randint(chunk + 1, 64))
    fp8 = hidden % 128 == 0 and plans.random() < 0.5
    num_topk, seed = plans.randint(1, MAX_TOPK), plans.getrandbits(48)
    return Plan(hidden, num_topk, num_tokens, config, fp8, seed, plans.random() < 0.5, plans.random() < 0.5)


def inputs_of(plan: Plan, rank: int, num_experts: int) -> Inputs:
    """The inputs of any rank; one choice in five is unused."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(1000 * plan.seed + rank)
    num_tokens, on_gpu = plan.num_tokens[rank], {"device": DEVICE, "generator": generator}
    x = torch.randn((num_tokens, plan.hidden), **on_gpu).bfloat16()
    topk_idx = torch.topk(torch.rand((num_tokens, num_experts), **on_gpu), plan.num_topk, dim=-1)[1]
    topk_idx[torch.rand((num_tokens, plan.num_topk), **on_gpu) < 0.2] = -1
    weights = torch.rand((num_tokens, plan.num_topk), **on_gpu)
    if not plan.fp8:
        return Inputs(x, x, topk_idx, weights)
    x_fp8, scales = nbep.per_token_cast_to_fp8(x)
    bf16 = (x_fp8.float() * scales.repeat_interleave(128, dim=1)).bfloat16()
    return Inputs((x_fp8, scales), bf16, topk_idx, weights)


def run_round(rank: int, num_ranks: int, buffer: nbep.Buffer, plan: Plan) -> list[str]:
    """One round; the names of what came out wrong."""
    import torch

    num_experts = num_ranks * EXPERTS_PER_RANK
    everyone = [inputs_of(plan, r, num_experts) for r in range(num_ranks)]
    owners = [inputs.topk_idx // EXPERTS_PER_RANK for inputs in everyone]  # -1 stays -1
    in_rank = [torch.stack([(of_rank == r).any(1) for r in range(num_ranks)], 1) for of_rank in owners]
    own = everyone[rank]
    torch.cuda.current_stream().synchronize()

    choices = {"topk_idx": own.topk_idx, "topk_weights": own.topk_weights, "config": plan.config}
    routes = routes_of(buffer.get_dispatch_layout(own.topk_idx, num_experts))
    received, recv_topk_idx, recv_weights, counts, handle, _ = buffer.dispatch(
        own.x, **choices, **routes, zero_copy=plan.direct_dispatch
    )
    assert handle is not None
    tokens = nbep.per_token_cast_back(*received) if plan.fp8 else received
    combined, combined_weights, _ = buffer.combine(
        tokens * (rank + 1), handle, topk_weights=recv_weights, config=plan.config, zero_copy=plan.direct_combine
    )

    def as_bytes(array: Any) -> Any:
        # Not contiguous(): that leaves a stride of 0 where a size is 1, and such a view is refused.
        return array.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def arriving(arrays: list[Any]) -> Any:
        """The rows of all ranks' arrays that come to this rank."""
        rows = [as_bytes(array)[members[:, rank]] for array, members in zip(arrays, in_rank, strict=True)]
        return torch.cat(rows).view(arrays[0].dtype)

    here = [of_rank == rank for of_rank in owners]
    idx = [torch.where(is_here, i.topk_idx % EXPERTS_PER_RANK, -1) for is_here, i in zip(here, everyone, strict=True)]
    weights = [torch.where(is_here, i.topk_weights, 0.0) for is_here, i in zip(here, everyone, strict=True)]
    total = torch.zeros_like(own.bf16, dtype=torch.float32)
    total_weights = torch.zeros_like(own.topk_weights)
    for r in range(num_ranks):
        goes = in_rank[rank][:, r : r + 1]
        total = torch.where(goes, total + (own.bf16 * (r + 1)).float(), total)
        total_weights = torch.where(
            goes, total_weights + torch.where(owners[rank] == r, own.topk_weights, 0.0), total_weights
        )
    pairs = {
        "is_token_in_rank": (routes["is_token_in_rank"], in_rank[rank]),
        "recv_topk_idx": (recv_topk_idx, arriving(idx)),
        "recv_topk_weights": (recv_weights, arriving(weights)),
        "combined_x": (combined, total.bfloat16()),
        "combined_topk_weights": (combined_weights, total_weights),
    }
    if plan.fp8:
        for part, name in enumerate(("recv_x", "recv_x_scales")):
            pairs[name] = received[part], arriving([inputs.x[part] for inputs in everyone])
    else:
        pairs["recv_x"] = received, arriving([inputs.x for inputs in everyone])
    faults = [
        name
        for name, (got, want) in pairs.items()
        if got.shape != want.shape or not torch.equal(as_bytes(got), as_bytes(want))
    ]
    if counts != [int((torch.cat(idx) == expert).sum()) for expert in range(EXPERTS_PER_RANK)]:
        faults.append("num_recv_tokens_per_expert_list")
    return faults
