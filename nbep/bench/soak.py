"""Many rounds of dispatch and combine with fresh routing and sizes, every one compared bit for bit.

    mpirun -n 8 nbep bench soak [--rounds 2000] [--seed 0]
    nbep bench soak --ranks 4 --rounds 50         virtual ranks on one card

Every rank makes the inputs of all ranks from the same seeds, so that it knows what must arrive: tokens by
source rank, then token; sums in float32 over ranks ascending, rounded once. Needs torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import nbep
from nbep.bench.intranode import local_device, mpi_world

HIDDENS = (128, 2056, 2560, 7168)
MAX_TOKENS = 600
EXPERTS_PER_RANK = 8


class Plan(NamedTuple):
    """What all ranks agree on for one round."""

    hidden: int
    num_topk: int
    num_tokens: list[int]
    config: nbep.Config
    fp8: bool
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="nbep bench soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2, help="virtual ranks, when not under mpirun")
    options = parser.parse_args(argv)
    comm = mpi_world()
    wrong = soak(comm, options) if comm is not None else sum(nbep.spawn(soak, options.ranks, "cuda", (options,)))
    return 1 if wrong else 0


def soak(comm: Any, options: argparse.Namespace) -> int:
    """All rounds on this rank. Returns how many were wrong on any rank."""
    import torch

    if hasattr(comm, "Split_type"):
        torch.cuda.set_device(local_device(comm))
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 29)
    rng = torch.Generator().manual_seed(options.seed)
    wrong = 0
    start = time.perf_counter()
    for number in range(options.rounds):
        plan = make_plan(rng, comm.size, options.rounds * options.seed + number)
        faults = run_round(comm.rank, comm.size, buffer, plan)
        everyone = comm.allgather(faults)
        if any(everyone):
            wrong += 1
            if comm.rank == 0:
                print(f"round {number}: {plan}: wrong {everyone}", flush=True)
    if comm.rank == 0:
        seconds = time.perf_counter() - start
        print(f"{options.rounds} rounds on {comm.size} ranks, {wrong} wrong, {seconds:.1f} s", flush=True)
    buffer.destroy()
    return wrong


def make_plan(rng: Any, num_ranks: int, number: int) -> Plan:
    import torch

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=rng))

    hidden = HIDDENS[draw(0, len(HIDDENS) - 1)]
    num_tokens = [0 if draw(0, 9) == 0 else draw(1, MAX_TOKENS) for _ in range(num_ranks)]
    num_sms = 2 * draw(1, 4)
    chunk = draw(1, 12)
    config = nbep.Config(num_sms, chunk, draw(chunk + 1, 64))
    return Plan(hidden, draw(1, 8), num_tokens, config, hidden % 128 == 0 and draw(0, 3) == 0, number)


def inputs_of(plan: Plan, rank: int, num_experts: int) -> tuple[Any, Any, Any]:
    """x, topk_idx and topk_weights of any rank."""
    import torch

    generator = torch.Generator("cuda").manual_seed(1000 * plan.seed + rank)
    num_tokens = plan.num_tokens[rank]
    x = torch.randn((num_tokens, plan.hidden), device="cuda", generator=generator).bfloat16()
    scores = torch.rand((num_tokens, num_experts), device="cuda", generator=generator)
    topk_idx = torch.topk(scores, plan.num_topk, dim=-1)[1]
    unused = torch.rand((num_tokens, plan.num_topk), device="cuda", generator=generator) < 0.2
    topk_idx[unused] = -1
    weights = torch.rand((num_tokens, plan.num_topk), device="cuda", generator=generator)
    return x, topk_idx, weights


def run_round(rank: int, num_ranks: int, buffer: nbep.Buffer, plan: Plan) -> list[str]:
    """One round; the names of what came out wrong."""
    import torch

    num_experts = num_ranks * EXPERTS_PER_RANK
    everyone = [inputs_of(plan, r, num_experts) for r in range(num_ranks)]
    membership = [
        torch.stack([((idx // EXPERTS_PER_RANK == r) & (idx >= 0)).any(1) for r in range(num_ranks)], 1)
        for _, idx, _ in everyone
    ]
    x, topk_idx, weights = everyone[rank]
    sent = [nbep.per_token_cast_to_fp8(tokens) if plan.fp8 else tokens for tokens, _, _ in everyone]
    torch.cuda.current_stream().synchronize()

    num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
        topk_idx, num_experts
    )
    received, recv_topk_idx, recv_weights, _, handle, _ = buffer.dispatch(
        sent[rank],
        topk_idx=topk_idx,
        topk_weights=weights,
        num_tokens_per_rank=num_tokens_per_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=num_tokens_per_expert,
        config=plan.config,
    )
    recv_x = received[0] if plan.fp8 else received
    mine = [members[:, rank] for members in membership]
    faults = []

    def compare(name: str, got: Any, want: Any) -> None:
        as_bytes = [array.contiguous().view(torch.uint8) for array in (got, want)]
        if got.shape != want.shape or not torch.equal(*as_bytes):
            faults.append(name)

    compare("is_token_in_rank", is_token_in_rank, membership[rank])
    tokens = [values[0] if plan.fp8 else values for values in sent]
    compare(
        "recv_x",
        recv_x,
        torch.cat([t.view(torch.uint8)[m] for t, m in zip(tokens, mine, strict=True)]).view(recv_x.dtype),
    )
    if plan.fp8:
        compare("recv_x_scales", received[1], torch.cat([s[1][m] for s, m in zip(sent, mine, strict=True)]))
    local = [torch.where(idx // EXPERTS_PER_RANK == rank, idx - rank * EXPERTS_PER_RANK, -1) for _, idx, _ in everyone]
    compare("recv_topk_idx", recv_topk_idx, torch.cat([idx[m] for idx, m in zip(local, mine, strict=True)]))
    used = [torch.where(idx >= 0, w, 0.0) for idx, (_, _, w) in zip(local, everyone, strict=True)]
    compare("recv_topk_weights", recv_weights, torch.cat([w[m] for w, m in zip(used, mine, strict=True)]))

    if not plan.fp8:
        combined, combined_weights, _ = buffer.combine(
            recv_x * (rank + 1), handle, topk_weights=recv_weights, config=plan.config
        )
        total = torch.zeros_like(x, dtype=torch.float32)
        total_weights = torch.zeros_like(weights)
        for r in range(num_ranks):
            chosen = membership[rank][:, r : r + 1]
            total = torch.where(chosen, total + (x * (r + 1)).float(), total)
            theirs = torch.where(topk_idx // EXPERTS_PER_RANK == r, weights, 0.0)
            total_weights = torch.where(chosen, total_weights + theirs, total_weights)
        compare("combined_x", combined, total.bfloat16())
        compare("combined_topk_weights", combined_weights, total_weights)
    return faults


if __name__ == "__main__":
    sys.exit(main())
