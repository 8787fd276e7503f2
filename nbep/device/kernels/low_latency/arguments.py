"""What the low-latency kernels are launched with, and the context that their functions share."""

from typing import Any, NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.layout.common import ALIGNMENT_BYTES, align_up, inverse_of
from nbep.device.layout.low_latency import (
    MAX_EXPERTS,
    LowLatencyShape,
    arrival_offset,
    count_offset,
    deduplicates,
    message_stride,
    note_bytes,
)
from nbep.device.network.seam import own_ptr
from nbep.device.protocols.arrivals import Told
from nbep.device.protocols.staging import STAGE_STRIDE
from nbep.device.types import I32, I64, In, InOut, Out, Sym

MAX_GROUPS = 12  # groups of warps in a block
SEND_PHASE = 1
RECV_PHASE = 2
BOTH_PHASES = SEND_PHASE | RECV_PHASE
SUM_TABLE_BYTES = 4 * ALIGNMENT_BYTES


class Workspace(NamedTuple):
    """Memory of this rank alone, all zeros at first. mask is 0 without enable_shrink.

    slots  [NUM_HALVES, slot_words] s32: how many tokens have a place, for each expert and then each rank
    sums   of the same shape: what counts and arrivals are told, as far as it is known; see arrivals.tell
    barriers  [num_ranks] s32: the latest barrier of `barrier_network` that each rank was told of, which for this rank
              itself is the latest of all
    """

    slots: Sym
    journal: Sym
    mask: Sym
    sums: Sym
    barriers: Sym


class Call(NamedTuple):
    """Which half a call uses, and which of its phases a launch runs: SEND_PHASE, RECV_PHASE or both."""

    num_rdma_bytes: I64
    share_bytes: I64  # of them, for what one rank puts in a half
    recv_begin: I64  # where the shares of this half begin
    half: I32
    phases: I32


class ComparedCall(NamedTuple):
    """A call that is compared with those of the other ranks: what they must pass alike, in two words. See calls.py."""

    num_rdma_bytes: I64
    share_bytes: I64
    recv_begin: I64
    half: I32
    phases: I32
    word_0: I32
    word_1: I32


class Context(NamedTuple):
    """What the functions of dispatch and combine need: what the kernel was launched with, and where a thread is."""

    network: Any
    work: Workspace
    bounds: Any
    call: Any  # Call or ComparedCall
    shape: Any  # LowLatencyShape or DeduplicatedShape
    sizes: Any  # DispatchSizes or CombineSizes
    warp: int
    lane: int


@device_function
def slot_words(num_ranks):
    """Words of the slots of a half: one for each expert that there may be, then one for each rank."""
    return MAX_EXPERTS + align_up(num_ranks, 4)


@device_function
def slot_counter(ctx, unit):
    """The slot counter of an expert, or of rank r as unit MAX_EXPERTS + r."""
    return ctx.work.slots + 4 * (ctx.call.half * slot_words(ctx.network.num_ranks) + unit)


@device_function
def count_to_tell(ctx, unit, cell):
    """A count at a peer, of an expert or of rank r as unit MAX_EXPERTS + r, which this rank tells."""
    return Told(cell, ctx.work.sums + 4 * (ctx.call.half * slot_words(ctx.network.num_ranks) + unit))


@device_function
def count_of_call(ctx, rank, local_expert):
    """The offset of the count that a rank adds to in this call."""
    return count_offset(ctx.call.num_rdma_bytes, ctx.network.num_ranks, ctx.call.half, rank, local_expert)


@device_function
def arrival_of_call(ctx, rank):
    """The offset of the arrival that a rank adds to in this call."""
    return arrival_offset(ctx.call.num_rdma_bytes, ctx.network.num_ranks, ctx.call.half, rank)


@device_function
def count_cell(ctx, rank, local_expert):
    """The count that a rank adds to in this rank's buffer."""
    return own_ptr(ctx.network, count_of_call(ctx, rank, local_expert))


@device_function
def arrival_cell(ctx, rank):
    """The arrival that a rank adds to in this rank's buffer."""
    return own_ptr(ctx.network, arrival_of_call(ctx, rank))


class DispatchOutputs(NamedTuple):
    """T is num_ranks * num_max_tokens. May be absent (0): the scales, both stats, and what deduplicate adds."""

    recv_x: Out  # [num_local_experts, T, payload_bytes]
    recv_x_scales: Out  # [num_local_experts, hidden / 128, T] f32; UE8M0: [num_local_experts, hidden / 512, T] 4 bytes
    recv_src_info: Out  # [num_local_experts, T] s32: the token's index at its source
    recv_layout_range: Out  # [num_local_experts, num_ranks] s64: where its rows begin << 32 | how many there are
    recv_count: Out  # [num_local_experts] s32
    cumulative_recv_stats: InOut  # [num_local_experts] s32
    wait_recv_cost_stats: InOut  # [num_ranks] s64
    # With deduplicate, what combine needs of each message
    num_messages: Out  # [num_ranks] s32
    message_src_idx: Out  # [num_ranks, num_max_tokens] s32
    message_rows: Out  # [num_ranks, num_max_tokens, num_topk] s32: local expert * T + row, or -1
    message_weights: Out  # [num_ranks, num_max_tokens, num_topk] f32


