"""How both low-latency verbs are launched: one phase or both, on the caller's stream or on the comm stream.

neither            send and receive, on the current stream
async_finish       send and receive, on the comm stream; the event tells when
return_recv_hook   send, on the current stream; the hook launches receive on the stream that is current then

Peers may fill the half of a received call again once this rank's next launch has begun. Most often that is the next
call's, which they need as well. If that was sent before the hook is called, none may come: the hook launches one more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nbep.device.kernels.low_latency.arguments import BOTH_PHASES, NO_PHASE, RECV_PHASE, SEND_PHASE
from nbep.host.arguments import flags, refuse
from nbep.host.entry import untraced
from nbep.host.events import EventOverlap
from nbep.host.low_latency.memory import Launches, LowLatencyCall
from nbep.host.node import NodeMemory
from nbep.host.target.base import PreparedLaunch

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
