"""The RDMA buffer of one rank in low-latency mode: two halves, which calls use in turn.

 offset 0                 recv: what peers put here for a call that uses half 0; then the same for half 1
                          send: what this rank is about to put in half 0; then in half 1
 num_rdma_bytes           counts [2, MAX_EXPERTS] s32: of a half as [num_local_experts, num_ranks]
                          rows with a word for each rank, s32, each from a multiple of 128 bytes on:
                          arrivals [2], calls [2, 2], credits [2], barrier signals [1]
                          the pointer table [num_ranks] s64

 recv                     a share for each rank that sends:
   in dispatch            messages [num_local_experts, num_max_tokens]; with deduplicate [num_max_tokens]
   in combine             rows [num_local_experts (of that rank), num_max_tokens]; with deduplicate [num_max_tokens]
 send                     messages [num_max_tokens] of dispatch, rows [num_local_experts, num_ranks * num_max_tokens] of
                          combine: its zero-copy buffer
 a message                x [hidden], e4m3 or bf16; scales [hidden / 128] f32, only with e4m3; header: its token's index
                          at the source, s32, and padding; then with deduplicate for each choice local expert or -1,
                          slot, weight
 a row                    x [hidden] bf16; with LogFMT `kernels.parts.logfmt` says what is in it

Recv and send of each half have a quarter of num_rdma_bytes. So where they are does not depend on what a call is made
for, and calls of all shapes follow each other. DeepEP derives the places from the arguments of the call, and needs
clean_low_latency_buffer when they change.

A rank writes at a peer into its own share and its own cells alone, whatever the call. So a rank that was masked and
comes late, with a call that the peer has given up, meets nothing that the others have sent for a later one.

The cells lie behind num_rdma_bytes: what a user writes into the buffer does not reach them. A buffer is made before
anybody says how many experts there will be, so the counts have room for the most; all else grows with the ranks.
counts[local expert, source] says that the tokens of a source for a local expert are there, and how many; in combine
counts[its local expert, rank] says that an expert's rows are there. An arrival says the same of all that a source
sends, with deduplicate: see `kernels.parts.arrivals`. calls[half, word, source] are of `kernels.low_latency.calls`,
credits[half, peer] of `kernels.low_latency.coordinator`.

Source: DeepEP csrc/config.hpp, LowLatencyLayout
"""

from typing import NamedTuple

from nbep.device.alignment import ALIGNMENT_BYTES, align_up, divided, inverse_of
from nbep.device.jit import by_type, device_function
from nbep.device.types import I32

NUM_HALVES = 2
MAX_RANKS = 256
MAX_EXPERTS = 2048
MAX_TOPK = 32
COLUMNS_PER_SCALE = 128
HEADER_ALIGNMENT = 16
WORDS_OF_CALL = 2
LOGFMT_COLUMNS = 128  # that share a minimum and a maximum
LOGFMT_META_BYTES = 4

COUNTS_BYTES = NUM_HALVES * MAX_EXPERTS * 4
# Rows with a word for each rank, behind the counts
ARRIVALS = 0  # one of each half
CALLS = ARRIVALS + NUM_HALVES  # WORDS_OF_CALL of each half
CREDITS = CALLS + NUM_HALVES * WORDS_OF_CALL
BARRIER_SIGNALS = CREDITS + NUM_HALVES
NUM_ROWS = BARRIER_SIGNALS + 1
WORDS_OF_LINE = ALIGNMENT_BYTES // 4


class LowLatencyShape(NamedTuple):
    """What all ranks must agree on in one call. use_fp8 and use_logfmt are 0 or 1."""

    num_ranks: I32
    num_experts: I32
    num_max_tokens: I32  # of a rank
    hidden: I32
    num_topk: I32  # only dispatch with deduplicate asks
    use_fp8: I32
    use_logfmt: I32
    # What follows from the others: see `shape_of`
    num_local_experts: I32  # of a rank
    inverse_of_local: I32  # of their number: see nbep.device.alignment
    inverse_of_ranks: I32

    deduplicate = 0  # type: ignore[misc]


class DeduplicatedShape(LowLatencyShape):
    """With deduplicate: a token goes to each rank of its experts once. Kernels for the two are different binaries."""

    __slots__ = ()
    deduplicate = 1


@by_type("", LowLatencyShape)
def deduplicates(shape):
    """Whether it is a call with deduplicate; known when a kernel is compiled."""
    return False


@device_function
def always_deduplicates(shape):
    return True


deduplicates.versions[DeduplicatedShape] = always_deduplicates


@device_function
def rank_of(shape, expert):
    """Whose expert it is, and its number there."""
    rank = divided(expert, shape.inverse_of_local)
    return rank, expert - rank * shape.num_local_experts


@device_function
def local_and_rank(shape, pair):
    """A (local expert, rank) by its number, which goes on with the next rank."""
    local_expert = divided(pair, shape.inverse_of_ranks)
    return local_expert, pair - local_expert * shape.num_ranks


