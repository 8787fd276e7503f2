"""How both low-latency verbs are launched, and what comes between calls: clean_low_latency_buffer, the mask of ranks
without which this rank goes on, and calls of the normal mode between nodes, with which these take turns.

neither            send and receive, on the current stream
async_finish       send and receive, on the comm stream; the event tells when
return_recv_hook   send, on the current stream; the hook launches receive on the stream that is current then

Peers may fill the half of a received call again once this rank's next launch has begun. Most often that is the next
call's, which they need as well. If that was sent before the hook is called, none may come: the hook launches one more.

Source: DeepEP csrc/deep_ep.cpp, Buffer::clean_low_latency_buffer; deep_ep/buffer.py, Buffer.clean_low_latency_buffer
("after running the normal dispatch/combine"); after v1.2.1 csrc/legacy/buffer.hpp,
low_latency_query_mask_buffer and its neighbours
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nbep.device.kernels.low_latency.arguments import BOTH_PHASES, NO_PHASE, RECV_PHASE, SEND_PHASE
from nbep.device.kernels.low_latency.clean_low_latency_buffer import clean_low_latency_buffer as clean_kernel
from nbep.device.kernels.low_latency.mask_buffer import query_mask_buffer as query_kernel
from nbep.device.kernels.low_latency.mask_buffer import update_mask_buffer as update_kernel
from nbep.device.layout.low_latency import shape_of
from nbep.host import validate
from nbep.host.arguments import flags, integer, refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.entry import untraced
from nbep.host.events import EventOverlap
from nbep.host.low_latency.handle import checked_num_experts, mode_of
from nbep.host.low_latency.memory import Launches, LowLatencyCall, LowLatencyMemory
from nbep.host.node import NodeMemory
from nbep.host.target.base import Array, PreparedLaunch

Hook = Callable[[], None]


def check_options(verb: str, async_finish: bool, return_recv_hook: bool) -> None:
    flags(async_finish=async_finish, return_recv_hook=return_recv_hook)
    if async_finish and return_recv_hook:
        refuse("return_recv_hook", "True together with async_finish", f"one of the two in {verb}")


def run_call(
    memory: NodeMemory,
    call: LowLatencyCall,
    launches: Launches,
    arguments: Sequence[Any],
    arrays: Sequence[Any],
    async_finish: bool,
    return_recv_hook: bool,
) -> tuple[EventOverlap, Hook | None]:
    """Make a call. arguments: of the kernel's outputs and inputs; arrays: those that these are of

    Returns: the event, empty unless async_finish; the hook, None unless return_recv_hook
    """
    mode: Any = memory.low_latency
    mode.num_calls, mode.halves[call.half] = call.number + 1, call
    if return_recv_hook:
        call.release = memory.runtime.hold_outputs()
        on_current_stream(memory, launches[call.half][SEND_PHASE], arguments, arrays)
        return EventOverlap(), partial(_receive, memory, call, launches, arguments, arrays)
    call.is_received = True
    both = launches[call.half][BOTH_PHASES]
    if async_finish:
        memory.comm_stream.wait_current_stream()
        if mode.last_stream is not memory.comm_stream:
            mode.order(memory.comm_stream)
        both.launch(memory.comm_stream, arguments, arrays)
        return memory.finish(True), None
    on_current_stream(memory, both, arguments, arrays)
    return EventOverlap(), None


def on_current_stream(
    memory: NodeMemory, kernel: PreparedLaunch, arguments: Sequence[Any] = (), arrays: Sequence[Any] = ()
) -> None:
    """Launch on the caller's current stream, whose later work comes after it.

    Raises: what a kernel of this rank has reported, where the caller waits for the launch
    """
    mode: Any = memory.low_latency
    runtime = memory.runtime
    stream, has_own_stream = runtime.current_stream, runtime.has_own_stream
    if not has_own_stream and runtime.shares_current_stream:
        stream = memory.comm_stream
        stream.wait_current_stream()
    if mode.last_stream is not stream:
        mode.order(stream)
    kernel.launch(stream, arguments, arrays)
    if not has_own_stream and runtime.settle(stream):
        memory.check_faults()


@untraced
def _receive(
    memory: NodeMemory, call: LowLatencyCall, launches: Launches, arguments: Sequence[Any], arrays: Sequence[Any]
) -> None:
    """The hook of a call: the results are there for what the current stream does next.

    Raises: ValueError if it was called before, the buffer was cleaned since or is destroyed; PeerTimeout as the verbs,
            and after an earlier one
    """
    mode: Any = memory.low_latency
    memory.check_open()
    memory.runtime.check_caller("hook")
    if call.is_received:
        refuse("hook", f"a second call of the hook of {call}", "called once")
    if call.is_forgotten:
        refuse("hook", f"that of {call} after clean_low_latency_buffer", "called before it")
    memory.check_faults()
    if call.watch is not None:
        call.watch()
        call.watch = None
    call.is_received = True
    call.release()
    on_current_stream(memory, launches[call.half][RECV_PHASE], arguments, arrays)
    if call.number != mode.num_calls - 1:
        on_current_stream(memory, launches[call.half][NO_PHASE], arguments, arrays)


# --- Clean


VERB = "clean_low_latency_buffer"


def clean_low_latency_buffer(
    memory: NodeMemory, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
) -> None:
    """See Buffer.clean_low_latency_buffer."""
    mode = mode_of(memory, VERB)
    memory.check_faults()
    num_max_tokens = integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
    hidden, num_experts = integer("hidden", hidden, 1), checked_num_experts(mode, num_experts)
    mode.check_size(shape_of(mode.num_ranks, num_experts, num_max_tokens, hidden, 0, 0, 0, 0))
    memory.compare_call(VERB, dict)
    _clean(memory, mode)


def begin_verb(memory: NodeMemory, verb: str) -> LowLatencyMemory:
    """What a verb begins with. Where masks were taken off, the ranks meet in clean_low_latency_buffer before it.

    Raises: ValueError for another buffer, or while a graph is captured that would have to begin so; PeerTimeout after
            an earlier one
    """
    memory.check_faults()
    mode = memory.low_latency
    if mode is None:
        mode = mode_of(memory, verb)
    if mode.is_unclean:
        if memory.runtime.is_capturing:
            refuse(verb, "a call in a CUDA graph after masks were taken off", f"captured after {VERB}")
        _clean(memory, mode)
    return mode


def _clean(memory: NodeMemory, mode: LowLatencyMemory) -> None:
    mode.restart()
    on_current_stream(memory, prepare_clean(memory, mode))


def prepare_clean(memory: NodeMemory, mode: LowLatencyMemory) -> PreparedLaunch:
    """The kernel, behind which all ranks have come to it."""
    args = mode.rdma.network, mode.work, memory.bounds, mode.num_rdma_bytes
    return memory.runtime.prepare(mode.rdma.kernel(clean_kernel), 1, block_sizes(memory.runtime).notify, 0, *args)


# --- Which ranks this rank goes on without


WARP = 32


def query_mask_buffer(memory: NodeMemory, mask_status: Array) -> None:
    """See Buffer.low_latency_query_mask_buffer."""
    mode = _mode(memory, "low_latency_query_mask_buffer")
    validate.output("mask_status", memory.runtime.view(mask_status), "int32", (mode.num_ranks,))
    _launch(memory, query_kernel, (mask_status,), mode.mask, mode.num_ranks)


def update_mask_buffer(memory: NodeMemory, rank_to_mask: int, mask: bool) -> None:
    """See Buffer.low_latency_update_mask_buffer."""
    mode = _mode(memory, "low_latency_update_mask_buffer")
    rank = integer("rank_to_mask", rank_to_mask, 0)
    flags(mask=mask)
    if rank >= mode.num_ranks:
        refuse("rank_to_mask", rank, f"a rank below {mode.num_ranks}")
    if rank == mode.rank:
        refuse("rank_to_mask", rank, "another rank than the one that calls it")
    _update(memory, mode, rank, 1, int(mask))


def clean_mask_buffer(memory: NodeMemory) -> None:
    """See Buffer.low_latency_clean_mask_buffer."""
    mode = _mode(memory, "low_latency_clean_mask_buffer")
    _update(memory, mode, 0, mode.num_ranks, 0)


def _mode(memory: NodeMemory, verb: str) -> LowLatencyMemory:
    mode = mode_of(memory, verb)
    if mode.mask == 0:
        raise ValueError(f"{verb}: the buffer masks no ranks; make it with enable_shrink=True")
    memory.check_faults()
    return mode


def _update(memory: NodeMemory, mode: LowLatencyMemory, first_rank: int, num_ranks: int, is_masked: int) -> None:
    kernel = mode.rdma.kernel(update_kernel)
    _launch(memory, kernel, (), mode.rdma.network, mode.work, mode.num_rdma_bytes, first_rank, num_ranks, is_masked)
    mode.is_unclean = mode.is_unclean or not is_masked


def _launch(memory: NodeMemory, kernel: Any, arrays: tuple[Any, ...], *last_args: Any) -> None:
    runtime = memory.runtime
    on_current_stream(memory, runtime.prepare(kernel, 1, WARP, 0, *last_args), runtime.arguments(arrays), arrays)


# --- How calls of the normal mode between nodes and low-latency calls take turns with the bytes of the RDMA buffer ----
#
#  low-latency calls --hooks called--> a call between nodes --clean_low_latency_buffer--> low-latency calls
#
# To the call between nodes. It fills the buffers of ranks that have its place in other nodes, and its own send area.
#  - It comes behind this rank's low-latency calls, whatever their stream.
#  - Its notify tells those ranks that this one has come to it, so they may fill what low-latency calls have read here.
#  - Its own send area may hold what a NIC has not read yet, for a rank with another place: that rank has not received
#    it. A cached notify does not ask it. So where messages leave from the send area, all ranks come together once more:
#    in the kernel of clean_low_latency_buffer.
#
# To low-latency calls. They fill the buffers of all ranks, where a call between nodes may still read.
# clean_low_latency_buffer comes behind this rank's call, whatever its stream, and lets all ranks come together.


def check_turn(memory: NodeMemory, verb: str) -> None:
    """Raises: ValueError if a low-latency call is under way"""
    if memory.low_latency is not None:
        memory.low_latency.check_received(verb)


def take_turn(memory: NodeMemory, verb: str) -> None:
    """Let what comes next on the stream of the call have the RDMA buffer."""
    mode = memory.low_latency
    if mode is not None and mode.give_way(verb, memory.stream) and mode.sends_from_buffer:
        prepare_clean(memory, mode).launch(memory.stream)
