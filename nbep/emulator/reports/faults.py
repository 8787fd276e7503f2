"""Turns a failed access into the error that explains it.

The fast path of an access checks nothing twice: a missing segment, view or element shows as a Python exception, and
only then does the code here find out why.
"""

from __future__ import annotations

from ..machine import errors
from ..machine.carrier import CURRENT
from ..machine.errors import DeadlockError, Divergence, EmulatorError
from ..machine.faults import AccessFault, Diverged, Hole, LaneLeft, NeverFull, NoSegment, error_at, who_and_where
from ..machine.kinds import KINDS
from ..machine.memory import NUMBER_BITS, OFFSET_BITS, OFFSET_MASK, Allocation
from ..machine.names import name_of, ranges, who_have
from ..machine.source import describe_site, site_of
from ..machine.thread import Thread
from ..machine.warp import lanes_of


def access_fault(fault: AccessFault) -> errors.EmulatorError:
    """Why an access failed."""
    thread, address, kind, storing, shared, _, _ = fault
    verb = "store" if storing else "load"
    if kind not in KINDS:
        return error_at(thread, errors.EmulatorError, f"{verb} of the unknown kind {kind!r}")
    try:
        address = address.__index__()
    except AttributeError:
        return error_at(thread, errors.EmulatorError, f"{verb} at {address!r}, which is not an integer address")
    size = KINDS[kind].size
    access = f"{verb} of {size} bytes ({kind}) at {address:#x}"
    if shared:
        return _inside(fault, thread.shared, address, size, access)
    allocation = thread.segments.get(address >> OFFSET_BITS)
    if allocation is None:
        return no_segment(NoSegment(thread, address, access))
    return _inside(fault, allocation, address & OFFSET_MASK, size, access)


def _inside(fault: AccessFault, allocation: Allocation, offset: int, size: int, access: str) -> errors.EmulatorError:
    thread, _, _, storing, _, cause, polls = fault
    if allocation.freed:
        return error_at(
            thread, errors.UseAfterFree, f"{access}: `{allocation.name}` of rank {allocation.rank} is freed"
        )
    cell = allocation.cell(offset)
    if offset % size:
        return error_at(thread, errors.Misaligned, f"{access}: not a multiple of {size}\n  in {cell}")
    if not allocation.lowest <= offset <= allocation.nbytes - size:
        beyond = f"out of bounds, the allocation has {allocation.nbytes - allocation.lowest} bytes"
        return error_at(thread, errors.OutOfBounds, f"{access}: {beyond}\n  in {cell}")
    if storing and not allocation.writable:
        return error_at(thread, errors.ReadOnly, f"{access}: the host passed this array as input only\n  in {cell}")
    if not storing:
        unwritten = allocation.first_unwritten(offset, size)
        if unwritten >= 0:
            which = "" if unwritten == offset else f" (byte {unwritten})"
            hole = Hole(thread, allocation, offset, size, polls)
            return errors.Uninitialized(f"{access}: never written{which}\n  in {cell}", *who_and_where(thread), hole)
    return error_at(thread, errors.EmulatorError, f"{access}: {cause}\n  in {cell}")


def no_segment(fact: NoSegment) -> errors.EmulatorError:
    """Why an address names no segment of the thread's rank, or one that is freed."""
    thread, address, access = fact
    number = address >> OFFSET_BITS
    if number == 0:
        null = "the null address" if address == 0 else "a shared-memory or null address used as a global one"
        return error_at(thread, errors.Unmapped, f"{access}: {null}")
    owner = (number >> NUMBER_BITS) - 1
    spaces = thread.world.spaces
    if owner not in spaces:
        return error_at(thread, errors.Unmapped, f"{access}: no rank has such an address")
    here = thread.segments.get(number)
    if here is not None:
        return error_at(thread, errors.UseAfterFree, f"{access}: `{here.name}` of rank {here.rank} is freed")
    what = spaces[owner].retired.get(number)
    if what is not None:
        return error_at(thread, errors.UseAfterFree, f"{access}: {what}, is freed or closed")
    theirs = spaces[owner].segments.get(number)
    if theirs is not None:
        cell = theirs.cell(address & OFFSET_MASK)
        who = f"an address of {name_of(owner)} used by {name_of(thread.rank)}"
        message = f"{access}: {who}, which has not mapped it there"
        return error_at(thread, errors.Unmapped, f"{message}\n  in {cell}")
    return error_at(thread, errors.Unmapped, f"{access}: no segment has this number")


# --- Words for threads that do not meet: at a collective of their warp, or at a barrier of their block ----------------


def diverged(fact: Diverged) -> EmulatorError:
    thread, name, collective = fact
    came = ranges(t.lane for t in collective.threads)
    message = (
        f"{name}: this lane is in the mask {collective.mask:#010x} of another collective, which waits for it:\n"
        f"  lanes {came} are at {collective.name}, {describe_site(collective.site)}"
    )
    lanes = thread.warp_state.lanes
    places: dict[str, list[int]] = {}
    for absent in (lanes[n] for n in lanes_of(collective.missing) if lanes[n] is not thread):
        places.setdefault(place(absent), []).append(absent.lane)
    message += "".join(f"\n  lanes {ranges(numbers)} {where}" for where, numbers in places.items())
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


def place(thread: Thread) -> str:
    """Where a thread is."""
    if thread.exited:
        return "have left the kernel"
    if thread.gr_frame is None:
        return "are here" if thread is CURRENT.get() else "have not started"
    return f"are at {describe_site(site_of(thread.gr_frame))}"
