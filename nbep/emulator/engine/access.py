"""Loads, stores and atomics of a thread, and waiting by polling: `machine.access`, compiled.

Each checks an access and gives the place of its bytes, or has done it. What is wrong stops the run.
"""

from __future__ import annotations

from numba.extending import register_jitable

from . import state
from .cells import forget_last_polled, forget_polled, have_changed, note_polled, notify, value_at, watch
from .schedule import fault, launches, pause, run, step, threads
from .signals import REACH, RELEASE, UNUSED, note_atomic, note_fence, note_load, note_store
from .words import (
    compiled,
    declared,
    get_s16,
    get_s32,
    get_s64,
    get_u8,
    is_checked,
    is_delayed,
    put_s16,
    put_s32,
    put_s64,
    put_u8,
    rows,
)

segments = rows("segments")
blocks = rows("blocks")
is_missed = declared("is_missed", int, int)
# Of `delayed`.
load_late, store_late = declared("load_late", int, *[int] * 4), declared("store_late", None, *[int] * 5)
atomic_late, fence_late = declared("atomic_late", int, *[int] * 6), declared("fence_late", None, int)
publish, tell_shared = declared("publish", None, int), declared("tell_shared", None, *[int] * 3)
hear_shared = declared("hear_shared", None, int, int)

# How memory is accessed: how a load looks, and what `signals` adds to it
PLAIN, POLLED, CONSTANT = 0, 1, 2
ADD, EXCHANGE, COMPARE, MAX, MIN, OR, AND = range(7)
MAX_EMPTY_SPINS = 100_000
WRITTEN = 0x0101010101010101


@register_jitable
def segment_of(address, t):
    """The row of the segment that an address lies in."""
    number = address >> 32
    if number >> 22 != t.space:
        fault(state.UNMAPPED, address)
    s = get_s32(t.segments + ((number & 0x3FFFFF) << 2))
    if s == 0:
        fault(state.UNMAPPED, address)
    return s


@register_jitable
def check_place(address, offset, size, lowest, end):
    if offset & (size - 1):
        fault(state.MISALIGNED, address)
    if offset < lowest or offset + size > end:
        fault(state.OUT_OF_BOUNDS, address)


@register_jitable
def is_written(shadow, size):
    if size == 4:
        return get_s32(shadow) == 0x01010101
    if size == 1:
        return get_u8(shadow) == 1
    if size == 2:
        return get_s16(shadow) == 0x0101
    return get_s64(shadow) == WRITTEN and (size == 8 or get_s64(shadow + 8) == WRITTEN)


@register_jitable
def write(place, size, low, high):
    if size == 4:
        put_s32(place, low)
    elif size == 1:
        put_u8(place, low)
    elif size == 2:
        put_s16(place, low)
    else:
        put_s64(place, low)
        if size == 16:
            put_s64(place + 8, high)


@register_jitable
def mark_written(shadow, size):
    write(shadow, size, WRITTEN, WRITTEN)


@compiled
def note_constant(constant: int, offset: int, size: int, launch: int) -> None:
    """This thread's kernel takes bytes for constant: kernel << 16 | mask, for 16 of them."""
    cell = constant + ((offset >> 4) << 3)
    mask = ((1 << size) - 1) << (offset & 15)
    before = get_s64(cell)
    if is_delayed() and before == 0:
        put_s64(constant - 8, get_s64(constant - 8) + 1)  # there it is counted for how many 16 bytes this is so
    put_s64(cell, (before if before >> 16 == launch else launch << 16) | mask)


@compiled
def is_constant(constant: int, offset: int, number: int) -> int:
    """Whether a kernel that still runs takes one of some bytes for constant."""
    for granule in range(offset >> 4, (offset + number + 15) >> 4):
        word = get_s64(constant + (granule << 3))
        if word != 0:
            low = max(offset - 16 * granule, 0)
            if launches(word >> 16).is_done:
                put_s64(constant + (granule << 3), 0)
                if is_delayed():
                    put_s64(constant - 8, get_s64(constant - 8) - 1)
            elif (word >> low) & ((1 << (min(offset + number - 16 * granule, 16) - low)) - 1):
                return 1
    return 0


@register_jitable
def look(t, address):
    """For `turn`: this thread has looked at an address."""
    t.looks = 1
    if t.looked != address:
        t.looked = address
        t.spins = 0


