"""The symmetric buffer of one rank of an `ElasticBuffer`.

 offset 0          turn s32: how many dispatches there were; next_token s32                       of the owner alone
 RANK_COUNTS       [2, MAX_NVL_PEERS] s32: tokens from each rank to the owner                     (dispatch)
 EXPERT_COUNTS     [2, MAX_NVL_PEERS, MAX_LOCAL_EXPERTS] s32: its choices of each local expert    (dispatch)
 LANDED            [MAX_NVL_PEERS, LANDED_WORDS] s32                                              (combine)
 DATA              two halves, each of half_bytes: what the owner lets the others read            (dispatch)
                   or places x num_max_tokens slots of a row, then their top-k weights            (combine)

 a half            x [num_max_tokens, hidden_bytes], scales [.., num_scales], topk_idx [.., num_topk] s64,
                   topk_weights [.., num_topk] f32, numbers [.., num_topk] s32, lists [num_ranks, num_max_tokens] s32

Dispatches take the halves, and the counts, in turn: while a rank fills one of them, others may still read the other.
Combine takes all of DATA. All ranks meet before it, and then nobody reads a half any more. So the buffer has room for
the larger of the two, not for both.

A slot is for one (place, token) of the owner. With `by_rank` a place is a rank, else a choice of the token.

Source: DeepEP csrc/elastic/buffer.hpp, get_dispatch_buffer_size, get_combine_buffer_size
"""

from functools import lru_cache
from typing import NamedTuple

from nbep.device.alignment import ALIGNMENT_BYTES, align_up
from nbep.device.jit import device_function
from nbep.device.layout.intranode import MAX_LOCAL_EXPERTS, MAX_NVL_PEERS
from nbep.device.types import I32, I64

TURN = 0
NEXT_TOKEN = 4
RANK_COUNTS = ALIGNMENT_BYTES
EXPERT_COUNTS = RANK_COUNTS + 2 * MAX_NVL_PEERS * 4
LANDED = EXPERT_COUNTS + 2 * MAX_NVL_PEERS * MAX_LOCAL_EXPERTS * 4
LANDED_WORDS = 1024
DATA = align_up(LANDED + MAX_NVL_PEERS * LANDED_WORDS * 4, ALIGNMENT_BYTES)


class ElasticShape(NamedTuple):
    """What all ranks must agree on in a dispatch."""

    num_max_tokens: I32
    hidden_bytes: I32
    num_topk: I32
    num_scales: I32


class ElasticPlaces(NamedTuple):
    """How long a half is, and where its arrays begin in it."""

    half_bytes: I64
    x: I64
    scales: I64
    topk_idx: I64
    topk_weights: I64
    numbers: I64
    lists: I64


class ElasticSlots(NamedTuple):
    """What all ranks must agree on in a combine.

    num_places: of a token; by_rank: 1 if its rows have the places of the ranks that they come from, 0 those of choices
    chunk: rows that land together; topk_weights: where the weights of slots begin, from DATA on
    """

    num_max_tokens: I32
    hidden_bytes: I32
    num_topk: I32
    num_places: I32
    by_rank: I32
    chunk: I32
    topk_weights: I64


@device_function
def half_offset(places, number):
    """Where the half of a dispatch begins in a buffer."""
    return DATA + places.half_bytes * (number & 1)


@device_function
def rank_count(number, src):
    """The count of tokens from a rank, for a dispatch."""
    return RANK_COUNTS + 4 * (MAX_NVL_PEERS * (number & 1) + src)


@device_function
def expert_count(number, src, expert):
    """The count of choices of a local expert by a rank, for a dispatch."""
    return EXPERT_COUNTS + 4 * (MAX_LOCAL_EXPERTS * (MAX_NVL_PEERS * (number & 1) + src) + expert)


@device_function
def landed_cell(src, chunk):
    return LANDED + 4 * (LANDED_WORDS * src + chunk)


@device_function
def slot_stride(hidden_bytes):
    return align_up(hidden_bytes, ALIGNMENT_BYTES)


@device_function
def slot_of(slots, place, token):
    """The number of a slot."""
    return place * slots.num_max_tokens + token


