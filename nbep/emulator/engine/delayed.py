"""Accesses of threads whose stores are late and whose loads may be early: `models.delayed`, compiled.

Functions of the machine call these where `is_delayed`.
"""

from __future__ import annotations

from . import access, pending, state, words
from .access import COMPARE, CONSTANT, PLAIN, POLLED, write
from .cells import note_polled, notify, value_at
from .pending import granule_at, granules, hear_store, knowing, publish, see, seen_at, sees, stores, versions
from .schedule import fault, run, step, threads, uniform
from .signals import ACQUIRE, REACH, RELEASE, RETURNED, UNUSED
from .words import address, compiled, copy_bytes, declared, fill_bytes, get_s32, get_s64, put_s32, put_s64, rows

segments, blocks, cells, views = map(rows, ("segments", "blocks", "cells", "views"))
stores_at, scratch_at = address("stores"), address("scratch")  # the first fields of a store are bytes
take_view, give_view = words.free_list("views")
each_view = words.linked("views")
submit = declared("submit", None, int)


@compiled
def choose(thread: int, granule: int, count: int) -> int:
    """How many of the versions in `seen` are in what a load of a thread returns."""
    g, least = granules(granule), count
    while least > 0 and not pending.knows(thread, get_s32(seen_at(least - 1))):
        least -= 1
    if least == count:
        return count
    block = blocks(threads(thread).block).serial
    view, gone = g.views, 0
    while view != 0 and views(view).block != block:
        if versions(views(view).version).number != views(view).number:
            gone = view
        view = views(view).next
    for i in range(least, count):
        v = get_s32(seen_at(i))
        if view != 0 and v == views(view).version and versions(v).number == views(view).number:
            least = i + 1
    if least < count and uniform(1) < run(0).early_rate:
        count = least + pending.below(count - least)
    if count > 0:
        if view == 0 and gone == 0:
            gone = take_view()
            views(gone).next, g.views = g.views, gone
        view = view or gone
        v = get_s32(seen_at(count - 1))
        views(view).block, views(view).version, views(view).number = block, v, versions(v).number
    return count


@compiled
def look(thread: int, s: int, offset: int, size: int, is_early: int, target: int) -> int:
    """Put bytes (of 16) at a target as a thread sees them, and into `seen` their versions: how many there are."""
    segment = segments(s)
    granule = granule_at(segment, offset)
    g, written = granules(granule), scratch_at(2)
    pending.perform(thread, segment.group)
    copy_bytes(target, segment.memory + offset, size)
    fill_bytes(written, 1, size)
    if segment.shadow != 0:
        copy_bytes(written, segment.shadow + offset, size)
    count, in_memory = see(granule, thread), g.count
    if is_early and count > 0:
        count = choose(thread, granule, count)
    if count < in_memory:
        older = get_s32(seen_at(count))
        copy_bytes(target, pending.versions_at(older) + (offset & 15), size)
        copy_bytes(written, pending.versions_at(older) + 16 + (offset & 15), size)
    left = count - in_memory
    for i in pending.each_store(g.pending):
        if left > 0 and sees(thread, i):
            x = stores(i)
            left -= 1
            begin, end = max(x.where, offset), min(x.where + x.size, offset + size)
            if begin < end:
                copy_bytes(target + begin - offset, stores_at(i) + begin - x.where, end - begin)
                fill_bytes(written + begin - offset, 1, end - begin)
    run(0).has_hole = not access.is_written(written, size)
    return count


@compiled
def peek(k: int) -> int:
    """What the thread that polls a cell would load from it now."""
    cell = cells(k)
    segment, offset = segments(cell.segment), cell.key & 0xFFFFFFFF
    g = granules(granule_at(segment, offset))
    if g.pending == 0 and g.arriving == 0:
        return value_at(cell.place, cell.size)
    look(cell.thread, cell.segment, offset, cell.size, 0, scratch_at(0))
    return value_at(scratch_at(0), cell.size)


@compiled
def load_late(s: int, offset: int, size: int, how: int) -> int:
    """Where a load of this thread finds its bytes, if they are not to be read from memory as by `sc`."""
    thread, segment = run(0).current, segments(s)
    granule, key, place = granule_at(segment, offset), segment.group << 32 | offset, segment.memory + offset
    g = granules(granule)
    if g.pending == 0 and (g.newest == 0 or (how & (POLLED | CONSTANT) == PLAIN and pending.knows(thread, g.newest))):
        if g.signal and how & POLLED:
            hear_store(thread, granule, 0, offset, 0, how)
        return 0
    if how & CONSTANT:  # have these bytes changed since this kernel began?
        for i in range(see(granule, pending.EVERYBODY)):
            x, begin = versions(get_s32(seen_at(i))), offset & 15
            if x.begin < begin + size and begin < x.end and not 0 < x.seen3 <= knowing(thread).first_moment:
                fault(state.NOT_CONSTANT, offset)
    count = look(thread, s, offset, size, 1, scratch_at(0))
    if run(0).has_hole:
        fault(state.UNWRITTEN, offset)
    if how & POLLED:
        note_polled(key, place, size, s, value_at(scratch_at(0), size), 1)
        hear_store(thread, granule, count, offset, size, how)
    elif how & CONSTANT and segment.constant != 0:
        access.note_constant(segment.constant, offset, size, threads(thread).launch)
    return scratch_at(0)