@compiled
def load(address: int, size: int, how: int) -> int:
    """Where a global load finds its bytes."""
    step()
    t = threads(run(0).current)
    look(t, address)
    s = segment_of(address, t)
    segment = segments(s)
    offset = address & 0xFFFFFFFF
    check_place(address, offset, size, segment.lowest, segment.end)
    if is_delayed():
        place = load_late(s, offset, size, how)
        if place != 0:
            return place
    if segment.shadow != 0 and not is_written(segment.shadow + offset, size):
        fault(state.UNWRITTEN, address)
    place = segment.memory + offset
    if how & POLLED:
        note_polled(segment.group << 32 | offset, place, size, s, value_at(place, size), 1)
    elif how & CONSTANT and segment.constant != 0:
        note_constant(segment.constant, offset, size, t.launch)
    if is_checked():
        note_load(segment.notes, offset, size, how)
    return place


@register_jitable
def check_store(address, offset, size, segment):
    check_place(address, offset, size, segment.lowest, segment.end)
    if segment.constant != 0 and is_constant(segment.constant, offset, size):
        fault(state.NOT_CONSTANT, address)
    if segment.is_writable == 0:
        fault(state.READ_ONLY, address)
    if segment.shadow != 0:
        mark_written(segment.shadow + offset, size)


@compiled
def store(address: int, size: int, low: int, high: int, how: int) -> None:
    """Write bytes of global memory; high: those behind the first 8."""
    step()
    if is_delayed():
        store_late(address, size, low, high, how)
        return
    segment = segments(segment_of(address, threads(run(0).current)))
    offset = address & 0xFFFFFFFF
    check_store(address, offset, size, segment)
    write(segment.memory + offset, size, low, high)
    run(0).has_changed = 1
    notify(segment.group << 32 | offset, size)
    if is_checked():
        note_store(segment.notes, offset, size, how, 0)


@register_jitable
def changed_by(op, old, operand, compare):
    if op == ADD:
        return old + operand
    if op == EXCHANGE:
        return operand
    if op == COMPARE:
        return operand if old == compare else old
    if op == MAX:
        return max(old, operand)
    if op == MIN:
        return min(old, operand)
    return old | operand if op == OR else old & operand


@register_jitable
def note_changed(place, size, old, key, segment):
    """An atomic has been; old: what was there."""
    if value_at(place, size) == old:
        note_polled(key, place, size, segment, old, 0)  # a failed compare-and-swap is a poll
    else:
        run(0).has_changed = 1
        notify(key, size)


@compiled
def begin_atomic(address: int, size: int, how: int) -> int:
    """Where an atomic finds its bytes. Who called this reads and writes them, and calls `end_atomic`."""
    step()
    t = threads(run(0).current)
    look(t, address)
    segment = segments(segment_of(address, t))
    if segment.on_host and (how >> REACH) & 3 == 3:
        fault(state.HOST_ATOMIC, address)
    offset = address & 0xFFFFFFFF
    check_place(address, offset, size, segment.lowest, segment.end)
    if segment.shadow != 0 and not is_written(segment.shadow + offset, size):
        fault(state.UNWRITTEN, address)
    check_store(address, offset, size, segment)
    return segment.memory + offset


@compiled
def end_atomic(address: int, size: int, old: int, has_written: int, how: int) -> None:
    s = segment_of(address, threads(run(0).current))
    segment = segments(s)
    offset = address & 0xFFFFFFFF
    note_changed(segment.memory + offset, size, old, segment.group << 32 | offset, s)
    if is_checked():
        note_atomic(segment.notes, offset, size, how, has_written)


@compiled
def atomic(op: int, address: int, size: int, operand: int, compare: int, how: int) -> int:
    if is_delayed():
        return atomic_late(op, address, size, operand, compare, how)
    place = begin_atomic(address, size, how)
    old = value_at(place, size)
    write(place, size, changed_by(op, old, operand, compare), 0)
    end_atomic(address, size, old, op != COMPARE or old == compare, how & (UNUSED - 1))
    return old


# --- shared memory -----------------------------------------------------------------------------------------------
# At a block's `side` lies what is noted of it: for each byte whether it is written; for 16 who stored there last, after
# how many proxy fences, in 8 bytes; for 8 the number of an mbarrier, in 4 bytes.


@register_jitable
def padded(t):
    """Bytes of shared memory, with those that fill the last 16."""
    return (t.shared_bytes + 15) & ~15


@register_jitable
def check_shared(address, size, t):
    if address & (size - 1):
        fault(state.MISALIGNED, address)
    if address < 0 or address + size > t.shared_bytes:
        fault(state.OUT_OF_BOUNDS, address)


@register_jitable
def shared_key(t, address):
    return blocks(t.block).group << 32 | address


@compiled
def load_shared(address: int, size: int, how: int) -> int:
    """Where a load finds its bytes of the block's shared memory."""
    step()
    t = threads(run(0).current)
    look(t, address)
    check_shared(address, size, t)
    if not is_written(t.side + address, size):
        fault(state.UNWRITTEN, address)
    place = t.shared + address
    if how & POLLED:
        note_polled(shared_key(t, address), place, size, 0, value_at(place, size), 1)
    if is_checked():
        note_load(blocks(t.block).notes, address, size, how)
    if is_delayed() and how & POLLED:
        hear_shared(address, how)
    return place


