"""What all clients get: the case of nbep.conformance, with rows as long as they want them."""

from types import SimpleNamespace
from typing import Any

import torch

from nbep.conformance import cases
from nbep.conformance.cases import MAX_TOKENS, NUM_EXPERTS, NUM_TOPK

__all__ = ["HIDDEN", "MAX_TOKENS", "NUM_EXPERTS", "NUM_TOPK", "Case", "Numbers", "same"]
HIDDEN = 2048  # the smallest that vLLM takes with low latency


class Case(cases.Case):
    def __init__(self, rank: int, num_ranks: int):
        super().__init__(rank, num_ranks, hidden=HIDDEN)


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
