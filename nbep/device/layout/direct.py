"""The part of a rank's symmetric memory that peers fill without rings. It is the last one, behind all others.

 offset 0          addresses of this part at all ranks: [MAX_POINTERS] s64
 FIXED             rank_counts, expert_counts: as in layout.intranode, for the notify kernels. The area starts here
 FIXED + RINGS     arrived [MAX_NVL_PEERS] s32, next_token s32
 then a share      landed [...] s32, slots [num_slots, slot_bytes], topk_weights [num_slots, num_topk] f32    (combine)
 then two shares   a half: channel_starts [num_ranks, num_channels] s32, recv_x [num_rows, hidden_bytes],
                   recv_x_scales, recv_topk_idx, recv_topk_weights, recv_src_idx, as many rows each           (dispatch)

All offsets but the pointers' count from the area's start. The three shares are equally large. How many rows of a half
and slots there are follows from what a row takes, so all ranks come to the same numbers: senders know where a peer's
arrays begin without asking.

A slot is for one (token, rank) of the owner: those of rank 0 first, then those of rank 1, ..., its own left out, each
in the order of the tokens. landed has a word for each chunk of them: see locate_landed.
"""

from functools import lru_cache
from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import POINTER_TABLE_BYTES
from nbep.device.jit import device_function
from nbep.device.layout.intranode import (
    ALIGNMENT_BYTES,
    EXPERT_COUNTS,
    MAX_NVL_PEERS,
    RINGS,
    align_up,
)
from nbep.device.types import I32, I64

FIXED = POINTER_TABLE_BYTES
NUM_SHARES = 3
NUM_HALVES = 2
CELL_WORDS = ALIGNMENT_BYTES // 4  # arrived, next_token, and room up to landed
NEXT_TOKEN = RINGS + 4 * MAX_NVL_PEERS
SHARES = RINGS + 4 * CELL_WORDS
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


class SlotShape(NamedTuple):
    """What a sender and a receiver of a direct combine must agree on."""

    num_ranks: I32
    num_channels: I32
    hidden_bytes: I32
    num_topk: I32
    chunk: I32  # slots that become readable together


class SlotPlaces(NamedTuple):
    """Where combine's arrays begin, in bytes from the area's start, and how many slots there are."""

    landed: I64
    x: I64
    topk_weights: I64
    num_slots: I32


@device_function
def slot_stride(hidden_bytes):
    """From a slot to the next."""
    return align_up(hidden_bytes, ALIGNMENT_BYTES)


@device_function
def locate_landed(first_slot, rank, chunk):
    """Which word of landed is the first of a rank's chunks, given its first slot. No two chunks have the same."""
    return ptx.u32_div(first_slot, chunk) + rank


def num_landed_words(num_slots: int, num_ranks: int, chunk: int) -> int:
    """Words of landed that so many slots need."""
    return num_slots // chunk + num_ranks


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
def place_slots(num_bytes: int, shape: SlotShape) -> SlotPlaces:
    """Combine's arrays for rows of this shape, with as many slots as there is room for."""
    room = max(0, share_bytes(num_bytes) - 4 * shape.num_ranks - 3 * ALIGNMENT_BYTES)
    stride = slot_stride(shape.hidden_bytes)
    num_slots = room * shape.chunk // (shape.chunk * (stride + 4 * shape.num_topk) + 4)
    landed_bytes = 4 * num_landed_words(num_slots, shape.num_ranks, shape.chunk)
    x = SHARES + align_up(landed_bytes, ALIGNMENT_BYTES)
    return SlotPlaces(SHARES, x, x + num_slots * stride, num_slots)


def num_direct_bytes_needed(num_rows: int, num_slots: int, num_ranks: int, shape: DirectShape, slots: SlotShape) -> int:
    """Bytes of the part in which a half has room for so many rows, and combine for so many slots."""
    half = num_rows * row_bytes(shape) + 4 * num_ranks * shape.num_channels + NUM_PARTS * ALIGNMENT_BYTES
    landed_bytes = 4 * (num_landed_words(num_slots, num_ranks, slots.chunk) + num_ranks + 1)
    places = num_slots * (slot_stride(slots.hidden_bytes) + 4 * slots.num_topk) + landed_bytes + 3 * ALIGNMENT_BYTES
    return FIXED + SHARES + NUM_SHARES * align_up(max(half, places), ALIGNMENT_BYTES)


def describe_direct(
    half: tuple[HalfPlaces, DirectShape, int] | None,
    slots: tuple[SlotPlaces, SlotShape] | None,
    num_ranks: int,
    offset: int,
) -> str:
    """Name the cell at an offset of the area, for reports.

    half: of the latest dispatch, with its number; slots: of the latest combine
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
    if offset < SHARES:
        return "next_token"
    if half is not None and offset >= half[0].channel_starts:
        return _describe_half(*half, offset)
    if slots is not None:
        return _describe_slots(*slots, offset)
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


def _describe_slots(places: SlotPlaces, shape: SlotShape, offset: int) -> str:
    if offset < places.x:
        return f"landed[{(offset - places.landed) // 4}]"
    if offset < places.topk_weights:
        slot, at = divmod(offset - places.x, slot_stride(shape.hidden_bytes))
        return f"x[slot {slot}] + {at}"
    if shape.num_topk == 0:
        return f"direct area + {offset}"
    slot, at = divmod(offset - places.topk_weights, 4 * shape.num_topk)
    return f"topk_weights[slot {slot}] + {at}"