@compiled
def store_shared(address: int, size: int, low: int, high: int, how: int) -> None:
    if is_delayed() and how & RELEASE:
        publish(1)
    step()
    t = threads(run(0).current)
    check_shared(address, size, t)
    mark_written(t.side + address, size)
    write(t.shared + address, size, low, high)
    run(0).has_changed = 1
    put_s64(t.side + padded(t) + ((address >> 4) << 3), (blocks(t.block).proxy_fences + 1) << 10 | t.thread_idx)
    notify(shared_key(t, address), size)
    if is_checked():
        note_store(blocks(t.block).notes, address, size, how, 0)
    if is_delayed():
        tell_shared(address, how, 0)


@compiled
def begin_shared_atomic(address: int, size: int) -> int:
    step()
    t = threads(run(0).current)
    look(t, address)
    check_shared(address, size, t)
    if not is_written(t.side + address, size):
        fault(state.UNWRITTEN, address)
    return t.shared + address


@compiled
def end_shared_atomic(address: int, size: int, old: int, has_written: int, how: int) -> None:
    t = threads(run(0).current)
    note_changed(t.shared + address, size, old, shared_key(t, address), 0)
    if is_checked():
        note_atomic(blocks(t.block).notes, address, size, how, has_written)


@compiled
def atomic_shared(op: int, address: int, size: int, operand: int, compare: int, how: int) -> int:
    if is_delayed() and how & RELEASE:
        t = threads(run(0).current)
        check_shared(address, size, t)
        if op != COMPARE or value_at(t.shared + address, size) == compare:
            publish(1)
    place = begin_shared_atomic(address, size)
    old = value_at(place, size)
    write(place, size, changed_by(op, old, operand, compare), 0)
    end_shared_atomic(address, size, old, op != COMPARE or old == compare, how & (UNUSED - 1))
    if is_delayed():
        hear_shared(address, how)
        if op != COMPARE or old == compare:
            tell_shared(address, how, 1)
    return old


# --- time and waiting --------------------------------------------------------------------------------------------


@compiled
def now() -> int:
    """Virtual nanoseconds."""
    r = run(0)
    return r.calls + r.granted - r.left + r.skipped


@compiled
def globaltimer() -> int:
    step()
    run(0).has_changed = 1
    return now()


@compiled
def spin(deadline: int) -> int:
    """One turn of a polling loop; whether the wait times out."""
    r = run(0)
    t = threads(r.current)
    t.may_time_out = deadline != t.fault_deadline
    r.left -= 1
    t.waited_once = 0
    t.has_news = 1
    if now() > deadline:
        forget_polled()
        return time_out()
    if t.first_polled == 0:
        t.empty_spins += 1
        if t.empty_spins > MAX_EMPTY_SPINS:
            fault(state.EMPTY_SPINS, 0)
        t.has_news = 0
        pause()
        return 0
    t.empty_spins = 0
    first = t.first_polled
    if have_changed(first):
        forget_polled()
        pause()
        return 0
    if is_missed(r.current):
        forget_polled()
        t.has_news = 0
        pause()
        return 0
    t.first_polled = t.last_polled = 0
    return time_out() if watch(first, deadline) else 0


@register_jitable
def time_out():
    """What threads do from now on, they do to bytes that are not there: nothing is checked any more."""
    run(0).has_failed = 1
    return 1


@compiled
def fault_due(deadline: int, report: int) -> None:
    """This thread reports a fault if the deadline passes; what it has looked at last it does not wait for."""
    threads(run(0).current).fault_deadline = deadline if report else state.NO_DEADLINE
    forget_last_polled()


@compiled
def fence(reach: int) -> None:
    """reach: 0 if it orders no memory"""
    if is_delayed() and reach != 0:
        fence_late(reach)
    step()
    if is_checked() and reach != 0:
        note_fence(reach)


# --- who a thread is, and what its kernel was given --------------------------------------------------------------

ABOUT = ("thread_idx", "block_idx", "grid_dim", "block_dim", "lane")


@compiled
def about_thread(which: int) -> int:
    """One of ABOUT, by its place."""
    t = threads(run(0).current)
    if which == 0:
        return t.thread_idx
    if which == 1:
        return t.block_idx
    return t.grid_dim if which == 2 else t.block_dim if which == 3 else t.lane


@compiled
def argument(i: int) -> int:
    """A leaf of the arguments of this thread's kernel."""
    return get_s64(launches(threads(run(0).current).launch).arguments + 8 * i)
