"""What `nbep bench internode` sends, which bytes that carries over the two hops, and whether it comes right.

 dispatch: rank (n, l) --hop 1, between nodes--> rank (d, l) --hop 2, inside node d--> ranks (d, k)
 combine:  rank (n, l) <--hop 1, between nodes-- rank (d, l) <--hop 2, inside node d-- ranks (d, k)

Source: DeepEP tests/test_internode.py (test_main) and tests/utils.py (create_grouped_scores)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import nbep
from nbep.bench.parts.normal_clock import Push

DISPATCH_BF16, DISPATCH_FP8, COMBINE_BF16 = WORKS = ("dispatch bf16", "dispatch fp8", "combine bf16")
NUM_DIGITS = 6  # columns that say which token it is, in base 16, behind the one for its rank


class Carried(NamedTuple):
    """Bytes of tokens that one call carries, the mean over ranks; scales count, top-k and other notes do not.

    rdma     hop 1: a token once for each node that it goes to, its own too; DeepEP's count
    nvl      hop 2: a token once for each rank that it goes to; DeepEP's count
    stored   both hops: what SMs store on the way, whether it leaves the GPU or not; rdma and nvl together
    link     both hops: what goes to another rank, so that it crosses a link where each rank has a GPU
    """

    rdma: float
    nvl: float
    stored: float
    link: float


class Routes(NamedTuple):
    """Where tokens of all ranks go: is_token_in_rank [num_ranks (source), num_tokens, num_ranks] bool."""

    is_token_in_rank: np.ndarray
    num_nvl_peers: int

    @property
    def num_ranks(self) -> int:
        return self.is_token_in_rank.shape[2]

    def carried(self, token_bytes: int) -> Carried:
        """Bytes of a call; a combine takes the same ways back."""
        num_ranks, size = self.num_ranks, self.num_nvl_peers
        to_rank = self.is_token_in_rank.sum(axis=1)  # [source, goal]
        in_node = self.is_token_in_rank.reshape(num_ranks, -1, num_ranks // size, size).any(axis=3)
        to_node = in_node.sum(axis=1)  # [source, node]
        sources, goals = np.indices(to_rank.shape)
        own_node = np.arange(num_ranks)[:, None] // size == np.arange(num_ranks // size)
        rdma, nvl = int(to_node.sum()), int(to_rank.sum())
        # A forwarder has the place of the source, so a rank forwards to itself what comes from its own place.
        link = int(to_node[~own_node].sum() + to_rank[sources % size != goals % size].sum())
        of_rank = token_bytes / num_ranks
        return Carried(rdma * of_rank, nvl * of_rank, (rdma + nvl) * of_rank, link * of_rank)


def token_bytes(work: str, hidden: int) -> int:
    """Of a row and its scales."""
    return hidden + hidden // 128 * 4 if work == DISPATCH_FP8 else 2 * hidden


def allowed_us(carried: Carried, push: Push) -> float:
    """The time in which `push` carries as much: over the links, or out of the SMs if that takes longer."""
    return max(carried.link / push.to_peers, carried.stored / push.at_home) / 1e3


# Inputs


def choose_experts(rank: int, num_tokens: int, num_topk: int, num_experts: int, num_nodes: int, num_groups: int) -> Any:
    """topk_idx [num_tokens, num_topk] int64: of the num_groups nodes with the best experts, the best experts."""
    rng = np.random.default_rng(rank)
    scores = np.abs(rng.standard_normal((num_tokens, num_experts), np.float32)) + 1
    of_nodes = scores.reshape(num_tokens, num_nodes, -1)
    best = np.argsort(-of_nodes.max(axis=2), axis=1)[:, :num_groups]
    is_chosen = np.zeros((num_tokens, num_nodes, 1), bool)
    np.put_along_axis(is_chosen, best[:, :, None], True, axis=1)
    masked = np.where(is_chosen, of_nodes, 0).reshape(num_tokens, num_experts)
    return np.argpartition(-masked, num_topk - 1, axis=1)[:, :num_topk].astype(np.int64)


def make_tokens(rank: int, tokens: np.ndarray, hidden: int) -> np.ndarray:
    """Rows of a rank [len(tokens), hidden] bf16: its number, the token's digits, then a pattern of both.

    All are integers up to 15, so that sums of up to 16 rows are exact in bf16.
    """
    pattern = ((13 * rank + 7 * tokens) % 31).astype(np.int16)[:, None] + (np.arange(hidden) % 31).astype(np.int16)
    values = pattern % 31 - 15
    values[:, 0] = rank % 16
    values[:, 1 : 1 + NUM_DIGITS] = tokens[:, None] >> 4 * np.arange(NUM_DIGITS) & 15
    return values.astype(np.int8).astype(ml_dtypes.bfloat16)


class GpuArrays:
    """NumPy arrays as torch's on the GPU, and the bytes of those."""

    @staticmethod
    def put(array: np.ndarray) -> Any:
        import torch

        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(array).cuda()

    @staticmethod
    def get_bytes(array: Any) -> np.ndarray:
        """[rows, bytes]"""
        import torch

        return array.contiguous().view(torch.uint8).cpu().numpy()

    @staticmethod
    def wait() -> None:
        import torch

        torch.cuda.current_stream().synchronize()


