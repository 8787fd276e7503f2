"""Vectors of expert parallelism for whoever implements it: inputs of each rank, and what each must get.

    python -m nbep.conformance.vectors FILE [RANKS]     writes such a file; ep_vectors.npz beside this has 2 ranks
    check(adapter, numpy.load(FILE), kind, rank, device)   by each rank: on cards under torchrun, or in nbep.spawn

This file needs nothing of nbep. What must come out is made by loops over ranks, tokens and choices. x is small
integers, weights and experts are powers of two (expert e multiplies by 2 ** (e % 3)): every sum is exact in every
order, so all is compared bit by bit. x[:, 0] and x[:, 1] are the rank and the number of a token, by which received
rows are found: their order is free.

An array is named KIND/rRANK/NAME; `meta` is JSON.

 an adapter has
 dispatch(x, topk_idx, topk_weights)             -> rows, local choices, weights, counts, handle
 again(x, handle)                                -> rows, in the same order
 combine(rows, handle, weights or None)          -> x, weights
 and may have
 expanded(x, topk_idx, topk_weights)             -> rows by expert, counts, weights [num_rows], handle for combine
 scaled(x in e4m3, scales, topk_idx, topk_weights)             -> rows, scales
 low_latency(x, topk_idx)                        -> rows [num_local_experts, capacity, hidden], counts, handle
 low_latency_combine(rows, topk_idx, topk_weights, handle)     -> x
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

KINDS = (
    "plain", "a rank has no tokens", "a rank receives nothing", "all to one expert", "choices of -1", "full ranks",
    "a token goes nowhere",
)  # fmt: skip
SIZES = {"ranks": 2, "experts": 4, "topk": 2, "hidden": 256, "most": 8}
GRAD_COLUMNS, BLOCK = 16, 128
FILE = Path(__file__).with_name("ep_vectors.npz")
Arrays = dict[str, np.ndarray]


def make(kind: str, *, ranks: int, experts: int, topk: int, hidden: int, most: int) -> list[Arrays]:
    """The arrays of each rank."""
    random, local = np.random.default_rng(KINDS.index(kind)), experts // ranks
    given: list[Arrays] = []
    for rank in range(ranks):
        n = 5 + rank % 3
        if kind == "full ranks":
            n = most
        elif kind == "a rank has no tokens" and rank == ranks - 1:
            n = 0
        x = random.integers(-2, 3, (n, hidden)).astype(np.float32)
        x[:, 0], x[:, 1] = rank, np.arange(n)
        pool = experts - local if kind == "a rank receives nothing" else experts
        idx = np.array([random.permutation(pool)[:topk] for _ in range(n)], np.int64).reshape(n, topk)
        if kind == "all to one expert":
            idx[:], idx[:, 0] = -1, experts - 1
        elif kind == "choices of -1":
            idx[random.random((n, topk)) < 0.4] = -1
        elif kind == "a token goes nowhere":
            idx[:1] = -1
        weights = (0.5 ** random.integers(0, 3, (n, topk))).astype(np.float32)
        grad = np.zeros((n, hidden), np.float32)
        grad[:, :GRAD_COLUMNS] = random.integers(-1, 2, (n, GRAD_COLUMNS))
        scales = (2.0 ** random.integers(-1, 2, (n, hidden // BLOCK))).astype(np.float32)
        given.append({"x": x, "topk_idx": idx, "topk_weights": weights, "grad": grad, "scales": scales})
    return [one | _wanted(rank, local, given) for rank, one in enumerate(given)]


def _wanted(rank: int, local: int, given: list[Arrays]) -> Arrays:
    """What a rank must get: of each received token its rank and number, its choices here and their weights."""
    sources, choices, weights, counts = [], [], [], [0] * local
    for source, one in enumerate(given):
        for token, experts in enumerate(one["topk_idx"].tolist()):
            here = [expert - rank * local if expert // local == rank else -1 for expert in experts]
            if max(here) < 0:
                continue
            sources.append((source, token))
            choices.append(here)
            weights.append([w if e >= 0 else 0.0 for w, e in zip(one["topk_weights"][token], here, strict=True)])
            for expert in here:
                if expert >= 0:
                    counts[expert] += 1
    own, topk = given[rank], given[rank]["topk_idx"].shape[1]
    scale, grad_weights = np.zeros((len(own["x"]), 1), np.float32), np.zeros_like(own["topk_weights"])
    for token, experts in enumerate(own["topk_idx"].tolist()):
        for i, expert in enumerate(experts):
            if expert >= 0:
                scale[token] += own["topk_weights"][token, i] * 2.0 ** (expert % 3)
                grad_weights[token, i] = (own["x"][token] * own["grad"][token]).sum() * 2.0 ** (expert % 3)
    return {
        "want/sources": np.array(sources, np.int64).reshape(-1, 2),
        "want/choices": np.array(choices, np.int64).reshape(-1, topk),
        "want/weights": np.array(weights, np.float32).reshape(-1, topk),
        "want/counts": np.array(counts, np.int64),
        "want/combined": own["x"] * scale,
        "want/combined_weights": np.where(own["topk_idx"] >= 0, own["topk_weights"], 0),
        "want/grad_x": own["grad"] * scale,
        "want/grad_weights": grad_weights,
    }


def vectors(**sizes: int) -> dict[str, Any]:
    """All arrays by their names, and meta. sizes: others than SIZES"""
    of = SIZES | sizes
    meta = {"format": 1, "sizes": of, "kinds": KINDS, "expert": "row * 2 ** (expert % 3)", "order of rows": "any"}
    per_kind = ((kind, rank, each) for kind in KINDS for rank, each in enumerate(make(kind, **of)))
    arrays = {f"{kind}/r{rank}/{name}": array for kind, rank, each in per_kind for name, array in each.items()}
    return {"meta": np.array(json.dumps(meta)), **arrays}


class _Checks:
    def __init__(self, adapter: Any, vectors: Any, kind: str, rank: int, device: Any):
        import torch

        self.torch, self.adapter, self.rank = torch, adapter, rank
        sizes = json.loads(str(vectors["meta"]))["sizes"]
        self.local = sizes["experts"] // sizes["ranks"]
        self.wrong: list[str] = []
        self._of = lambda name: torch.from_numpy(np.array(vectors[f"{kind}/r{rank}/{name}"]))
        self.x, self.grad = (self._of(name).bfloat16().to(device) for name in ("x", "grad"))
        self.idx, self.weights, self.scales = (
            self._of(name).to(device) for name in ("topk_idx", "topk_weights", "scales")
        )

    def same(self, what: str, got: Any, want: Any) -> None:
        want = self._of(f"want/{want}") if isinstance(want, str) else want
        if got is None:
            self.wrong.append(f"{what}: None")
        elif tuple(got.shape) != tuple(want.shape):
            self.wrong.append(f"{what}: got {tuple(got.shape)}; must be {tuple(want.shape)}")
        elif not self.torch.equal(got.cpu().float(), want.float()):
            differ = (got.cpu().float() != want.float()).sum()
            self.wrong.append(f"{what}: wrong in {int(differ)} of {want.numel()} elements")

    def order(self, rows: Any) -> list[int]:
        """Of received rows, by source rank and token."""
        return sorted(range(len(rows)), key=lambda i: (float(rows[i, 0]), float(rows[i, 1])))

    def compact(self) -> None:
        torch = self.torch
        rows, choices, weights, counts, handle = self.adapter.dispatch(self.x, self.idx, self.weights)
        order = self.order(rows)
        self.same("sources of rows", rows[order][:, :2], "sources")
        self.same("local choices", choices[order], "choices")
        self.same("weights", torch.where(choices >= 0, weights, 0)[order], "weights")
        self.same("counts", torch.as_tensor(counts), "counts")
        factors = torch.where(choices < 0, 0.0, 2.0 ** ((choices + self.rank * self.local) % 3))
        scale = (factors * torch.where(choices < 0, 0, weights)).sum(1, keepdim=True)
        combined, _ = self.adapter.combine((rows.float() * scale).bfloat16(), handle, None)
        self.same("combined", combined, "combined")
        _, back = self.adapter.combine(rows, handle, torch.where(choices >= 0, weights, 0))
        self.same("combined weights", back, "combined_weights")
        grad = self.adapter.again(self.grad, handle)
        grad_weights = torch.where(choices < 0, 0.0, (rows.float() * grad.float()).sum(1, keepdim=True) * factors)
        grad_x, grad_weights = self.adapter.combine((grad.float() * scale).bfloat16(), handle, grad_weights)
        self.same("gradient of x", grad_x, "grad_x")
        self.same("gradient of weights", grad_weights, "grad_weights")

    def expanded(self) -> None:
        rows, counts, weights, handle = self.adapter.expanded(self.x, self.idx, self.weights)
        self.same("counts, expanded", self.torch.as_tensor(counts), "counts")
        factors = self.torch.zeros(len(rows), device=rows.device)
        begin = 0
        for expert, count in enumerate(int(count) for count in counts):
            self.same(
                f"sources of rows of expert {expert}, expanded",
                rows[begin : begin + count][self.order(rows[begin : begin + count])][:, :2],
                self._of("want/sources")[(self._of("want/choices") == expert).any(1)],
            )
            factors[begin : begin + count] = 2.0 ** ((expert + self.rank * self.local) % 3)
            begin += count
        made = (rows.float() * (factors * self.torch.where(factors == 0, 0, weights))[:, None]).bfloat16()
        self.same("combined, expanded", self.adapter.combine(made, handle, None)[0], "combined")

    def scaled(self) -> None:
        blocks = self.scales.repeat_interleave(BLOCK, 1)
        values = (self.x.float() / blocks).to(self.torch.float8_e4m3fn)
        rows, scales = self.adapter.scaled(values, self.scales, self.idx, self.weights)
        restored = rows.float() * scales.float().repeat_interleave(BLOCK, 1)
        self.same("sources of FP8 rows times scales", restored[self.order(restored)][:, :2], "sources")

    def low_latency(self) -> None:
        rows, counts, handle = self.adapter.low_latency(self.x, self.idx)
        self.same("counts, low latency", self.torch.as_tensor(counts), "counts")
        for expert, count in enumerate(int(count) for count in counts):
            got = rows[expert, :count]
            wanted = self._of("want/sources")[(self._of("want/choices") == expert).any(1)]
            self.same(f"sources of rows of expert {expert}, low latency", got[self.order(got)][:, :2], wanted)
        factors = 2.0 ** ((self.torch.arange(self.local, device=rows.device) + self.rank * self.local) % 3)
        made = (rows.float() * factors[:, None, None]).bfloat16()
        combined = self.adapter.low_latency_combine(made, self.idx, self.weights, handle)
        self.same("combined, low latency", combined, "combined")


def check(adapter: Any, vectors: Any, kind: str, rank: int, device: Any = "cpu") -> list[str]:
    """What an implementation gets wrong on a rank: nothing, or a line for each output. All ranks call it.

    device: of the tensors that the adapter gets
    """
    checks = _Checks(adapter, vectors, kind, rank, device)
    checks.compact()
    for name in ("expanded", "scaled", "low_latency"):
        if getattr(adapter, name, None) is not None:
            getattr(checks, name)()
    return checks.wrong


if __name__ == "__main__":
    np.savez_compressed(sys.argv[1], **vectors(**({"ranks": int(sys.argv[2])} if len(sys.argv) > 2 else {})))
