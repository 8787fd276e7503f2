"""The symmetric buffer of one rank of an `ElasticBuffer`.

 offset 0          turn s32: how many dispatches there were; next_token s32; called s32           of the owner alone
 OFFERS            [8] of each rank of the node: where its rows and their scales begin            (in shared rows)
 COUNTS            [2, MAX_RANKS] rows of COUNTS_BYTES: tokens from each rank to the owner s32,   (dispatch)
                   behind 16 bytes its choices of each local expert [MAX_LOCAL_EXPERTS] s32
 LANDED            [MAX_RANKS, LANDED_WORDS] s32                                                  (combine)
 DATA              two halves, each of half_bytes: what the owner lets the others read            (dispatch)
                   or places x num_max_tokens slots: a row, and its top-k weights                 (combine)

 a half            x [num_max_tokens, hidden_bytes], scales [.., num_scales], topk_idx [.., num_topk] s64,
                   topk_weights [.., num_topk] f32, numbers [.., num_topk] s32, lists [num_ranks, num_max_tokens] s32,
                   of which each begins at a multiple of MESSAGE_BYTES

Dispatches take the halves, and the counts, in turn: while a rank fills one of them, others may still read the other.
Combine takes all of DATA. All ranks meet before it, and no rank reads a half after that. So the buffer has room for
the larger of the two, not for both.

A slot is for one (place, token) of the owner. With `by_rank` a place is a rank, else a choice of the token.

Between nodes

 offset 0          as above; but the halves begin behind the slots
 outboxes          of each rank of another node, in their order: what leaves to it, laid out as that rank has it
                   COUNTS: the counts for that rank
                   slots: one a token, or with one_each one a choice: the sums for that rank
 inboxes           of some ranks of other nodes, in their order: what comes from them
                   two halves, laid out as that rank has its own
 marks             [num_nodes, num_max_tokens, num_nvl_ranks] s32, where sums of a node are added up before they leave:
                   of each token of the rank with the owner's local index in each node, and of each rank of the owner's
                   node: as bits, the choices that the rank has of the token. Who pushes sets them; gather_combine
                   clears those of sums that it has taken in, send_combine the last one. So all are 0 between two calls
 cells             see layout.internode: every rank is a node of its own there
 targets           [MAX_RANKS] s64: of a rank of the own node its buffer, of another its outbox
 sources           [MAX_RANKS] s64: of a rank of the own node its buffer, of another its inbox

The address of an inbox is that of a buffer which would have its halves there; what comes before them is not.

So a kernel that pushes to a peer, or fetches from it, does the same in both cases.

Each rank has an inbox of every rank of another node; in hybrid mode (num_sharing is num_nvl_ranks) only of those with
its own local index, and the ranks of its node read them, too. What a rank sends to another node goes there once then.
And what comes back leaves from the rank that got it: see `relay_of`.

Source: DeepEP csrc/elastic/buffer.hpp, get_dispatch_buffer_size, get_combine_buffer_size
"""

from functools import lru_cache
from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.alignment import ALIGNMENT_BYTES, align_up, matrix_cell
from nbep.device.jit import device_function
from nbep.device.layout.internode import call_offset, cells_bytes
from nbep.device.layout.intranode import CALL_BYTES, MAX_LOCAL_EXPERTS, MAX_NVL_PEERS, OFFER_BYTES
from nbep.device.types import I32, I64

MAX_RANKS = 32  # a lane of a warp for each
THREADS_BEFORE_SM90 = 512  # of a block; with more, some kernels have too few registers where there is no copy engine
TURN = 0
NEXT_TOKEN = 4
CALLED = 8
OFFERS = ALIGNMENT_BYTES
COUNTS = OFFERS + OFFER_BYTES * MAX_NVL_PEERS
COUNTS_HEAD = 16
COUNTS_BYTES = COUNTS_HEAD + 4 * MAX_LOCAL_EXPERTS
LANDED = COUNTS + 2 * MAX_RANKS * COUNTS_BYTES
LANDED_WORDS = 1024
DATA = align_up(LANDED + MAX_RANKS * LANDED_WORDS * 4, ALIGNMENT_BYTES)
MESSAGE_BYTES = 16  # what is put over a network is a multiple of it


class ElasticShape(NamedTuple):
    """What all ranks must agree on in a dispatch."""

    num_max_tokens: I32
    hidden_bytes: I32
    num_topk: I32
    num_scales: I32


