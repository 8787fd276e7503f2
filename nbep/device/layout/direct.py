"""The part of a rank's symmetric memory that peers fill without rings. It is the last one, behind all others.

 offset 0          addresses of this part at all ranks: [MAX_POINTERS] s64
 FIXED             rank_counts, expert_counts: as in layout.intranode, for the notify kernels. The area starts here
 FIXED + RINGS     arrived [MAX_NVL_PEERS] s32, next_token s32
 FIXED + OFFERS    offers of each rank [MAX_NVL_PEERS, OFFER_BYTES]: see fetched_sums                         (combine)
 then a share      x [num_rows, hidden_bytes], topk_weights [num_rows, num_topk] f32: what lies elsewhere     (combine)
 then two shares   a half: channel_starts [num_ranks, num_channels] s32, recv_x [num_rows, hidden_bytes],
                   recv_x_scales, recv_topk_idx, recv_topk_weights, recv_src_idx, as many rows each           (dispatch)

All offsets but the pointers' count from the area's start. The three shares are equally large. How many rows of a half
there are follows from what a row takes, so all ranks come to the same number: senders know where a peer's arrays begin
without asking.
"""

from functools import lru_cache
from typing import NamedTuple

from nbep.device.alignment import POINTER_TABLE_BYTES
from nbep.device.layout.intranode import (
    ALIGNMENT_BYTES,
    EXPERT_COUNTS,
    MAX_NVL_PEERS,
    OFFER_BYTES,
    RINGS,
    align_up,
)
from nbep.device.types import I32, I64

FIXED = POINTER_TABLE_BYTES
NUM_SHARES = 3
NUM_HALVES = 2
CELL_WORDS = ALIGNMENT_BYTES // 4  # arrived, next_token, and room up to the offers
NEXT_TOKEN = RINGS + 4 * MAX_NVL_PEERS
OFFERS = RINGS + 4 * CELL_WORDS
SHARES = OFFERS + OFFER_BYTES * MAX_NVL_PEERS
NUM_PARTS = 6  # of a half, each of which starts at a multiple of ALIGNMENT_BYTES


class DirectShape(NamedTuple):
    """What a sender and a receiver of a direct dispatch must agree on."""

    num_channels: I32
    hidden_bytes: I32
    num_topk: I32
    num_scales: I32
    num_src_idx: I32  # 1 if the receiver is to know where a token was at its rank, else 0


class HalfPlaces(NamedTuple):
    """Where the arrays of a half begin, in bytes from the area's start, and how many rows each has."""

    channel_starts: I64
    x: I64
    scales: I64
    topk_idx: I64
    topk_weights: I64
    src_idx: I64
    num_rows: I32


class RowPlaces(NamedTuple):
    """Where what a combine lays out begins, in bytes from the area's start, and how many rows there may be."""

    x: I64
    topk_weights: I64
    num_rows: I32


def share_bytes(num_bytes: int) -> int:
    """Bytes of each share of a part of num_bytes."""
    return max(0, num_bytes - FIXED - SHARES) // NUM_SHARES // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def row_bytes(shape: DirectShape) -> int:
    """What one received token takes."""
    return shape.hidden_bytes + 4 * (shape.num_scales + shape.num_src_idx) + 12 * shape.num_topk


@lru_cache(maxsize=1024)
def place_half(num_bytes: int, half: int, num_ranks: int, shape: DirectShape) -> HalfPlaces:
    """The arrays of a half for tokens of this shape, with as many rows as there is room for."""
    share = share_bytes(num_bytes)
    starts_bytes = 4 * num_ranks * shape.num_channels
    num_rows = max(0, share - starts_bytes - NUM_PARTS * ALIGNMENT_BYTES) // row_bytes(shape)
    at = SHARES + (1 + half) * share
    places: list[int] = []
    for num_part_bytes in (
        starts_bytes,
        num_rows * shape.hidden_bytes,
        4 * num_rows * shape.num_scales,
        8 * num_rows * shape.num_topk,
        4 * num_rows * shape.num_topk,
        4 * num_rows * shape.num_src_idx,
    ):
        places.append(at)
        at += align_up(num_part_bytes, ALIGNMENT_BYTES)
    return HalfPlaces._make((*places, num_rows))


@lru_cache(maxsize=1024)
def place_rows(num_bytes: int, hidden_bytes: int, num_topk: int) -> RowPlaces:
    """Combine's arrays for rows of this shape, with as many as there is room for."""
    num_rows = max(0, share_bytes(num_bytes) - ALIGNMENT_BYTES) // (hidden_bytes + 4 * num_topk)
    return RowPlaces(SHARES, SHARES + align_up(num_rows * hidden_bytes, ALIGNMENT_BYTES), num_rows)


def num_direct_bytes_needed(num_rows: int, num_ranks: int, shape: DirectShape) -> int:
    """Bytes of the part in which a half has room for so many rows, and combine for as many."""
    half = num_rows * row_bytes(shape) + 4 * num_ranks * shape.num_channels + NUM_PARTS * ALIGNMENT_BYTES
    return FIXED + SHARES + NUM_SHARES * align_up(half, ALIGNMENT_BYTES)


def describe_direct(
    half: tuple[HalfPlaces, DirectShape, int] | None,
    rows: RowPlaces | None,
    num_ranks: int,
    offset: int,
) -> str:
    """Name the cell at an offset of the area, for reports.

    half: of the latest dispatch, with its number; rows: of the latest combine
    """
    if offset < 0:
        return f"pointer table of the direct area + {offset + FIXED}"
    if offset < EXPERT_COUNTS:
        src, dst = divmod(offset // 4, num_ranks)
        return f"rank_counts[src {src}, dst {dst}]"
    if offset < RINGS:
        return f"expert_counts word {(offset - EXPERT_COUNTS) // 4}"
    if offset < NEXT_TOKEN:
        return f"arrived[rank {(offset - RINGS) // 4}]"
    if offset < OFFERS:
        return "next_token"
    if offset < SHARES:
        return "offers[rank {}] + {}".format(*divmod(offset - OFFERS, OFFER_BYTES))
    if half is not None and offset >= half[0].channel_starts:
        return _describe_half(*half, offset)
    if rows is not None:
        name, begin = ("x", rows.x) if offset < rows.topk_weights else ("topk_weights", rows.topk_weights)
        return f"{name} of combine + {offset - begin}"
    return f"direct area + {offset}"


def _describe_half(places: HalfPlaces, shape: DirectShape, number: int, offset: int) -> str:
    parts = (
        ("recv_src_idx", places.src_idx, 4),
        ("recv_topk_weights", places.topk_weights, 4 * shape.num_topk),
        ("recv_topk_idx", places.topk_idx, 8 * shape.num_topk),
        ("recv_x_scales", places.scales, 4 * shape.num_scales),
        ("recv_x", places.x, shape.hidden_bytes),
    )
    for name, start, stride in parts:
        if offset >= start and stride > 0:
            row, at = divmod(offset - start, stride)
            if row < places.num_rows:
                return f"{name}[row {row}, half {number}] + {at}"
    src, channel = divmod((offset - places.channel_starts) // 4, shape.num_channels)
    return f"channel_starts[half {number}, src {src}, channel {channel}]"