@compiled
def store_late(address: int, size: int, low: int, high: int, how: int) -> None:
    thread, reach = run(0).current, (how >> REACH) & 3
    level = reach if how & RELEASE else 0
    if level:
        publish(level)
        pending.note_release(knowing(thread))
    s, offset = access.segment_of(address, threads(thread)), address & 0xFFFFFFFF
    segment = segments(s)
    access.check_place(address, offset, size, segment.lowest, segment.end)
    if segment.is_writable == 0:
        fault(state.READ_ONLY, address)
    if level == 3:
        v = pending.new_version(thread, offset, size, reach)
        pending.keep(v, segment, offset)
        access.check_store(address, offset, size, segment)
        write(segment.memory + offset, size, low, high)
        run(0).has_changed = 1
        notify(segment.group << 32 | offset, size)
        pending.be_there(granules(granule_at(segment, offset)), v)
        return
    if segment.constant != 0 and access.is_constant(segment.constant, offset, size):
        fault(state.NOT_CONSTANT, address)
    i = pending.new_store(thread, s, offset, size, reach, pending.NO_ATOMIC, low, high)
    if level:
        publish(level)
    submit(state.MOST_OPERATIONS + i)


@compiled
def atomic_late(op: int, address: int, size: int, operand: int, compare: int, how: int) -> int:
    step()
    thread, offset, reach = run(0).current, address & 0xFFFFFFFF, (how >> REACH) & 3
    s = access.segment_of(address, threads(thread))
    segment = segments(s)
    if segment.on_host and reach == 3:
        fault(state.HOST_ATOMIC, address)
    access.check_place(address, offset, size, segment.lowest, segment.end)
    granule, key, place = granule_at(segment, offset), segment.group << 32 | offset, segment.memory + offset
    g = granules(granule)
    is_there = not segment.on_host and (segment.shadow == 0 or access.is_written(segment.shadow + offset, size))
    if op == COMPARE and is_there:
        for is_early in range(1, -1, -1):
            count = look(thread, s, offset, size, is_early, scratch_at(0))
            old = value_at(scratch_at(0), size)
            if old != compare:
                note_polled(key, place, size, s, old, 1)
                hear_store(thread, granule, count, offset, size, how)
                return old
    if how & RELEASE:
        publish(reach)
        pending.note_release(knowing(thread))
    if how & (UNUSED | RETURNED) and is_there and (segment.constant == 0 or get_s64(segment.constant - 8) == 0):
        if how & RETURNED:
            fault(state.PASSED_ON, address)
        submit(state.MOST_OPERATIONS + pending.new_store(thread, s, offset, size, reach, op, operand, compare))
        return 0
    last = 0
    for i in pending.each_store(g.pending):
        if sees(thread, i):
            last = i
    if last != 0:
        pending.commit(last)
    if segment.shadow != 0 and not access.is_written(segment.shadow + offset, size):
        fault(state.UNWRITTEN, address)
    v = pending.new_version(thread, offset, size, reach)
    pending.keep(v, segment, offset)
    access.check_store(address, offset, size, segment)
    old = value_at(place, size)
    write(place, size, access.changed_by(op, old, operand, compare), 0)
    access.note_changed(place, size, old, key, s)
    said = hear_store(thread, granule, see(granule, pending.NOBODY), offset, size, how)
    if op != COMPARE or old == compare:
        versions(v).says = max(versions(v).says, said)
        pending.be_there(g, v)
    else:
        pending.give_version(v)
    return old


# --- what else orders accesses -----------------------------------------------------------------------------------


@compiled
def fence_late(reach: int) -> None:
    thread = run(0).current
    mine = knowing(thread)
    publish(reach)
    mine.floor = max(mine.floor, mine.shared, get_s32(pending.heard_within(thread, reach)))
    mine.block_floor = max(mine.block_floor, mine.shared_block)
    pending.note_release(mine)


@compiled
def come_to_meet() -> None:
    """This thread comes to a barrier or to a syncwarp."""
    publish(1)
    mine = knowing(run(0).current)
    mine.floor = max(mine.floor, mine.heard1)


@compiled
def tell_shared(address: int, how: int, modifies: int) -> None:
    """A store to shared memory tells what its thread knows. modifies: an atomic also what was told there"""
    thread = run(0).current
    # What a strong store tells is noted for each 4 bytes, two moments.
    mine, place = knowing(thread), blocks(threads(thread).block).notes + ((address >> 2) << 3)
    if (how >> REACH) & 3 == 0:
        if address & 3 == 0:
            put_s64(place, 0)
        return
    if how & RELEASE:
        pending.note_release(mine)
    put_s32(place, max(mine.released_floor, get_s32(place) if modifies else 0))
    put_s32(place + 4, max(mine.released, get_s32(place + 4) if modifies else 0))


@compiled
def hear_shared(address: int, how: int) -> None:
    thread = run(0).current
    mine, place = knowing(thread), blocks(threads(thread).block).notes + ((address >> 2) << 3)
    floor, block_floor = max(mine.shared, get_s32(place)), max(mine.shared_block, get_s32(place + 4))
    if how & ACQUIRE:
        mine.floor, mine.block_floor = max(mine.floor, floor), max(mine.block_floor, block_floor)
    else:
        mine.shared, mine.shared_block = floor, block_floor


@compiled
def forget_granules(begin: int, number: int) -> int:
    """Memory is given up: how many of its 16 bytes have stores on their way, which still need their notes."""
    left = 0
    for i in range(number):
        g = granules(begin + i * pending.GRANULE_BYTES)
        for v in pending.each_version(g.oldest):
            pending.give_version(v)
        for view in each_view(g.views):
            give_view(view)
        g.oldest = g.newest = g.views = g.count = 0
        left += g.pending != 0
    return left