@device_function
def payload_bytes(shape):
    """Bytes of a token's values in a message."""
    return shape.hidden if shape.use_fp8 != 0 else 2 * shape.hidden


@device_function
def num_scales(shape):
    return (shape.hidden + COLUMNS_PER_SCALE - 1) // COLUMNS_PER_SCALE if shape.use_fp8 != 0 else 0


@device_function
def header_offset(shape):
    """Where the header stands in a message."""
    return align_up(payload_bytes(shape) + 4 * num_scales(shape), HEADER_ALIGNMENT)


@device_function
def header_bytes(shape):
    """Bytes of a header: the index, then with deduplicate an expert, a slot and a weight for each choice."""
    return HEADER_ALIGNMENT + (align_up(12 * shape.num_topk, HEADER_ALIGNMENT) if deduplicates(shape) else 0)


@device_function
def message_stride(shape):
    """From a message of dispatch to the next."""
    return align_up(header_offset(shape) + header_bytes(shape), ALIGNMENT_BYTES)


@device_function
def row_stride(shape):
    """From a row of combine to the next, where a peer has put them."""
    meta = LOGFMT_META_BYTES * (shape.hidden // LOGFMT_COLUMNS) if shape.use_logfmt != 0 else 0
    return 2 * shape.hidden + align_up(meta, HEADER_ALIGNMENT)


@device_function
def quarter_bytes(num_rdma_bytes):
    """What recv or send of one half may take."""
    return num_rdma_bytes // 4 // ALIGNMENT_BYTES * ALIGNMENT_BYTES


@device_function
def recv_offset(call, rank):
    """Where a rank puts what it sends in a call."""
    return call.recv_begin + rank * call.share_bytes


@device_function
def send_offset(num_rdma_bytes, half):
    """Where this rank keeps what it sends in a half, if it lies in the buffer."""
    return (NUM_HALVES + half) * quarter_bytes(num_rdma_bytes)


@device_function
def count_offset(num_rdma_bytes, num_ranks, half, rank, local_expert):
    """The count that a rank adds to: in dispatch for an expert of this rank, in combine for one of its own."""
    return num_rdma_bytes + 4 * (half * MAX_EXPERTS + local_expert * num_ranks + rank)


@device_function
def row_offset(num_rdma_bytes, num_ranks, row):
    """Where a row begins that has a word for each rank."""
    return num_rdma_bytes + COUNTS_BYTES + 4 * row * align_up(num_ranks, WORDS_OF_LINE)


@device_function
def arrival_offset(num_rdma_bytes, num_ranks, half, rank):
    return row_offset(num_rdma_bytes, num_ranks, ARRIVALS + half) + 4 * rank


@device_function
def call_offset(num_rdma_bytes, num_ranks, half, rank, word):
    return row_offset(num_rdma_bytes, num_ranks, CALLS + WORDS_OF_CALL * half + word) + 4 * rank


@device_function
def credit_offset(num_rdma_bytes, num_ranks, half, rank):
    return row_offset(num_rdma_bytes, num_ranks, CREDITS + half) + 4 * rank


@device_function
def signal_offset(num_rdma_bytes, num_ranks, rank):
    """The signal that a rank adds to when it comes to a barrier."""
    return row_offset(num_rdma_bytes, num_ranks, BARRIER_SIGNALS) + 4 * rank


def shape_of(
    num_ranks: int,
    num_experts: int,
    num_max_tokens: int,
    hidden: int,
    num_topk: int = 0,
    use_fp8: int = 0,
    deduplicate: int = 0,
    use_logfmt: int = 0,
) -> LowLatencyShape:
    """The shape of a call, with what follows from its sizes."""
    local = num_experts // num_ranks
    given = num_ranks, num_experts, num_max_tokens, hidden, num_topk, use_fp8, use_logfmt
    kind = DeduplicatedShape if deduplicate else LowLatencyShape
    follows = local, inverse_of(max(local, 1)), inverse_of(num_ranks)  # a hint may have fewer experts
    return kind._make((*given, *follows))


def recv_begin(num_rdma_bytes: int, half: int) -> int:
    """Where the shares of a half begin."""
    return half * quarter_bytes(num_rdma_bytes)


def share_bytes(num_rdma_bytes: int, num_ranks: int) -> int:
    """What one rank may put in a half."""
    return quarter_bytes(num_rdma_bytes) // num_ranks // ALIGNMENT_BYTES * ALIGNMENT_BYTES


def pointer_table(num_ranks: int) -> int:
    """Where the pointer table begins, counted from num_rdma_bytes."""
    return row_offset(0, num_ranks, NUM_ROWS)


def trailer_bytes(num_ranks: int) -> int:
    """What comes behind num_rdma_bytes."""
    return align_up(pointer_table(num_ranks) + 8 * num_ranks, ALIGNMENT_BYTES)
