"""Dispatch and combine of ElasticBuffer.

 compact    rank r receives its tokens by source rank, then token: a row each
 expanded   rank r receives a row for each choice of one of its experts: by expert, then source rank, token, choice;
            each expert begins at a multiple of expert_alignment

x may be a pair, as in `intranode`.
"""

from dataclasses import dataclass

import numpy as np

from nbep.reference.fp8 import BF16
from nbep.reference.intranode import added_biases


@dataclass
class ElasticDispatched:
    """What one rank holds after a dispatch. Rows that no token has hold 0, and -1 in recv_topk_idx."""

    recv_x: np.ndarray  # [num_rows, hidden]
    recv_x_scales: np.ndarray | None  # [num_rows, num_scales]
    recv_topk_idx: np.ndarray | None  # [num_rows, num_topk] int64: local expert, or -1; None if expanded
    recv_topk_weights: np.ndarray  # [num_rows, num_topk] float32; expanded: [num_rows]
    sources: list[tuple[int, int]]  # of each token that came: its rank and its index there
    rows: list[list[int]]  # of each token that came, for each of its choices: its row if expanded, or -1
    num_tokens_per_expert: np.ndarray  # [num_local_experts] int32, unaligned
    psum_per_rank: np.ndarray  # [num_ranks] int32, inclusive
    psum_per_expert: np.ndarray  # [num_local_experts] int32: where rows end; compact: with padding
    num_aligned: list[int]  # rows of each local expert, with padding
    metadata: np.ndarray  # [num tokens that came, 2 + num_topk] int32; see EPHandle.recv_src_metadata
    dst_idx: np.ndarray  # [num_tokens, num_topk] int32; see EPHandle.dst_buffer_slot_idx

    def psum_by_local_index(self, num_nvl_ranks: int) -> np.ndarray:
        """[num_nvl_ranks] int32, inclusive: tokens from the ranks of all nodes by their index in the node."""
        of_ranks = np.diff(self.psum_per_rank, prepend=0)
        return np.cumsum(of_ranks.reshape(-1, num_nvl_ranks).sum(0)).astype(np.int32)

    @property
    def row_is_token(self) -> np.ndarray:
        """Which rows hold a token."""
        used = np.zeros(len(self.recv_x), bool)
        if self.recv_topk_idx is None:
            used[[row for of_token in self.rows for row in of_token if row >= 0]] = True
        else:
            used[: len(self.sources)] = True
        return used


