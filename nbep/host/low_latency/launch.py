"""How both low-latency verbs are launched: one phase or both, on the caller's stream or on the comm stream.

neither            send and receive, on the current stream
async_finish       send and receive, on the comm stream; the event tells when
return_recv_hook   send, on the current stream; the hook launches receive on the stream that is current then
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbep.device.kernels.low_latency.journal import RECV_PHASE, SEND_PHASE, Call
from nbep.host.arguments import refuse
from nbep.host.events import EventOverlap
from nbep.host.low_latency.memory import BOTH_PHASES, LowLatencyCall
from nbep.host.runtime.base import Stream
from nbep.host.symmetric import NodeMemory

Launch = Callable[[Stream, Call], None]
Hook = Callable[[], None]


def check_options(verb: str, async_finish: bool, return_recv_hook: bool) -> None:
    if async_finish and return_recv_hook:
        refuse("return_recv_hook", "True together with async_finish", f"one of the two in {verb}")


def run_call(
    memory: NodeMemory, call: LowLatencyCall, launch: Launch, async_finish: bool, return_recv_hook: bool
) -> tuple[EventOverlap, Hook | None]:
    """Make a call. launch(stream, phases) launches its kernel.

    Returns: the event, empty unless async_finish; the hook, None unless return_recv_hook
    """
    mode = memory.low_latency
    assert mode is not None
    mode.begin(call)
    if async_finish:
        memory.comm_stream.wait_current_stream()
        mode.order(memory.comm_stream)
        launch(memory.comm_stream, mode.phases(call, BOTH_PHASES))
        return memory.finish(True), None
    _launch_here(memory, call, launch, SEND_PHASE if return_recv_hook else BOTH_PHASES)
    return EventOverlap(), _hook(memory, call, launch) if return_recv_hook else None


def _launch_here(memory: NodeMemory, call: LowLatencyCall, launch: Launch, phases: int) -> None:
    mode: Any = memory.low_latency
    on_current_stream(memory, lambda stream: launch(stream, mode.phases(call, phases)))


def on_current_stream(memory: NodeMemory, launch: Callable[[Stream], None]) -> None:
    """Launch on the caller's current stream, whose later work comes after it."""
    mode: Any = memory.low_latency
    stream = memory.runtime.current_stream
    if memory.runtime.shares_current_stream:
        stream = memory.comm_stream
        stream.wait_current_stream()
    mode.order(stream)
    launch(stream)
    memory.runtime.settle(stream)


def _hook(memory: NodeMemory, call: LowLatencyCall, launch: Launch) -> Hook:
    def hook() -> None:
        """Receive: the results are there for what the current stream does next.

        Raises: ValueError if it was called before, the buffer was cleaned since or is destroyed; PeerTimeout after an
                earlier one
        """
        memory.check_open()
        if call.is_received:
            refuse("hook", f"a second call of the hook of {call}", "called once")
        if call.is_forgotten:
            refuse("hook", f"that of {call} after clean_low_latency_buffer", "called before it")
        memory.check_faults()
        _launch_here(memory, call, launch, RECV_PHASE)

    return hook
