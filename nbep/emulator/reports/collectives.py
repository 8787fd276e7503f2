"""Words for threads that do not meet: at a collective of their warp, or at a barrier of their block."""

from __future__ import annotations

from ..machine.carrier import CURRENT
from ..machine.errors import DeadlockError, Divergence, EmulatorError
from ..machine.faults import Diverged, LaneLeft, NeverFull, error_at
from ..machine.names import ranges, who_have
from ..machine.source import describe_site, site_of
from ..machine.thread import Thread
from ..machine.warp import lanes_of


def diverged(fact: Diverged) -> EmulatorError:
    thread, name, collective = fact
    came = ranges(t.lane for t in collective.threads)
    message = (
        f"{name}: this lane is in the mask {collective.mask:#010x} of another collective, which waits for it:\n"
        f"  lanes {came} are at {collective.name}, {describe_site(collective.site)}"
    )
    lanes = thread.warp_state.lanes
    absent = [lanes[n] for n in lanes_of(collective.missing) if lanes[n] is not thread]
    if absent:
        message += "\n" + whereabouts(absent)
    return error_at(thread, Divergence, message)


def lane_left(fact: LaneLeft) -> EmulatorError:
    thread, collective = fact
    return Divergence(
        f"{collective.name} with mask {collective.mask:#010x}: lane {thread.lane} has left the kernel, "
        f"{who_have('lane', [t.lane for t in collective.threads])} come",
        collective.threads[0].describe(),
        describe_site(collective.site),
    )


def never_full(fact: NeverFull) -> EmulatorError:
    block, barrier = fact
    gone = [t.thread_idx for t in block.threads if t.exited]
    message = (
        f"barrier {barrier.number} of {block.name} can never fill: it takes {barrier.expected} threads, "
        f"{who_have('thread', barrier.arrived)} arrived, and {who_have('thread', gone)} left the kernel"
    )
    return error_at(barrier.waiting[0], DeadlockError, message) if barrier.waiting else DeadlockError(message)


def whereabouts(threads: list[Thread]) -> str:
    """One line for each place where some of `threads` are."""
    places: dict[str, list[int]] = {}
    for thread in threads:
        places.setdefault(place(thread), []).append(thread.lane)
    return "\n".join(f"  lanes {ranges(lanes)} {where}" for where, lanes in places.items())


def place(thread: Thread) -> str:
    """Where a thread is."""
    if thread.exited:
        return "have left the kernel"
    if thread.gr_frame is None:
        return "are here" if thread is CURRENT.get() else "have not started"
    return f"are at {describe_site(site_of(thread.gr_frame))}"
