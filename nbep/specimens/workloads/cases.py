"""Inputs of dispatch and combine for all ranks of a run, made from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nbep import reference

ROUTINGS = ("uniform", "one_rank", "avoid_rank_0", "nowhere", "everywhere")
NODE_ROUTINGS = ("grouped", "one_node", "avoid_node_0")


@dataclass(frozen=True)
class Case:
    """One set of inputs; lists hold one item per rank. `case.layouts` is where the reference sends its tokens."""

    seed: int
    num_ranks: int
    num_experts: int
    x: list[np.ndarray]
    topk_idx: list[np.ndarray]
    topk_weights: list[np.ndarray]
    layouts: list[reference.Layout] = field(repr=False)
    num_nodes: int = 1

    @property
    def num_nvl_peers(self) -> int:
        """The ranks of a node."""
        return self.num_ranks // self.num_nodes

    @property
    def hidden(self) -> int:
        return self.x[0].shape[1]

    @property
    def num_tokens(self) -> list[int]:
        return [len(x) for x in self.x]

    def provenance(self, rank: int, token: int) -> str:
        """Where a token goes: `r1t3 -> r0e2 r0e3` is token 3 of rank 1, chosen by local experts 2 and 3 of rank 0."""
        experts_per_rank = self.num_experts // self.num_ranks
        destinations = [divmod(int(e), experts_per_rank) for e in self.topk_idx[rank][token] if e >= 0]
        return f"r{rank}t{token} -> " + (" ".join(f"r{r}e{e}" for r, e in destinations) or "nowhere")


def make_case(
    seed: int = 0,
    *,
    num_ranks: int = 2,
    num_tokens: int | Sequence[int] = 5,
    hidden: int = 16,
    num_topk: int = 2,
    experts_per_rank: int = 2,
    routing: str = "uniform",
    unused: float = 0.2,
    num_nodes: int = 1,
) -> Case:
    """Random tokens and choices.

    Args:     num_tokens: of every rank, or one number for each
              routing "uniform": any experts; "one_rank": only those of the last rank; "avoid_rank_0": none of rank 0;
              "nowhere": all choices are unused; "everywhere": expert k of a token lies on rank k % num_ranks;
              "one_expert": only the last one; "grouped": each token chooses half of the nodes first, then experts of
              those; "one_node": only the experts of the last node; "avoid_node_0": none of the first
              unused: the share of choices that are -1 (not with "everywhere")
              num_nodes: how many nodes the ranks are on
    """
    rng = np.random.default_rng(seed)
    num_experts = num_ranks * experts_per_rank
    counts = [num_tokens] * num_ranks if isinstance(num_tokens, int) else list(num_tokens)
    experts_per_node = num_experts // num_nodes
    candidates = {
        "uniform": np.arange(num_experts),
        "one_rank": np.arange(num_experts - experts_per_rank, num_experts),
        "avoid_rank_0": np.arange(experts_per_rank, num_experts),
        "nowhere": np.arange(num_experts),
        "everywhere": np.arange(num_experts),
        "one_expert": np.arange(num_experts - 1, num_experts),
        "grouped": np.arange(num_experts),
        "one_node": np.arange(num_experts - experts_per_node, num_experts),
        "avoid_node_0": np.arange(experts_per_node, num_experts),
    }[routing]
    x, topk_idx, topk_weights = [], [], []
    for count in counts:
        x.append(rng.standard_normal((count, hidden), np.float32).astype(reference.BF16))
        # Each token's choices are different experts, as a gate's are; where there are too few, the rest is unused.
        idx = np.full((count, num_topk), -1, np.int64)
        for token in range(count):
            if routing == "everywhere":
                ranks = np.arange(num_topk) % num_ranks
                idx[token] = ranks * experts_per_rank + (np.arange(num_topk) // num_ranks) % experts_per_rank
            elif routing != "nowhere":
                within = candidates
                if routing == "grouped":
                    nodes = rng.permutation(num_nodes)[: (num_nodes + 1) // 2]
                    within = candidates[np.isin(candidates // experts_per_node, nodes)]
                chosen = rng.permutation(within)[:num_topk]
                idx[token, : len(chosen)] = np.where(rng.random(len(chosen)) < unused, -1, chosen)
        topk_idx.append(idx)
        topk_weights.append(rng.random((count, num_topk), np.float32))
    layouts = [reference.get_dispatch_layout(idx, num_experts, num_ranks) for idx in topk_idx]
    return Case(seed, num_ranks, num_experts, x, topk_idx, topk_weights, layouts, num_nodes)


def routes_of(layout: Sequence[Any]) -> dict[str, Any]:
    """The results of get_dispatch_layout as dispatch takes them; an event behind them is left out."""
    names = "num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank"
    return dict(zip(names, layout, strict=False))


def without(case: Case, senders: Sequence[int], owners: Sequence[int]) -> Case:
    """The case as if some ranks had no choices, and the experts of some ranks had not been chosen."""
    num_local_experts = case.num_experts // case.num_ranks
    topk_idx = [np.where(np.isin(idx // num_local_experts, owners), -1, idx) for idx in case.topk_idx]
    return replace(case, topk_idx=[np.full_like(i, -1) if r in senders else i for r, i in enumerate(topk_idx)])


def only_to(case: Case, owners: Sequence[Sequence[int]]) -> Case:
    """The case as if each rank had chosen the experts of some ranks alone, which `owners` says for each."""
    num_local_experts = case.num_experts // case.num_ranks
    pairs = zip(case.topk_idx, owners, strict=True)
    topk_idx = [np.where(np.isin(idx // num_local_experts, its), idx, -1) for idx, its in pairs]
    layouts = [reference.get_dispatch_layout(idx, case.num_experts, case.num_ranks) for idx in topk_idx]
    return replace(case, topk_idx=topk_idx, layouts=layouts)


def make_low_latency_case(seed: int = 0, **arguments: Any) -> Case:
    """As make_case, with tokens and weights that show what the low-latency mode could get wrong.

    Each 128 columns of a token have another size, some are zeros, some have a scale that is a power of two: casts and
    LogFMT take all their ways. Weights of a token repeat, so that rows cancel: another order of additions, a fused one
    or rounding in between shows. No token names an expert twice.
    """
    case = make_case(seed, **{"hidden": 128, **arguments})
    rng = np.random.default_rng(seed + 1)
    xs, weights = [], []
    for x, topk_idx, topk_weights in zip(case.x, case.topk_idx, case.topk_weights, strict=True):
        for k in range(1, topk_idx.shape[1]):
            topk_idx[(topk_idx[:, :k] == topk_idx[:, k : k + 1]).any(axis=1), k] = -1
        blocks = x.astype(np.float32).reshape(len(x), x.shape[1] // 128, 128)
        is_exact = rng.random(blocks.shape[:2]) < 0.2
        blocks[is_exact] = np.clip(blocks[is_exact], -1.75, 1.75)  # 448 / 256
        blocks[is_exact, 0] = 1.75
        sizes = rng.choice(np.array([1, 0.125, 2**-9, 2**-22, 0], np.float32), (*blocks.shape[:2], 1))
        xs.append((blocks * sizes).reshape(x.shape).astype(reference.BF16))
        is_other = rng.random(topk_weights.shape) < 0.2
        weights.append(np.where(is_other, topk_weights, rng.random((len(x), 1), np.float32)))
    return replace(case, x=xs, topk_weights=weights)


# Whose arrays a workload passes in: NumPy's, as on the emulator, until somebody brings those of another library


class NumpyArrays:
    """A library: its arrays from NumPy's and back, alone or in tuples and lists; all else stays as it is.

    is_exact: whether its target computes logarithms as the reference does
    """

    is_exact = True

    def to_target(self, value: Any) -> Any:
        return value

    to_numpy = to_target

    def assign(self, array: Any, values: np.ndarray) -> None:
        """Write into a contiguous array of the library."""
        array[...] = values

    def assert_kind(self, *values: Any) -> None:
        """Raises: AssertionError if an array among the values is another library's"""
        for value in values:
            if isinstance(value, tuple):
                self.assert_kind(*value)
            elif hasattr(value, "dtype"):
                assert isinstance(value, np.ndarray), f"{type(value)} came out where NumPy's arrays went in"


