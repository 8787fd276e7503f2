"""The symmetric buffer of one rank inside a node.

 offset 0                 rank_counts         [num_ranks, num_ranks] s32     (row: source rank)
 EXPERT_COUNTS            expert_counts       [num_ranks, num_local_experts] s32
 RINGS                    start, end, head, tail: [num_channels, num_ranks] s32 each
                          slots: [num_channels, num_ranks, num_slots]

 a slot                   header: topk_idx [num_topk] s64, topk_weights [num_topk] f32, scales [num_scales] 4 bytes,
                          src_idx [num_src_idx] s32; x [hidden_bytes]; both start at multiples of ALIGNMENT_BYTES

A ring carries the tokens of one (channel, source rank) to the owner of the buffer. What a rank sends to itself takes no
ring, so those whose source is the owner stay empty. Dispatch and combine share the layout; combine leaves start, end
and all of the header but the weights unused. Behind the buffer's num_nvl_bytes come the barrier signals, the two
pointer tables and what peers say of a call that differs.

A header lies in front of its row, with padding between, so that the row's first bulk copy takes it along. DeepEP has
an array for each, which takes stores of 4 and 8 bytes over the wire. Messages that start elsewhere than at multiples of
128 bytes are slower there, see records/attempts.md.

Unlike DeepEP, the counts have a place of their own instead of lying under the ring cells: no cell has two meanings, so
a report can name each of them.

Source: DeepEP csrc/kernels/intranode.cu (the comments at "Channel buffer metadata" and "Channel data buffers")
"""

from functools import lru_cache
from typing import NamedTuple

from nbep.device.alignment import ALIGNMENT_BYTES, align_up
from nbep.device.jit import device_function
from nbep.device.protocols.peers import MAX_NVL_PEERS, PEERS_BYTES
from nbep.device.types import I32

MAX_LOCAL_EXPERTS = 128
MAX_TOPK = 32

EXPERT_COUNTS = MAX_NVL_PEERS * MAX_NVL_PEERS * 4
OFFER_BYTES = 16  # of a rank, in what it offers to another one: see fetched_sums
RINGS = EXPERT_COUNTS + MAX_NVL_PEERS * MAX_LOCAL_EXPERTS * 4
NUM_RING_CELLS = 4  # start, end, head, tail

# Behind num_nvl_bytes
CALL_ROWS = PEERS_BYTES  # from the signals on: a row for each peer; see parts.calls
CALL_BYTES = 64
TRAILER_BYTES = CALL_ROWS + MAX_NVL_PEERS * CALL_BYTES


class RingShape(NamedTuple):
    """What the sender and the receiver of a ring must agree on."""

    num_ranks: I32
    num_channels: I32
    num_slots: I32
    hidden_bytes: I32
    num_topk: I32
    num_scales: I32
    num_src_idx: (
        I32  # 1 if the receiver is to know where a token was at its rank, else 0; between nodes the source meta
    )


class Ring(NamedTuple):
    """The addresses of one ring's cells and of its first slot's row in the receiver's buffer."""

    start: int
    end: int
    head: int
    tail: int
    x: int


class Header(NamedTuple):
    """The addresses of what goes with one row. Where the sizes in the ring's shape are 0 there is no such part."""

    topk_idx: int
    topk_weights: int
    scales: int
    src_idx: int


@device_function
def num_ring_cell_words(shape):
    """Words that a notify kernel resets: start, end, head and tail of every ring."""
    return NUM_RING_CELLS * shape.num_channels * shape.num_ranks


@device_function
def header_bytes(shape):
    """Bytes of the header in a slot, with the padding behind them."""
    return align_up(12 * shape.num_topk + 4 * (shape.num_scales + shape.num_src_idx), ALIGNMENT_BYTES)


@device_function
def slot_bytes(shape):
    """From a slot to the next."""
    return header_bytes(shape) + align_up(shape.hidden_bytes, ALIGNMENT_BYTES)


@device_function
def locate_ring(base, shape, channel, src_rank):
    """The ring of (channel, src_rank) in the buffer that starts at address base; its slots lie together."""
    num_rings = shape.num_channels * shape.num_ranks
    ring = channel * shape.num_ranks + src_rank
    cells = base + RINGS
    slots = cells + align_up(NUM_RING_CELLS * num_rings * 4, ALIGNMENT_BYTES)
    return Ring(
        cells + 4 * ring,
        cells + 4 * (num_rings + ring),
        cells + 4 * (2 * num_rings + ring),
        cells + 4 * (3 * num_rings + ring),
        slots + ring * shape.num_slots * slot_bytes(shape) + header_bytes(shape),
    )


@device_function
def locate_header(row, shape):
    """The header in front of the row of a slot, or of a stage."""
    topk_idx = row - header_bytes(shape)
    topk_weights = topk_idx + 8 * shape.num_topk
    scales = topk_weights + 4 * shape.num_topk
    return Header(topk_idx, topk_weights, scales, scales + 4 * shape.num_scales)


@lru_cache(maxsize=1024)
def num_nvl_bytes_needed(shape: RingShape) -> int:
    """Bytes of symmetric buffer that rings of this shape take, a multiple of ALIGNMENT_BYTES."""
    past_the_end = locate_ring(0, shape, shape.num_channels, 0)
    return past_the_end.x - header_bytes(shape)
