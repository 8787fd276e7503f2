"""What all low-latency kernels are launched with, and the context that their functions share."""

from typing import Any, NamedTuple

from nbep.device.alignment import align_up, matrix_cell
from nbep.device.jit import device_function
from nbep.device.kernels.parts.arrivals import notify
from nbep.device.layout.low_latency import MAX_EXPERTS, arrival_offset, count_offset
from nbep.device.network.seam import Place, own_ptr
from nbep.device.types import I32, I64, Sym

NO_PHASE = 0  # it only ends the launch before: see coordinator.py
SEND_PHASE = 1
RECV_PHASE = 2
BOTH_PHASES = SEND_PHASE | RECV_PHASE
QUEUE = 0  # of what goes to a rank and not to an expert


class Workspace(NamedTuple):
    """Memory of this rank alone, all zeros at first."""

    slots: Sym  # [NUM_HALVES, slot_words] s32: how many tokens have a place, for each expert and then each rank
    state: Sym  # see coordinator.py
    mask: Sym  # [num_ranks] s32: whether each is masked; 0 without enable_shrink
    sums: Sym  # of the shape of slots: parts of counts and arrivals that are not sent yet; see arrivals.notify
    barriers: Sym  # [num_ranks] s32: the latest barrier that each rank got a signal of; for this rank the latest of all


class Call(NamedTuple):
    """Which half a call uses, and which of its phases a launch runs: SEND_PHASE, RECV_PHASE, both or neither."""

    num_rdma_bytes: I64
    share_bytes: I64  # of them, for what one rank puts in a half
    recv_begin: I64  # where the shares of this half begin
    half: I32
    phases: I32


class Context(NamedTuple):
    """What the functions of dispatch and combine need: what the kernel was launched with, and where a thread is."""

    network: Any
    work: Workspace
    bounds: Any
    call: Any  # Call, or ComparedCall of calls.py
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
    return matrix_cell(ctx.work.slots, ctx.call.half, unit, slot_words(ctx.network.num_ranks))


@device_function
def sum_cell(ctx, unit):
    """Where the parts of what this rank adds to a count are added up; unit as in `slot_counter`."""
    return matrix_cell(ctx.work.sums, ctx.call.half, unit, slot_words(ctx.network.num_ranks))


@device_function
def count_of_call(ctx, rank, local_expert):
    """The offset of the count that a rank adds to in this call."""
    return count_offset(ctx.call.num_rdma_bytes, ctx.network.num_ranks, ctx.call.half, rank, local_expert)


@device_function
def arrival_of_call(ctx, rank):
    """The offset of the arrival that a rank adds to in this call."""
    return arrival_offset(ctx.call.num_rdma_bytes, ctx.network.num_ranks, ctx.call.half, rank)


@device_function
def add_to_arrival(ctx, peer, value, is_behind):
    """Add to a rank's count of this rank's messages; one thread. is_behind: see amo_add"""
    place = Place(arrival_of_call(ctx, ctx.network.rank), 0, peer, QUEUE)
    notify(ctx.network, place, sum_cell(ctx, MAX_EXPERTS + peer), value, is_behind)


@device_function
def count_cell(ctx, rank, local_expert):
    """The count that a rank adds to in this rank's buffer."""
    return own_ptr(ctx.network, count_of_call(ctx, rank, local_expert))


@device_function
def arrival_cell(ctx, rank):
    """The arrival that a rank adds to in this rank's buffer."""
    return own_ptr(ctx.network, arrival_of_call(ctx, rank))