_used: Any = NumpyArrays()


def use(arrays: Any) -> None:
    """Use a library that has all that NumpyArrays has, from now on, in this process."""
    global _used
    _used = arrays


def is_exact() -> bool:
    return _used.is_exact


def to_target(value: Any) -> Any:
    return _used.to_target(value)


def to_numpy(value: Any) -> Any:
    return _used.to_numpy(value)


def assign(array: Any, values: np.ndarray) -> None:
    _used.assign(array, values)


def assert_kind(*values: Any) -> None:
    _used.assert_kind(*values)


# --- Compares arrays bit for bit with what they must be ---------------------------------------------------------------


@dataclass
class Report:
    """Compares arrays bit for bit and says where they differ.

    where: which run it is, and which rank; it begins each message
    """

    where: str

    def same(self, name: str, got: np.ndarray, want: np.ndarray, rows: list[str] | None = None) -> None:
        """Raises: AssertionError if the arrays differ. rows: what to call each row"""
        where = f"{self.where}, {name}"
        assert (got.shape, got.dtype) == (want.shape, want.dtype), where
        if got.tobytes() == want.tobytes():
            return
        wrong = [i for i in range(len(want)) if got[i].tobytes() != want[i].tobytes()]
        lines = [f"{where}: {len(wrong)} of {len(want)} rows differ"]
        for i in wrong[:4]:
            token = f" ({rows[i]})" if rows is not None and i < len(rows) else ""
            lines.append(f"  row {i}{token}: got {got[i].ravel()[:8]}, expected {want[i].ravel()[:8]}")
        raise AssertionError("\n".join(lines))
