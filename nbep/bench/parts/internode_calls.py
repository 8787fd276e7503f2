"""Which bytes `nbep bench internode` carries over the two hops, its tokens, and whether they come right.

 dispatch: rank (n, l) --hop 1, between nodes--> rank (d, l) --hop 2, inside node d--> ranks (d, k)
 combine:  rank (n, l) <--hop 1, between nodes-- rank (d, l) <--hop 2, inside node d-- ranks (d, k)

Source: DeepEP tests/test_internode.py (test_main)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import nbep
from nbep.bench.harness.push import Push
from nbep.bench.parts import normal_calls
from nbep.bench.parts.normal_calls import COMBINE_BF16, DISPATCH_BF16, DISPATCH_FP8, WORKS, Inputs, call_of

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


def allowed_us(carried: Carried, push: Push) -> float:
    """The time in which `push` carries as much: over the links, or out of the SMs if that takes longer."""
    return max(carried.link / push.to_peers, carried.stored / push.at_home) / 1e3


def make_tokens(rank: int, tokens: np.ndarray, hidden: int) -> np.ndarray:
    """Rows of a rank [len(tokens), hidden] bf16: its number, the token's digits, then a pattern of both.

    All are integers up to 15, so that sums of up to 16 rows are exact in bf16.
    """
    pattern = ((13 * rank + 7 * tokens) % 31).astype(np.int16)[:, None] + (np.arange(hidden) % 31).astype(np.int16)
    values = pattern % 31 - 15
    values[:, 0] = rank % 16
    values[:, 1 : 1 + NUM_DIGITS] = tokens[:, None] >> 4 * np.arange(NUM_DIGITS) & 15
    return values.astype(np.int8).astype(ml_dtypes.bfloat16)


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


def num_wrong_rows(got: Any, wanted: Any) -> int:
    """Rows of arrays on the GPU that differ in a bit; of arrays with scales those of either."""
    if isinstance(wanted, tuple):
        return max(num_wrong_rows(*pair) for pair in zip(got, wanted, strict=True))
    left, right = normal_calls.arrays.get_bytes(got), normal_calls.arrays.get_bytes(wanted)
    if left.shape != right.shape:
        return max(len(left), len(right), 1)
    return int((left != right).any(axis=1).sum())


def wrong_results(
    comm: Any, buffer: nbep.Buffer, routes: Routes, layout: dict[str, Any], inputs: Inputs, config: nbep.Config
) -> list[str]:
    """What is wrong with one call of each work on this rank."""
    rank, arrays = comm.rank, normal_calls.arrays
    hidden = inputs.xs[DISPATCH_BF16].shape[1]
    x = arrays.put(expected_rows(routes, rank, hidden))
    sums = arrays.put(expected_sums(routes, rank, hidden))
    wanted = {DISPATCH_BF16: x, DISPATCH_FP8: nbep.per_token_cast_to_fp8(x), COMBINE_BF16: sums}
    arrays.wait()
    comm.barrier()  # on one card an allocation may wait for the kernels of other ranks, which wait for this one
    recv_x, _, _, _, handle, _ = buffer.dispatch(inputs.xs[DISPATCH_BF16], config=config, **layout)
    got = {DISPATCH_BF16: recv_x}
    for work in (DISPATCH_FP8, COMBINE_BF16):
        got[work] = call_of(work, buffer, inputs, recv_x, handle, config=config)()[0]
    arrays.wait()
    counts = {work: num_wrong_rows(got[work], wanted[work]) for work in WORKS}
    return [f"rank {rank}: {work}: {count} wrong rows" for work, count in counts.items() if count]