def half_bytes(num_bytes: int) -> int:
    """Bytes of a half in a buffer of num_bytes from DATA on."""
    return num_bytes // 2 // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def array_bytes(shape: ElasticShape, num_ranks: int) -> tuple[int, ...]:
    """Of each array of a half."""
    rows = shape.num_max_tokens
    return (
        rows * shape.hidden_bytes,
        4 * rows * shape.num_scales,
        8 * rows * shape.num_topk,
        4 * rows * shape.num_topk,
        4 * rows * shape.num_topk,
        4 * rows * num_ranks,
    )


@lru_cache(maxsize=1024)
def place_arrays(num_bytes: int, shape: ElasticShape, num_ranks: int) -> ElasticPlaces:
    """The arrays of a half."""
    at, places = 0, []
    for size in array_bytes(shape, num_ranks):
        places.append(at)
        at += align_up(size, ALIGNMENT_BYTES)
    return ElasticPlaces(half_bytes(num_bytes), *places)


def num_dispatch_bytes(shape: ElasticShape, num_ranks: int) -> int:
    """Bytes from DATA on that a dispatch of this shape takes: two halves."""
    return 2 * sum(align_up(size, ALIGNMENT_BYTES) for size in array_bytes(shape, num_ranks))


@lru_cache(maxsize=1024)
def make_slots(num_max_tokens: int, hidden_bytes: int, num_topk: int, num_ranks: int, one_each: bool) -> ElasticSlots:
    """one_each: each choice of a token has a row of its own, and so a place."""
    by_rank = not one_each and num_ranks <= num_topk
    num_places = num_ranks if by_rank else num_topk
    chunk = max(1, -(-num_max_tokens // LANDED_WORDS))
    weights = num_places * num_max_tokens * slot_stride(hidden_bytes)
    return ElasticSlots(num_max_tokens, hidden_bytes, num_topk, num_places, int(by_rank), chunk, weights)


def num_combine_bytes(slots: ElasticSlots) -> int:
    """Bytes from DATA on that a combine takes."""
    return slots.topk_weights + align_up(4 * slots.num_places * slots.num_max_tokens * slots.num_topk, ALIGNMENT_BYTES)


def describe_elastic(
    dispatched: tuple[ElasticPlaces, ElasticShape] | None, slots: ElasticSlots | None, offset: int
) -> str:
    """Name the cell at an offset of the buffer, for reports; of the latest calls' shapes."""
    if offset < RANK_COUNTS:
        return ("turn", "next_token")[offset // 4] if offset < 8 else f"buffer + {offset}"
    if offset < EXPERT_COUNTS:
        half, src = divmod((offset - RANK_COUNTS) // 4, MAX_NVL_PEERS)
        return f"rank_counts[half {half}, src {src}]"
    if offset < LANDED:
        row, expert = divmod((offset - EXPERT_COUNTS) // 4, MAX_LOCAL_EXPERTS)
        return f"expert_counts[half {row // MAX_NVL_PEERS}, src {row % MAX_NVL_PEERS}, expert {expert}]"
    if offset < DATA:
        src, chunk = divmod((offset - LANDED) // 4, LANDED_WORDS)
        return f"landed[rank {src}, chunk {chunk}]"
    if slots is not None:
        return _describe_slot(slots, offset - DATA)
    if dispatched is not None:
        return _describe_half(*dispatched, offset - DATA)
    return f"buffer + {offset}"


def _describe_slot(slots: ElasticSlots, offset: int) -> str:
    if offset < slots.topk_weights:
        slot, at = divmod(offset, slot_stride(slots.hidden_bytes))
        place, token = divmod(slot, slots.num_max_tokens)
        return f"x[place {place}, token {token}] + {at}"
    slot, at = divmod(offset - slots.topk_weights, 4 * slots.num_topk)
    place, token = divmod(slot, slots.num_max_tokens)
    return f"topk_weights[place {place}, token {token}] + {at}" if place < slots.num_places else f"data + {offset}"


def _describe_half(places: ElasticPlaces, shape: ElasticShape, offset: int) -> str:
    half, byte = divmod(offset, places.half_bytes)
    strides = (shape.hidden_bytes, 4 * shape.num_scales, 8 * shape.num_topk, *(4 * shape.num_topk,) * 2, 4)
    for name, stride in zip(reversed(places._fields[1:]), reversed(strides), strict=True):
        start = getattr(places, name)
        if byte >= start and stride > 0:
            row, at = divmod(byte - start, stride)
            return f"{name}[half {half}, row {row}]" + (f" + {at}" if at else "")
    return f"data + {offset}"
