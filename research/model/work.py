"""What a call is asked to do: its sizes, and the tokens' choices as DeepEP's tests draw them.

normal modes     top-k of all experts, after only the best 4 nodes of a token are left (top-4 groups, a node a group)
low latency      top-k of all experts

Source: DeepEP v1.2.1 tests/test_internode.py and tests/test_low_latency.py (test_main), tests/utils.py
(create_grouped_scores)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nbep.host.transport.base import TransportName
from nbep.reference import get_dispatch_layout

INTRANODE, INTERNODE, LOW_LATENCY = MODES = ("intranode", "internode", "low_latency")
DISPATCH, COMBINE = VERBS = ("dispatch", "combine")
MAX_GROUPS = 4  # nodes that a token may go to in the normal modes


@dataclass(frozen=True)
class Work:
    """A dispatch and the combine that follows it, on every rank.

    num_nvl_peers ranks of a node; num_tokens of each rank; use_fp8 dispatch sends e4m3 with scales, combine bf16
    num_channels and the chunks are of the normal modes: tokens that go before a tail moves
    """

    mode: str
    num_ranks: int
    num_nvl_peers: int
    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    use_fp8: bool = True
    num_channels: int = 1
    nvl_chunks: tuple[int, int] = (1, 1)  # of dispatch and of combine
    rdma_chunks: tuple[int, int] = (1, 1)
    transport: TransportName = "ibgda"
    seed: int = 0

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_nvl_peers

    def topk_idx(self, rank: int) -> np.ndarray:
        """[num_tokens, num_topk] int64: what the tokens of a rank choose, best first. The same for the same seed."""
        return _draw(self, rank)

    def routes(self, rank: int) -> np.ndarray:
        """[num_tokens, num_ranks] bool: to which ranks each token of a rank goes, as the reference's layout says."""
        return get_dispatch_layout(self.topk_idx(rank), self.num_experts, self.num_ranks).is_token_in_rank


@lru_cache(maxsize=64)
def _draw(work: Work, rank: int) -> np.ndarray:
    rng = np.random.default_rng((work.seed, rank))
    scores = np.abs(rng.standard_normal((work.num_tokens, work.num_experts), np.float32)) + 1
    if work.mode != LOW_LATENCY and work.num_nodes > MAX_GROUPS:
        of_nodes = scores.reshape(work.num_tokens, work.num_nodes, -1)
        others = np.argsort(of_nodes.max(axis=2), axis=1)[:, :-MAX_GROUPS]
        np.put_along_axis(of_nodes, others[:, :, None], 0, axis=1)
    best = np.argpartition(scores, -work.num_topk, axis=1)[:, -work.num_topk :]
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
    return np.take_along_axis(best, order, axis=1).astype(np.int64)
