"""The symmetric buffer of one rank inside a node.

 offset 0                 rank_prefix_matrix  [num_ranks, num_ranks] s32     (row: source rank)
 EXPERT_COUNTS            expert_counts       [num_ranks, num_local_experts] s32
 RINGS                    start, end, head, tail: [num_channels, num_ranks] s32 each
                          x, src_idx, topk_idx, topk_weights, scales: [num_channels, num_ranks, num_slots, ...]

A ring carries the tokens of one (channel, source rank) to the owner of the buffer. What a rank sends to itself takes no
ring, so those whose source is the owner stay empty. Dispatch and combine share the layout; combine leaves start, end,
src_idx, topk_idx and scales unused. Behind the buffer's num_nvl_bytes come the barrier signals and the two pointer
tables.

Unlike DeepEP, the expert counts have a place of their own instead of lying under the ring cells, and combine's rings
do not overwrite the prefix matrix: no cell has two meanings, so a report can name each of them.

Source: DeepEP csrc/kernels/intranode.cu (the comments at "Channel buffer metadata" and "Channel data buffers")
"""

from functools import lru_cache
from typing import NamedTuple

from nbep.device.jit import device_function
from nbep.device.types import I32

MAX_NVL_PEERS = 8
MAX_LOCAL_EXPERTS = 128
MAX_TOPK = 32
ALIGNMENT_BYTES = 128

EXPERT_COUNTS = MAX_NVL_PEERS * MAX_NVL_PEERS * 4
RINGS = EXPERT_COUNTS + MAX_NVL_PEERS * MAX_LOCAL_EXPERTS * 4
NUM_RING_CELLS = 4  # start, end, head, tail

# Behind num_nvl_bytes
BARRIER_SIGNAL_BYTES = ALIGNMENT_BYTES
POINTER_TABLE_BYTES = ALIGNMENT_BYTES
TRAILER_BYTES = BARRIER_SIGNAL_BYTES + 2 * POINTER_TABLE_BYTES


class RingShape(NamedTuple):
    """What the sender and the receiver of a ring must agree on."""

    num_ranks: I32
    num_channels: I32
    num_slots: I32
    hidden_bytes: I32
    num_topk: I32
    num_scales: I32


class Ring(NamedTuple):
    """The addresses of one ring's cells and slots in the receiver's buffer."""

    start: int
    end: int
    head: int
    tail: int
    x: int
    src_idx: int
    topk_idx: int
    topk_weights: int
    scales: int


@device_function
def align_up(value, multiple):
    return (value + multiple - 1) // multiple * multiple


@device_function
def num_ring_cell_words(shape):
    """Words that a notify kernel resets: start, end, head and tail of every ring."""
    return NUM_RING_CELLS * shape.num_channels * shape.num_ranks


@device_function
def locate_ring(base, shape, channel, src_rank):
    """The ring of (channel, src_rank) in the buffer that starts at address base.

    The slots of one (channel, src_rank) lie together; x rows are 16-byte aligned because hidden_bytes is a multiple
    of 16.
    """
    num_rings = shape.num_channels * shape.num_ranks
    ring = channel * shape.num_ranks + src_rank
    cells = base + RINGS
    x = cells + align_up(NUM_RING_CELLS * num_rings * 4, ALIGNMENT_BYTES)
    num_slots = num_rings * shape.num_slots
    src_idx = x + align_up(num_slots * shape.hidden_bytes, ALIGNMENT_BYTES)
    topk_idx = src_idx + align_up(num_slots * 4, ALIGNMENT_BYTES)
    topk_weights = topk_idx + align_up(num_slots * shape.num_topk * 8, ALIGNMENT_BYTES)
    scales = topk_weights + align_up(num_slots * shape.num_topk * 4, ALIGNMENT_BYTES)
    slot = ring * shape.num_slots
    return Ring(
        cells + 4 * ring,
        cells + 4 * (num_rings + ring),
        cells + 4 * (2 * num_rings + ring),
        cells + 4 * (3 * num_rings + ring),
        x + slot * shape.hidden_bytes,
        src_idx + slot * 4,
        topk_idx + slot * shape.num_topk * 8,
        topk_weights + slot * shape.num_topk * 4,
        scales + slot * shape.num_scales * 4,
    )


@lru_cache(maxsize=1024)
def num_nvl_bytes_needed(shape: RingShape) -> int:
    """Bytes of symmetric buffer that rings of this shape take, a multiple of ALIGNMENT_BYTES."""
    past_the_end = locate_ring(0, shape, shape.num_channels, 0)
    return align_up(past_the_end.scales, ALIGNMENT_BYTES)


def describe_offset(shape: RingShape | None, num_nvl_bytes: int, offset: int) -> str:
    """Name the cell at a byte offset of the buffer, for reports. shape is that of the latest launch, if any."""
    if offset >= num_nvl_bytes:
        trailer = offset - num_nvl_bytes
        if trailer < BARRIER_SIGNAL_BYTES:
            return f"barrier_signal[rank {trailer // 4}]"
        return f"pointer table + {trailer - BARRIER_SIGNAL_BYTES}"
    if shape is None:
        return f"buffer + {offset}"
    if offset < EXPERT_COUNTS:
        src, dst = divmod(offset // 4, shape.num_ranks)
        return f"rank_prefix_matrix[src {src}, dst {dst}]"
    if offset < RINGS:
        return f"expert_counts word {(offset - EXPERT_COUNTS) // 4}"
    num_rings = shape.num_channels * shape.num_ranks
    cell, ring = divmod((offset - RINGS) // 4, num_rings)
    if cell < NUM_RING_CELLS:
        channel, src = divmod(ring, shape.num_ranks)
        return f"{('start', 'end', 'head', 'tail')[cell]}[channel {channel}, src {src}]"
    first = locate_ring(0, shape, 0, 0)
    row_bytes = {
        "x": shape.hidden_bytes,
        "src_idx": 4,
        "topk_idx": 8 * shape.num_topk,
        "topk_weights": 4 * shape.num_topk,
        "scales": 4 * shape.num_scales,
    }
    for name, width in reversed(row_bytes.items()):
        begin = getattr(first, name)
        if width and begin <= offset < begin + num_rings * shape.num_slots * width:
            slot, byte = divmod(offset - begin, width)
            ring, slot = divmod(slot, shape.num_slots)
            channel, src = divmod(ring, shape.num_ranks)
            return f"{name}[channel {channel}, src {src}, slot {slot}] + {byte}"
    return f"buffer + {offset} (padding)"