class DispatchInputs(NamedTuple):
    """topk_weights may be absent (0); deduplicate needs them."""

    x: In  # [num_tokens, hidden] bf16
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32


class DispatchSizes(NamedTuple):
    num_tokens: I32
    num_topk: I32
    team_warps: I32  # that receive what one source has for one expert
    num_teams: I32
    inverse_of_team: I32  # of team_warps: see layout.common
    message_stride: I32  # as the layout has it: worked out once
    note_offset: I32
    round_scale: I32  # 1: scales are powers of two
    use_ue8m0: I32  # 1: recv_x_scales are exponent bytes, four in a word


class CombineOutputs(NamedTuple):
    """wait_recv_cost_stats may be absent (0)."""

    combined_x: Out  # [num_tokens, hidden] bf16
    wait_recv_cost_stats: InOut  # [num_ranks] s64


class CombineInputs(NamedTuple):
    """topk_idx and topk_weights are of this rank's tokens; what follows is of its experts' rows, from the handle."""

    x: In  # [num_local_experts, T, hidden] bf16
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32
    recv_src_info: In
    recv_layout_range: In
    num_messages: In
    message_src_idx: In
    message_rows: In
    message_weights: In


class CombineSizes(NamedTuple):
    num_tokens: I32
    num_topk: I32
    num_groups: I32  # most groups of warps of a block that send: see groups_here


@device_function
def note_stride(shape):
    """From the note for one rank to that for the next, in shared memory."""
    return align_up(note_bytes(shape), ALIGNMENT_BYTES)


@device_function
def stage_bytes(shape):
    """One token in shared memory: its message and, with deduplicate, a note for each rank that it goes to."""
    return message_stride(shape) + (shape.num_topk * note_stride(shape) if deduplicates(shape) else 0)


def num_groups(num_experts: int, num_blocks: int, num_threads: int) -> int:
    """Most groups of warps in a block: one for each (local expert, source) that falls to it, within the limits."""
    return min(-(-num_experts // num_blocks), MAX_GROUPS, num_threads // 32)


def teams(num_experts: int, num_max_tokens: int, num_blocks: int, num_threads: int) -> tuple[int, int, int]:
    """Warps of a team, teams, and what to divide by to find a warp's team.

    All warps are shared out to the pairs of a local expert and a source.
    """
    num_warps = num_blocks * (num_threads // 32)
    team_warps = min(max(num_warps // num_experts, 1), num_max_tokens)
    return team_warps, num_warps // team_warps, inverse_of(team_warps)


@device_function
def groups_here(num_experts, most):
    """Groups of warps in this block: where one pair less falls to it, there is one group less, and each is larger."""
    return most - 1 if most > 1 and ptx.block_idx() + ptx.grid_dim() * (most - 1) >= num_experts else most


def dispatch_smem_bytes(shape: LowLatencyShape, num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a dispatch block.

    To send: two stages of tokens and, with deduplicate, a histogram of the experts of a rank; to receive: the
    table and a stage a warp.
    """
    sending = 2 * stage_bytes(shape) + (4 * (shape.num_experts // shape.num_ranks) if deduplicates(shape) else 0)
    table = table_bytes(shape) if deduplicates(shape) else 0
    receiving = table + (STAGE_STRIDE * (num_threads // 32) if has_tma else 0)
    return max(sending, receiving)


def combine_smem_bytes(shape: LowLatencyShape, num_threads: int) -> int:
    """Dynamic shared memory of a combine block: the table, and a stage a warp."""
    return sum_table_bytes(shape) + STAGE_STRIDE * (num_threads // 32)


@device_function
def table_bytes(shape):
    """What a receiver of dispatch with deduplicate has: the count of each (local expert, source), a word a rank."""
    return align_up(4 * (shape.num_experts + shape.num_ranks), ALIGNMENT_BYTES)


@device_function
def sum_table_bytes(shape):
    """What combine has of a token, rows [32] s64, weights [32] f32, their number; while it sends, a word a rank."""
    return (
        max(SUM_TABLE_BYTES, align_up(4 * shape.num_ranks, ALIGNMENT_BYTES)) if deduplicates(shape) else SUM_TABLE_BYTES
    )