class ElasticPlaces(NamedTuple):
    """Where the halves begin, from DATA on; how long one is, and where its arrays begin in it."""

    begin: I64
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
    chunk: rows that land together
    """

    num_max_tokens: I32
    hidden_bytes: I32
    num_topk: I32
    num_places: I32
    by_rank: I32
    chunk: I32


class ElasticNodes(NamedTuple):
    """Where outboxes, inboxes and cells lie.

    num_nvl_ranks: of a node; num_sharing: how many of them share what a rank of another node sends, 1 or all. In a
    combine: how many add up what they send back, and let one send it
    inboxes: the address of the first, see above
    """

    num_nvl_ranks: I32
    num_sharing: I32
    outboxes: I64
    outbox_bytes: I64
    inboxes: I64
    inbox_bytes: I64
    cells: I64
    marks: I64


@device_function
def half_offset(places, number):
    """Where the half of a dispatch begins in a buffer."""
    return DATA + places.begin + places.half_bytes * (number & 1)


@device_function
def list_offset(places, shape, rank):
    """Where the list of the tokens that go to a rank begins in a half."""
    return places.lists + align_up(4 * shape.num_max_tokens, MESSAGE_BYTES) * rank


@device_function
def counts_row(number, src):
    """What a rank counts for a dispatch."""
    return COUNTS + COUNTS_BYTES * (MAX_RANKS * (number & 1) + src)


@device_function
def rank_count(number, src):
    """The count of tokens from a rank, for a dispatch."""
    return counts_row(number, src)


@device_function
def expert_count(number, src, expert):
    """The count of choices of a local expert by a rank, for a dispatch."""
    return counts_row(number, src) + COUNTS_HEAD + 4 * expert


@device_function
def landed_cell(src, chunk):
    return matrix_cell(LANDED, src, chunk, LANDED_WORDS)


@device_function
def slot_bytes(slots):
    """What a slot holds: a row, and its weights right behind."""
    return slots.hidden_bytes + align_up(4 * slots.num_topk, MESSAGE_BYTES)


@device_function
def slot_offset(slots, place, token):
    """Where a slot begins in a buffer."""
    stride = align_up(slot_bytes(slots), ALIGNMENT_BYTES)
    return DATA + ptx.s64(place * slots.num_max_tokens + token) * stride


@device_function
def metadata_entry(recv_src_metadata, shape, index):
    """Where the entry of a received token begins: its source, its last choice, and the row of each choice."""
    return matrix_cell(recv_src_metadata, ptx.s64(index), 0, 2 + shape.num_topk)


@device_function
def is_in_node(nodes, rank, peer):
    """Whether two ranks are of one node."""
    return ptx.u32_div(rank, nodes.num_nvl_ranks) == ptx.u32_div(peer, nodes.num_nvl_ranks)


@device_function
def relay_of(nodes, src, dst):
    """The rank of a node that gets what a rank of another node sends to one of its ranks."""
    return dst - ptx.u32_mod(dst, nodes.num_sharing) + ptx.u32_mod(src, nodes.num_sharing)


@device_function
def mark_cell(nodes, slots, src, token, local):
    """What the rank with a local index marks of a token of a rank, at that rank's relay in its node."""
    row = ptx.s64(ptx.u32_div(src, nodes.num_nvl_ranks)) * slots.num_max_tokens + token
    return nodes.marks + 4 * (row * nodes.num_nvl_ranks + local)


@device_function
def outbox_offset(nodes, owner, dst):
    """Where an owner has the outbox of a rank of another node."""
    number = dst if dst < owner else dst - nodes.num_nvl_ranks
    return nodes.outboxes + ptx.s64(number) * nodes.outbox_bytes


@device_function
def inbox_offset(nodes, owner, src):
    """The address of the inbox that an owner has of a rank of another node."""
    number = ptx.u32_div(src if src < owner else src - nodes.num_nvl_ranks, nodes.num_sharing)
    return nodes.inboxes + ptx.s64(number) * nodes.inbox_bytes


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
        num_ranks * align_up(4 * rows, MESSAGE_BYTES),
    )


@lru_cache(maxsize=1024)
def place_arrays(begin: int, half: int, shape: ElasticShape, num_ranks: int) -> ElasticPlaces:
    """The arrays of a half of so many bytes."""
    at, places = 0, []
    for size in array_bytes(shape, num_ranks):
        places.append(at)
        at += align_up(size, ALIGNMENT_BYTES)
    return ElasticPlaces(begin, half, *places)


def num_dispatch_bytes(shape: ElasticShape, num_ranks: int) -> int:
    """Bytes from DATA on that a dispatch of this shape takes: two halves."""
    return 2 * sum(align_up(size, ALIGNMENT_BYTES) for size in array_bytes(shape, num_ranks))