# What comes


def expected_rows(routes: Routes, rank: int, hidden: int) -> np.ndarray:
    """What a rank receives: by source rank, then token."""
    return np.concatenate(
        [
            make_tokens(source, np.flatnonzero(routes.is_token_in_rank[source, :, rank]), hidden)
            for source in range(routes.num_ranks)
        ]
    )


def expected_sums(routes: Routes, rank: int, hidden: int) -> np.ndarray:
    """What combine makes of unchanged rows: each token as often as it went to a rank."""
    goals = routes.is_token_in_rank[rank].sum(axis=1)
    rows = make_tokens(rank, np.arange(len(goals)), hidden)
    return (rows.astype(np.float32) * goals[:, None]).astype(ml_dtypes.bfloat16)


def num_wrong_rows(arrays: Any, got: Any, wanted: Any) -> int:
    """Rows of arrays on the GPU that differ in a bit; of arrays with scales those of either."""
    if isinstance(wanted, tuple):
        return max(num_wrong_rows(arrays, *pair) for pair in zip(got, wanted, strict=True))
    left, right = arrays.get_bytes(got), arrays.get_bytes(wanted)
    if left.shape != right.shape:
        return max(len(left), len(right), 1)
    return int((left != right).any(axis=1).sum())


def wrong_results(
    comm: Any,
    buffer: nbep.Buffer,
    arrays: Any,
    routes: Routes,
    layout: dict[str, Any],
    xs: dict[str, Any],
    config: nbep.Config,
) -> list[str]:
    """What is wrong with one call of each work on this rank."""
    rank = comm.rank
    hidden = xs[DISPATCH_BF16].shape[1]
    x = arrays.put(expected_rows(routes, rank, hidden))
    sums = arrays.put(expected_sums(routes, rank, hidden))
    wanted = {DISPATCH_BF16: x, DISPATCH_FP8: nbep.per_token_cast_to_fp8(x), COMBINE_BF16: sums}
    arrays.wait()
    comm.barrier()  # on one card an allocation may wait for the kernels of other ranks, which wait for this one
    recv_x, _, _, _, handle, _ = buffer.dispatch(xs[DISPATCH_BF16], config=config, **layout)
    assert handle is not None
    got: dict[str, Any] = {
        DISPATCH_BF16: recv_x,
        DISPATCH_FP8: buffer.dispatch(xs[DISPATCH_FP8], handle=handle, config=config)[0],
        COMBINE_BF16: buffer.combine(recv_x, handle, config=config)[0],
    }
    arrays.wait()
    counts = {work: num_wrong_rows(arrays, got[work], wanted[work]) for work in WORKS}
    return [f"rank {rank}: {work}: {count} wrong rows" for work, count in counts.items() if count]