def elastic_dispatch(
    x: list,
    topk_idx: list[np.ndarray],
    topk_weights: list[np.ndarray],
    num_experts: int,
    num_max_tokens: int,
    *,
    expert_alignment: int = 1,
    do_expand: bool = False,
    num_rows: int | None = None,
) -> list[ElasticDispatched]:
    """Send each token to every rank that owns one of its experts.

    Args:     x, topk_idx, topk_weights: one item per source rank
              num_max_tokens: num_max_tokens_per_rank
              num_rows: of the outputs; None: as many as there are rows with padding
    """
    num_ranks = len(x)
    num_local_experts = num_experts // num_ranks
    values = [item[0] if isinstance(item, tuple) else item for item in x]
    scales = [item[1] for item in x] if isinstance(x[0], tuple) else None
    num_topk = topk_idx[0].shape[1]
    results = []
    for rank in range(num_ranks):
        first = rank * num_local_experts
        sources = [
            (src, token)
            for src in range(num_ranks)
            for token in range(len(values[src]))
            if any(first <= expert < first + num_local_experts for expert in topk_idx[src][token])
        ]
        chosen: list[list[tuple[int, int]]] = [[] for _ in range(num_local_experts)]  # by expert: (token that came, k)
        for i, (src, token) in enumerate(sources):
            for k, expert in enumerate(topk_idx[src][token]):
                if first <= expert < first + num_local_experts:
                    chosen[expert - first].append((i, k))
        counts = np.array([len(of_expert) for of_expert in chosen], np.int32)
        aligned = [-(-len(of_expert) // expert_alignment) * expert_alignment for of_expert in chosen]
        starts = [sum(aligned[:expert]) for expert in range(num_local_experts)]
        rows = [[-1] * num_topk for _ in sources]
        if do_expand:
            for start, of_expert in zip(starts, chosen, strict=True):
                for number, (i, k) in enumerate(of_expert):
                    rows[i][k] = start + number
        total = num_rows if num_rows is not None else sum(aligned) if do_expand else len(sources)
        recv_x = np.zeros((total, values[rank].shape[1]), values[rank].dtype)
        recv_scales = None if scales is None else np.zeros((total, scales[rank].shape[1]), scales[rank].dtype)
        recv_idx = None if do_expand else np.full((total, num_topk), -1, np.int64)
        recv_weights = np.zeros((total,) if do_expand else (total, num_topk), np.float32)
        metadata = np.full((len(sources), 2 + num_topk), -1, np.int32)
        for i, (src, token) in enumerate(sources):
            mine = [k for k, expert in enumerate(topk_idx[src][token]) if first <= expert < first + num_local_experts]
            metadata[i, 0], metadata[i, 1] = src * num_max_tokens + token, src * num_topk + mine[-1]
            metadata[i, 2:] = rows[i] if do_expand else [i if k in mine else -1 for k in range(num_topk)]
            for row in [row for row in rows[i] if row >= 0] if do_expand else [i]:
                recv_x[row] = values[src][token]
                if recv_scales is not None and scales is not None:
                    recv_scales[row] = scales[src][token]
            for k in mine:
                if recv_idx is None:
                    recv_weights[rows[i][k]] = topk_weights[src][token][k]
                else:
                    recv_idx[i, k] = topk_idx[src][token][k] - first
                    recv_weights[i, k] = topk_weights[src][token][k]
        ends = [start + (int(n) if do_expand else a) for start, n, a in zip(starts, counts, aligned, strict=True)]
        per_rank = [sum(src <= last for src, _ in sources) for last in range(num_ranks)]
        results.append(
            ElasticDispatched(
                recv_x,
                recv_scales,
                recv_idx,
                recv_weights,
                sources,
                rows,
                counts,
                np.array(per_rank, np.int32),
                np.array(ends, np.int32),
                aligned,
                metadata,
                _indices_there(topk_idx[rank], num_ranks, num_local_experts),
            )
        )
    return results


def _indices_there(topk_idx: np.ndarray, num_ranks: int, num_local_experts: int) -> np.ndarray:
    """Of each choice the token's index among those that go to the same rank; -1 if it is unused."""
    indices = np.full(topk_idx.shape, -1, np.int32)
    for rank in range(num_ranks):
        number = 0
        for token, chosen in enumerate(topk_idx):
            here = [k for k, expert in enumerate(chosen) if expert >= 0 and expert // num_local_experts == rank]
            indices[token, here] = number
            number += bool(here)
    return indices


def elastic_combine(
    x: list[np.ndarray],
    dispatched: list[ElasticDispatched],
    topk_idx: list[np.ndarray],
    *,
    topk_weights: list[np.ndarray] | None = None,
    bias: list | None = None,
    reduces: bool = True,
    num_nvl_ranks: int = 1,
) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Add up what became of each token, at the rank that it came from.

    Sums are in float32: 0, then the biases in order, then the ranks in the order of the last choice that the token has
    there, rounded once to bf16. Of an expanded token a rank sends the sum of its rows, by choice, rounded to bf16; if
    it does not reduce, each row is added for itself, by choice. A node sends the sum of what its ranks would send, in
    the order of the last choice that each has, rounded to bf16.

    Args:     x: per rank [num_rows, hidden] bf16, rows as dispatch delivered them
              topk_weights: per rank [num_rows, num_topk] float32, expanded [num_rows]: taken of each choice from the
              rank of its expert
              num_nvl_ranks: ranks of a node that sends one sum; 1: each rank sends its own
    """
    num_local_experts = len(dispatched[0].num_tokens_per_expert)
    num_ranks = len(x)
    came = [{source: i for i, source in enumerate(there.sources)} for there in dispatched]
    results: list[tuple[np.ndarray, np.ndarray | None]] = []
    for rank in range(num_ranks):
        num_tokens, num_topk = topk_idx[rank].shape
        total = np.zeros((num_tokens, x[rank].shape[1]), np.float32)
        for term in added_biases(bias[rank] if bias is not None else None):
            total += term.astype(np.float32)
        weights = None if topk_weights is None else np.zeros((num_tokens, num_topk), np.float32)
        for token in range(num_tokens):
            owners = [int(expert) // num_local_experts if expert >= 0 else -1 for expert in topk_idx[rank][token]]
            of_node = np.zeros((num_ranks, x[rank].shape[1]), np.float32)
            for k, owner in enumerate(owners):
                if owner < 0:
                    continue
                i = came[owner][rank, token]
                rows = dispatched[owner].rows[i]
                expanded = dispatched[owner].recv_topk_idx is None
                if weights is not None and topk_weights is not None:
                    weights[token, k] = topk_weights[owner][rows[k]] if expanded else topk_weights[owner][i, k]
                if expanded and not reduces:
                    total[token] += x[owner][rows[k]].astype(np.float32)
                elif owner not in owners[k + 1 :]:
                    of_node[owner // num_nvl_ranks] += _sent(x[owner], rows if expanded else [i]).astype(np.float32)
                    if all(later < 0 or later // num_nvl_ranks != owner // num_nvl_ranks for later in owners[k + 1 :]):
                        total[token] += of_node[owner // num_nvl_ranks].astype(BF16).astype(np.float32)
        results.append((total.astype(BF16), weights))
    return results


def _sent(x: np.ndarray, rows: list[int]) -> np.ndarray:
    """What a rank sends of a token: the sum of its rows."""
    total = np.zeros(x.shape[1], np.float32)
    for row in rows:
        if row >= 0:
            total += x[row].astype(np.float32)
    return total.astype(BF16)