@lru_cache(maxsize=1024)
def make_slots(num_max_tokens: int, hidden_bytes: int, num_topk: int, num_ranks: int, one_each: bool) -> ElasticSlots:
    """one_each: each choice of a token has a row of its own, and so a place."""
    by_rank = not one_each and num_ranks <= num_topk
    num_places = num_ranks if by_rank else num_topk
    chunk = max(1, -(-num_max_tokens // LANDED_WORDS))
    return ElasticSlots(num_max_tokens, hidden_bytes, num_topk, num_places, int(by_rank), chunk)


def num_combine_bytes(slots: ElasticSlots) -> int:
    """Bytes that the slots of a combine take."""
    return slot_offset(slots, slots.num_places, 0) - slot_offset(slots, 0, 0)


def num_kept_bytes(slots: ElasticSlots, one_each: bool) -> int:
    """Bytes that the slots of an outbox take."""
    return slot_offset(slots, slots.num_topk if one_each else 1, 0) - slot_offset(slots, 0, 0)


def num_mark_bytes(num_max_tokens: int, num_ranks: int) -> int:
    """Bytes that the marks take."""
    return align_up(4 * num_max_tokens * num_ranks, ALIGNMENT_BYTES)


def trailer_bytes(num_ranks: int) -> int:
    """What comes behind the boxes and marks between nodes: the cells, and two tables of pointers."""
    return cells_bytes(num_ranks, num_ranks) + 2 * 8 * MAX_RANKS


def describe_elastic(
    dispatched: tuple[ElasticPlaces, ElasticShape] | None, slots: ElasticSlots | None, offset: int
) -> str:
    """Name the cell at an offset of the buffer, for reports; of the latest calls' shapes."""
    if OFFERS <= offset < COUNTS:
        return "offers[rank {}] + {}".format(*divmod(offset - OFFERS, OFFER_BYTES))
    if offset < COUNTS:
        return ("turn", "next_token", "called")[offset // 4] if offset < 12 else f"buffer + {offset}"
    if offset < LANDED:
        row, at = divmod(offset - COUNTS, COUNTS_BYTES)
        half, src = divmod(row, MAX_RANKS)
        if at < COUNTS_HEAD:
            return f"rank_counts[half {half}, src {src}]"
        return f"expert_counts[half {half}, src {src}, expert {(at - COUNTS_HEAD) // 4}]"
    if offset < DATA:
        src, chunk = divmod((offset - LANDED) // 4, LANDED_WORDS)
        return f"landed[rank {src}, chunk {chunk}]"
    begin = 0 if dispatched is None else dispatched[0].begin
    if slots is not None and (begin == 0 or offset < DATA + begin):
        return _describe_slot(slots, offset - DATA)
    if dispatched is not None and offset >= DATA + begin:
        return _describe_half(*dispatched, offset - DATA - begin)
    return f"buffer + {offset}"


def _describe_slot(slots: ElasticSlots, offset: int) -> str:
    slot, at = divmod(offset, slot_offset(slots, 0, 1) - slot_offset(slots, 0, 0))
    place, token = divmod(slot, slots.num_max_tokens)
    if at < slots.hidden_bytes:
        return f"x[place {place}, token {token}] + {at}"
    return f"topk_weights[place {place}, token {token}] + {at - slots.hidden_bytes}"


def describe_nodes(
    dispatched: tuple[ElasticPlaces, ElasticShape] | None,
    slots: ElasticSlots | None,
    nodes: ElasticNodes,
    num_ranks: int,
    offset: int,
) -> str:
    """The same between nodes."""
    if offset >= nodes.cells:
        cell = offset - nodes.cells
        if cell < 4 * num_ranks:
            return f"arrived[node {cell // 4}]"
        row, at = divmod(cell - call_offset(0, num_ranks, 0), CALL_BYTES)
        return f"call[rank {row}] word {at // 4}" if 0 <= row < num_ranks else f"pointers + {cell}"
    if offset >= nodes.marks:
        return _describe_mark(slots, nodes, (offset - nodes.marks) // 4)
    if offset < nodes.outboxes:
        return describe_elastic(dispatched, slots, offset)
    before = DATA + (0 if dispatched is None else dispatched[0].begin)
    if offset < nodes.inboxes + before:
        outbox, at = divmod(offset - nodes.outboxes, nodes.outbox_bytes)
        return f"{describe_elastic(dispatched, slots, at)}, outbox {outbox}"
    inbox, at = divmod(offset - nodes.inboxes - before, nodes.inbox_bytes)
    return f"{describe_elastic(dispatched, None, before + at)}, inbox {inbox}"


def _describe_mark(slots: ElasticSlots | None, nodes: ElasticNodes, mark: int) -> str:
    if slots is None:
        return f"marks + {4 * mark}"
    token, local = divmod(mark, nodes.num_nvl_ranks)
    node, token = divmod(token, slots.num_max_tokens)
    return f"marks[node {node}, token {token}, rank {local} of this node]"


def _describe_half(places: ElasticPlaces, shape: ElasticShape, offset: int) -> str:
    half, byte = divmod(offset, places.half_bytes)
    strides = (shape.hidden_bytes, 4 * shape.num_scales, 8 * shape.num_topk, *(4 * shape.num_topk,) * 2, 4)
    for name, stride in zip(reversed(places._fields[2:]), reversed(strides), strict=True):
        start = getattr(places, name)
        if byte >= start and stride > 0:
            row, at = divmod(byte - start, stride)
            return f"{name}[half {half}, row {row}]" + (f" + {at}" if at else "")
    return f"data + {offset}"
