"""What all clients get: tokens, a routing, and experts that multiply by powers of two, so that every sum is exact."""

from types import SimpleNamespace
from typing import Any

import torch

NUM_EXPERTS, NUM_TOPK, MAX_TOKENS = 4, 2, 8
HIDDEN = 2048  # the smallest that vLLM takes with low latency


class Case:
    """The tokens of one rank, and what becomes of them."""

    def __init__(self, rank: int, num_ranks: int):
        random = torch.Generator().manual_seed(rank)
        num_tokens = 5 + rank
        self.num_local_experts = NUM_EXPERTS // num_ranks
        self.first_expert = rank * self.num_local_experts
        self.x = torch.randint(-2, 3, (num_tokens, HIDDEN), generator=random).bfloat16()
        self.grad = torch.randint(-1, 2, (num_tokens, HIDDEN), generator=random).bfloat16()
        self.topk_idx = torch.stack([torch.randperm(NUM_EXPERTS, generator=random)[:NUM_TOPK] for _ in self.x])
        self.topk_weights = 0.5 ** torch.randint(0, 3, (num_tokens, NUM_TOPK), generator=random).float()

    def experts(self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """What experts make of the tokens; -1 in topk_idx stands for none."""
        factors = torch.where(topk_idx < 0, 0.0, topk_weights * 2.0 ** (topk_idx % 3))
        return (x.float() * factors.sum(1, keepdim=True)).bfloat16()

    def of_local(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """The experts' numbers, of indices of this rank's own experts."""
        return torch.where(topk_idx < 0, topk_idx, topk_idx + self.first_expert)

    def packed_experts(self, x: torch.Tensor) -> torch.Tensor:
        """As `experts` without weights, of tokens packed by expert."""
        numbers = torch.arange(self.first_expert, self.first_expert + self.num_local_experts)
        return x * (2.0 ** (numbers % 3)).bfloat16()[:, None, None]

    @property
    def combined(self) -> torch.Tensor:
        return self.experts(self.x, self.topk_idx, self.topk_weights)


def same(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype, f"{what}: got {got.dtype}; must be {want.dtype}"
    assert torch.equal(got, want), f"{what}: wrong in {(got != want).sum()} of {want.numel()} elements"


class Numbers:
    """Environment variables of SGLang: `name.get()` is a number, 0 where none is given; of a list its only value."""

    def __init__(self, **values: Any):
        self._values = values

    def __getattr__(self, name: str) -> Any:
        value = self._values.get(name, 0)
        return SimpleNamespace(get=lambda: value[0] if isinstance(value, list) else value)
