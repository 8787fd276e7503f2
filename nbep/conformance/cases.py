"""Tokens and choices of experts that a layer of expert parallelism must get right, and loops that say what is right.

x is small integers, and weights and experts are powers of two: every sum is exact in bf16, in every order, so results
are compared bit by bit. Expert e multiplies a row by 2 ** (e % 3).

 kind                       tokens of rank r                        choices
 plain                      5 + r                                   different experts
 a rank has no tokens       none on the last rank
 a rank receives nothing                                            experts of the first half of the ranks
 all to one expert                                                  the last expert, and -1
 choices of -1                                                      some -1, and a token without any
 an expert twice                                                    of every second token: one expert, all choices
 full ranks                 MAX_TOKENS
 around a power of two      3 on rank 0, 4, 5 in turn
 idle                       none on any rank
"""

from __future__ import annotations

from typing import Any

import torch

KINDS = (
    "plain",
    "a rank has no tokens",
    "a rank receives nothing",
    "all to one expert",
    "choices of -1",
    "an expert twice",
    "full ranks",
    "around a power of two",
    "idle",
)
NUM_EXPERTS, NUM_TOPK, MAX_TOKENS, HIDDEN = 4, 2, 8, 128
GRAD_COLUMNS = 16  # of a gradient that are not 0: the gradient of a weight is a sum over a row that float32 holds


class Broken(AssertionError):
    """A layer has broken what its experts, or its peers, rest on."""


class Case:
    """What one rank puts in, and what must come out.

    x, grad [num_tokens, hidden] bf16; topk_idx [num_tokens, num_topk] int64; topk_weights the same float32
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        kind: str = "plain",
        *,
        hidden: int = HIDDEN,
        num_topk: int = NUM_TOPK,
        num_experts: int = NUM_EXPERTS,
        seed: int = 0,
    ):
        if num_experts % num_ranks or num_experts < num_topk:
            raise ValueError(f"num_experts: got {num_experts}; must be a multiple of {num_ranks}, at least {num_topk}")
        self.kind, self.rank, self.num_ranks, self.num_experts = kind, rank, num_ranks, num_experts
        self.num_local_experts = num_experts // num_ranks
        self.first_expert = rank * self.num_local_experts
        random = torch.Generator().manual_seed(1000 * KINDS.index(kind) + 100 * seed + rank)
        num_tokens = {
            "a rank has no tokens": 5 + rank if rank < num_ranks - 1 else 0,
            "full ranks": MAX_TOKENS,
            "around a power of two": 3 + rank % 3,
            "idle": 0,
        }.get(kind, 5 + rank % (MAX_TOKENS - 4))
        self.x = torch.randint(-2, 3, (num_tokens, hidden), generator=random).bfloat16()
        self.grad = torch.randint(-1, 2, (num_tokens, hidden), generator=random).bfloat16()
        self.grad[:, GRAD_COLUMNS:] = 0
        pool = num_experts
        if kind == "a rank receives nothing":
            pool = max(num_topk, num_experts - self.num_local_experts)
        chosen = [torch.randperm(pool, generator=random)[:num_topk] for _ in range(num_tokens)]
        self.topk_idx = torch.stack(chosen) if chosen else torch.empty((0, num_topk), dtype=torch.int64)
        self.topk_weights = 0.5 ** torch.randint(0, 3, (num_tokens, num_topk), generator=random).float()
        if kind == "all to one expert":
            self.topk_idx[:] = -1
            self.topk_idx[:, 0] = num_experts - 1
        elif kind == "choices of -1":
            self.topk_idx[torch.rand(self.topk_idx.shape, generator=random) < 0.4] = -1
            self.topk_idx[:1] = -1
        elif kind == "an expert twice":
            self.topk_idx[::2] = self.topk_idx[::2, :1]

    # --- what must come out: loops over tokens and choices

    @property
    def combined(self) -> torch.Tensor:
        """[num_tokens, hidden] bf16: what the token's experts make of it, times the weights, added up."""
        return self._weighted(self.x)

    @property
    def grad_x(self) -> torch.Tensor:
        """Of x, where that of `combined` is `grad`."""
        return self._weighted(self.grad)

    @property
    def grad_weights(self) -> torch.Tensor:
        """Of topk_weights; 0 where no expert is chosen."""
        grads = torch.zeros_like(self.topk_weights)
        for token, choices in enumerate(self.topk_idx.tolist()):
            for i, expert in enumerate(choices):
                if expert >= 0:
                    grads[token, i] = 2.0 ** (expert % 3) * (self.x[token].float() * self.grad[token].float()).sum()
        return grads

    def _weighted(self, rows: torch.Tensor) -> torch.Tensor:
        added = torch.zeros(rows.shape)
        for token, choices in enumerate(self.topk_idx.tolist()):
            for i, expert in enumerate(choices):
                if expert >= 0:
                    added[token] += self.topk_weights[token, i] * 2.0 ** (expert % 3) * rows[token].float()
        return added.bfloat16()

    # --- experts, in the forms that layers call them; differentiable

    def experts(self, rows: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """What experts make of rows; -1 in topk_idx [num_rows, num_topk], of all experts, stands for none."""
        factors = torch.where(topk_idx < 0, 0.0, 2.0 ** (topk_idx % 3))
        weights = torch.where(topk_idx < 0, 0.0, topk_weights)
        return (rows.float() * (factors * weights).sum(1, keepdim=True)).bfloat16()

    def of_local(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Experts' numbers, of choices [num_rows, num_topk] that count from this rank's first.

        Raises: Broken if one is no expert of this rank
        """
        if not ((topk_idx >= -1) & (topk_idx < self.num_local_experts)).all():
            wrong = sorted(set(topk_idx.flatten().tolist()) - set(range(-1, self.num_local_experts)))
            raise Broken(
                f"choices {wrong} are no experts of rank {self.rank}, which has 0 to {self.num_local_experts - 1}"
            )
        return torch.where(topk_idx < 0, topk_idx, topk_idx + self.first_expert)

    def packed_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Without weights, of [num_local_experts, num_rows, hidden]: low latency."""
        numbers = torch.arange(self.first_expert, self.first_expert + self.num_local_experts)
        return rows * (2.0 ** (numbers % 3)).to(rows.dtype)[:, None, None]

    def grouped_experts(
        self, rows: torch.Tensor, counts: Any, weights: torch.Tensor | None = None, alignment: int = 1
    ) -> torch.Tensor:
        """Of rows in groups by expert. counts: of each local expert; what is behind the last group stays 0.

        Raises: Broken if a count is no multiple of the alignment, or there are fewer rows
        """
        counts = [int(count) for count in counts]
        if any(count % alignment for count in counts):
            raise Broken(f"counts {counts} of rows by expert are no multiples of {alignment}")
        if len(counts) != self.num_local_experts or sum(counts) > len(rows):
            raise Broken(f"{len(rows)} rows for counts {counts} of {self.num_local_experts} experts")
        factors = torch.zeros(len(rows))
        begin = 0
        for expert, count in enumerate(counts, self.first_expert):
            factors[begin : begin + count] = 2.0 ** (expert % 3)
            begin += count
        scale = factors if weights is None else factors * torch.where(factors == 0, 0.0, weights)
        return (rows.float() * scale[:, None]).bfloat16()
