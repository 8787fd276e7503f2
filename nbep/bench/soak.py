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
from nbep.workloads.cases import routes_of

NUM_NVL_BYTES = 1 << 29
HIDDENS = (128, 2056, 2560, 7168)
MAX_TOKENS = 600
MAX_TOPK = 8
EXPERTS_PER_RANK = 8
PROGRESS_S = 10.0


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

    generator = torch.Generator("cuda").manual_seed(1000 * plan.seed + rank)
    num_tokens = plan.num_tokens[rank]
    x = torch.randn((num_tokens, plan.hidden), device="cuda", generator=generator).bfloat16()
    scores = torch.rand((num_tokens, num_experts), device="cuda", generator=generator)
    topk_idx = torch.topk(scores, plan.num_topk, dim=-1)[1]
    unused = torch.rand((num_tokens, plan.num_topk), device="cuda", generator=generator) < 0.2
    topk_idx[unused] = -1
    weights = torch.rand((num_tokens, plan.num_topk), device="cuda", generator=generator)
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
    membership = [
        torch.stack([((i.topk_idx // EXPERTS_PER_RANK == r) & (i.topk_idx >= 0)).any(1) for r in range(num_ranks)], 1)
        for i in everyone
    ]
    own = everyone[rank]
    torch.cuda.current_stream().synchronize()

    routes = routes_of(buffer.get_dispatch_layout(own.topk_idx, num_experts))
    received, recv_topk_idx, recv_weights, counts, handle, _ = buffer.dispatch(
        own.x,
        topk_idx=own.topk_idx,
        topk_weights=own.topk_weights,
        **routes,
        config=plan.config,
        zero_copy=plan.direct_dispatch,
    )
    assert handle is not None
    tokens = nbep.per_token_cast_back(*received) if plan.fp8 else received
    combined, combined_weights, _ = buffer.combine(
        tokens * (rank + 1), handle, topk_weights=recv_weights, config=plan.config, zero_copy=plan.direct_combine
    )

    faults = []

    def as_bytes(array: Any) -> Any:
        # Not contiguous(): that leaves a stride of 0 where a size is 1, and such a view is refused.
        return array.clone(memory_format=torch.contiguous_format).view(torch.uint8)

    def compare(name: str, got: Any, want: Any) -> None:
        if got.shape != want.shape or not torch.equal(as_bytes(got), as_bytes(want)):
            faults.append(name)

    def arriving(arrays: list[Any]) -> Any:
        """The rows of all ranks' arrays that come to this rank."""
        rows = [as_bytes(array)[members[:, rank]] for array, members in zip(arrays, membership, strict=True)]
        return torch.cat(rows).view(arrays[0].dtype)

    compare("is_token_in_rank", routes["is_token_in_rank"], membership[rank])
    if plan.fp8:
        compare("recv_x", received[0], arriving([i.x[0] for i in everyone]))
        compare("recv_x_scales", received[1], arriving([i.x[1] for i in everyone]))
    else:
        compare("recv_x", received, arriving([i.x for i in everyone]))
    local = [
        torch.where(i.topk_idx // EXPERTS_PER_RANK == rank, i.topk_idx - rank * EXPERTS_PER_RANK, -1) for i in everyone
    ]
    compare("recv_topk_idx", recv_topk_idx, arriving(local))
    used = [torch.where(idx >= 0, i.topk_weights, 0.0) for idx, i in zip(local, everyone, strict=True)]
    compare("recv_topk_weights", recv_weights, arriving(used))
    if counts != [int((torch.cat(local) == expert).sum()) for expert in range(EXPERTS_PER_RANK)]:
        faults.append("num_recv_tokens_per_expert_list")

    total = torch.zeros_like(own.bf16, dtype=torch.float32)
    total_weights = torch.zeros_like(own.topk_weights)
    for r in range(num_ranks):
        chosen = membership[rank][:, r : r + 1]
        total = torch.where(chosen, total + (own.bf16 * (r + 1)).float(), total)
        theirs = torch.where(own.topk_idx // EXPERTS_PER_RANK == r, own.topk_weights, 0.0)
        total_weights = torch.where(chosen, total_weights + theirs, total_weights)
    compare("combined_x", combined, total.bfloat16())
    compare("combined_topk_weights", combined_weights, total_weights)
    return faults
