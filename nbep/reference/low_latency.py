"""Dispatch and combine of the low-latency mode. Blocks, halves and counters do not show.

 token t of rank s --> a row of each of its experts, packed by expert, there by source rank --> rank r

T is num_ranks * num_max_tokens; L is num_experts / num_ranks. A source's rows of one expert may come in any order; here
they run by token. `LowLatencyDispatched.in_order` brings what a kernel wrote into this order, so that it can be
compared. Only the first recv_count rows of an expert mean something; here the others are 0, and their src_info is -1.

Deduplicate changes nothing in what dispatch returns; in combine it rounds once more.
"""

from dataclasses import dataclass, replace

import numpy as np

from nbep.reference.fp8 import BF16, pack_ue8m0, per_token_cast_to_fp8, through_logfmt


@dataclass
class LowLatencyDispatched:
    """What one rank holds after a low-latency dispatch."""

    recv_x: np.ndarray  # [L, T, hidden] bf16 or e4m3
    recv_x_scales: np.ndarray | None  # [L, T, hidden / 128] float32, or [L, T, hidden / 512] int32
    recv_count: np.ndarray  # [L] int32
    src_info: np.ndarray  # [L, T] int32: the token's index at its source
    layout_range: np.ndarray  # [L, num_ranks] int64: first row of a source << 32 | number of its rows

    def rows_of(self, local_expert: int, src: int) -> range:
        """The rows of an expert that came from a source."""
        packed = int(self.layout_range[local_expert, src])
        begin, count = packed >> 32, packed & 0xFFFFFFFF
        return range(begin, begin + count)

    def row_of(self, local_expert: int, src: int, token: int) -> int:
        """The row of an expert where a token of a source is."""
        return next(row for row in self.rows_of(local_expert, src) if self.src_info[local_expert, row] == token)

    def in_order(self) -> "LowLatencyDispatched":
        """The same, with the rows of each expert and source by token."""
        num_local_experts, num_rows = self.src_info.shape
        order = np.tile(np.arange(num_rows), (num_local_experts, 1))
        for local_expert in range(num_local_experts):
            for src in range(self.layout_range.shape[1]):
                rows = self.rows_of(local_expert, src)
                tokens = self.src_info[local_expert, rows.start : rows.stop]
                order[local_expert, rows.start : rows.stop] = rows.start + np.argsort(tokens, kind="stable")

        def moved(array: np.ndarray) -> np.ndarray:
            return np.stack([of_expert[rows] for of_expert, rows in zip(array, order, strict=True)])

        return replace(
            self,
            recv_x=moved(self.recv_x),
            recv_x_scales=None if self.recv_x_scales is None else moved(self.recv_x_scales),
            src_info=moved(self.src_info),
        )


def low_latency_dispatch(
    x: list[np.ndarray],
    topk_idx: list[np.ndarray],
    num_max_tokens: int,
    num_experts: int,
    *,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> list[LowLatencyDispatched]:
    """Send every token to each of its experts.

    Args:     use_fp8 casts to e4m3, with a scale for every 128 columns; round_scale makes scales powers of two;
              use_ue8m0 returns their exponents, four in a word
    """
    num_ranks, hidden = len(x), x[0].shape[1]
    num_local_experts, num_rows = num_experts // num_ranks, num_ranks * num_max_tokens
    values, scales = list(x), [np.zeros((len(item), 0), np.float32) for item in x]
    if use_fp8:
        for rank in range(num_ranks):
            values[rank], scales[rank] = per_token_cast_to_fp8(x[rank], round_scale)
            if use_ue8m0:
                scales[rank] = pack_ue8m0(scales[rank])
    results = []
    for rank in range(num_ranks):
        recv_x = np.zeros((num_local_experts, num_rows, hidden), values[rank].dtype)
        recv_x_scales = np.zeros((num_local_experts, num_rows, scales[rank].shape[1]), scales[rank].dtype)
        recv_count = np.zeros(num_local_experts, np.int32)
        src_info = np.full((num_local_experts, num_rows), -1, np.int32)
        layout_range = np.zeros((num_local_experts, num_ranks), np.int64)
        for local_expert in range(num_local_experts):
            row = 0
            for src in range(num_ranks):
                begin = row
                for token in range(len(x[src])):
                    if rank * num_local_experts + local_expert in topk_idx[src][token]:
                        recv_x[local_expert, row] = values[src][token]
                        recv_x_scales[local_expert, row] = scales[src][token]
                        src_info[local_expert, row] = token
                        row += 1
                layout_range[local_expert, src] = begin << 32 | row - begin
            recv_count[local_expert] = row
        results.append(
            LowLatencyDispatched(recv_x, recv_x_scales if use_fp8 else None, recv_count, src_info, layout_range)
        )
    return results


def low_latency_combine(
    x: list[np.ndarray],
    topk_idx: list[np.ndarray],
    topk_weights: list[np.ndarray],
    dispatched: list[LowLatencyDispatched],
    *,
    use_logfmt: bool = False,
    deduplicate: bool = False,
) -> list[np.ndarray]:
    """Add up what experts made of each token with its weights, at the rank that it came from.

    Products and sums are in float32, each rounded, in the order of the choices; -1 is skipped. With deduplicate this
    is done for the experts of each rank, rounded to bf16, and then the ranks' results are added in the order of their
    first choices.

    Args:     x: per rank [L, T, hidden] bf16, rows as dispatch delivered them
    Returns:  per rank combined_x [num_tokens, hidden] bf16
    """
    num_ranks, hidden = len(x), x[0].shape[2]
    num_local_experts = len(x[0])
    results = []
    for rank in range(num_ranks):
        combined_x = np.zeros((len(topk_idx[rank]), hidden), BF16)
        for token, choices in enumerate(topk_idx[rank]):
            sums: dict[int, np.ndarray] = {}  # of each rank with deduplicate, else of all of them
            for expert, weight in zip(choices, topk_weights[rank][token], strict=True):
                if expert < 0:
                    continue
                owner, local_expert = divmod(int(expert), num_local_experts)
                row = x[owner][local_expert, dispatched[owner].row_of(local_expert, rank, token)]
                values = through_logfmt(row) if use_logfmt else row.astype(np.float32)
                total = sums.setdefault(owner if deduplicate else -1, np.zeros(hidden, np.float32))
                total += values * weight
            if deduplicate:
                total = np.zeros(hidden, np.float32)
                for of_rank in sums.values():  # in the order in which they were begun
                    total += of_rank.astype(BF16).astype(np.float32)
            else:
                total = sums.get(-1, np.zeros(hidden, np.float32))
            combined_x[token] = total.astype(BF16)
        results.append(combined_x)
    return results
