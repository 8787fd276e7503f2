"""Cells that threads poll: what each has seen since its last wait, and whom a store wakes. See `access.spin`.

A cell's key is what it belongs to, the same for all mappings of the same bytes, and its offset: group << 32 | offset.
Who waits for it is in a list of its 8 bytes, in the order in which they came.
"""

from __future__ import annotations

from numba.extending import register_jitable

from .schedule import fault, make_runnable, park, run, threads
from .state import BUCKETS, FULL_TABLE, GRANULE_SHIFT, MOST_CELLS
from .words import address, compiled, declared, get_s32, get_s64, is_delayed, put_s32, rows

cells, buckets, segments = rows("cells"), rows("buckets"), rows("segments")
woken_at = address("woken")
peek = declared("peek", int, int)


@register_jitable
def value_at(place, size):
    return get_s32(place) if size == 4 else get_s64(place)


@compiled
def new_cell(key: int, place: int, size: int, segment: int, value: int) -> int:
    r = run(0)
    if r.free_cell != 0:
        k = r.free_cell
        r.free_cell = cells(k).next
    else:
        r.num_cells += 1
        k = r.num_cells
        if k >= MOST_CELLS:
            fault(FULL_TABLE, key)
    cell = cells(k)
    cell.key, cell.place, cell.size, cell.segment, cell.value = key, place, size, segment, value
    cell.thread, cell.next, cell.before = r.current, 0, 0
    return k


@register_jitable
def free_cell(k):
    r = run(0)
    cells(k).next = r.free_cell
    r.free_cell = k


@register_jitable
def append_polled(t, k):
    cell = cells(k)
    cell.before, cell.next = t.last_polled, 0
    if t.last_polled != 0:
        cells(t.last_polled).next = k
    else:
        t.first_polled = k
    t.last_polled = k


@register_jitable
def remove_polled(t, k):
    cell = cells(k)
    if cell.before != 0:
        cells(cell.before).next = cell.next
    else:
        t.first_polled = cell.next
    if cell.next != 0:
        cells(cell.next).before = cell.before
    else:
        t.last_polled = cell.before


@compiled
def note_polled(key: int, place: int, size: int, segment: int, value: int, comes_last: int) -> None:
    """Remember what the running thread has seen; comes_last: also if it has looked there before."""
    t = threads(run(0).current)
    k = t.last_polled
    while k != 0:
        if cells(k).key == key:
            cells(k).size, cells(k).value = size, value
            if comes_last and k != t.last_polled:
                remove_polled(t, k)
                append_polled(t, k)
            return
        k = cells(k).before
    append_polled(t, new_cell(key, place, size, segment, value))


@compiled
def forget_last_polled() -> None:
    t = threads(run(0).current)
    k = t.last_polled
    if k != 0:
        remove_polled(t, k)
        free_cell(k)


@compiled
def forget_polled() -> None:
    t = threads(run(0).current)
    k = t.first_polled
    while k != 0:
        after = cells(k).next
        free_cell(k)
        k = after
    t.first_polled = t.last_polled = 0


@compiled
def have_changed(first: int) -> int:
    """Whether one of a list of cells holds another value than was seen, or is freed."""
    k = first
    while k != 0:
        cell = cells(k)
        if segments(cell.segment).is_freed:
            return 1
        if (peek(k) if is_delayed() and cell.segment != 0 else value_at(cell.place, cell.size)) != cell.value:
            return 1
        k = cell.next
    return 0


@register_jitable
def bucket_of(granule):
    return (granule ^ granule >> 29) & (BUCKETS - 1)


@compiled
def watch(first: int, deadline: int) -> int:
    """Park until a cell of a list changes; whether time ran out instead."""
    r = run(0)
    t = threads(r.current)
    k = first
    while k != 0:
        cell = cells(k)
        there = buckets(bucket_of(cell.key >> GRANULE_SHIFT))
        cell.before_there, cell.next_there = there.last, 0
        if there.last != 0:
            cells(there.last).next_there = k
        else:
            there.first = k
        there.last = k
        k = cell.next
    t.first_watched = first
    t.deadline = deadline
    t.expired = 0
    t.polling = 1
    r.sequence += 1
    t.sequence = r.sequence
    r.parks += 1
    r.num_polling += 1
    park()
    return t.expired


@compiled
def unwatch(thread: int) -> None:
    """Make a thread runnable that waits for cells."""
    t = threads(thread)
    k = t.first_watched
    while k != 0:
        cell = cells(k)
        there = buckets(bucket_of(cell.key >> GRANULE_SHIFT))
        if cell.before_there != 0:
            cells(cell.before_there).next_there = cell.next_there
        else:
            there.first = cell.next_there
        if cell.next_there != 0:
            cells(cell.next_there).before_there = cell.before_there
        else:
            there.last = cell.before_there
        after = cell.next
        free_cell(k)
        k = after
    t.first_watched = 0
    t.polling = 0
    run(0).num_polling -= 1
    make_runnable(thread)


@compiled
def wake(granule: int) -> None:
    """Wake those who poll a cell of 8 bytes and have not seen its present value."""
    begin = run(0).num_woken if is_delayed() else 0  # `peek` may wake others
    number = begin
    k = buckets(bucket_of(granule)).first
    while k != 0:
        if cells(k).key >> GRANULE_SHIFT == granule:
            put_s32(woken_at(number), cells(k).thread)
            number += 1
        k = cells(k).next_there
    if is_delayed():
        run(0).num_woken = number
    for i in range(begin, number):
        thread = get_s32(woken_at(i))
        t = threads(thread)
        if t.polling and have_changed(t.first_watched):
            t.has_looked_again = 0
            t.num_time_outs = 0
            unwatch(thread)
    if is_delayed():
        run(0).num_woken = begin


@register_jitable
def notify(key, number):
    """Bytes have changed."""
    if run(0).num_polling > 0:
        for granule in range(key >> GRANULE_SHIFT, (key + number + 7) >> GRANULE_SHIFT):
            if buckets(bucket_of(granule)).first != 0:
                wake(granule)


@compiled
def let_look_again(group: int) -> None:
    """The CPU has written to a cell of a group: whoever waits for any of them may look once more."""
    for b in range(BUCKETS):
        k = buckets(b).first
        while k != 0:
            if cells(k).key >> 32 == group:
                threads(cells(k).thread).has_looked_again = 0
            k = cells(k).next_there
