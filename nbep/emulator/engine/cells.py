"""Cells that threads poll: what each has seen since its last wait, and whom a store wakes. See `access.spin`.

A cell's key is what it belongs to, the same for all mappings of the same bytes, and its offset: group << 32 | offset.
Who waits for it is in a list of its 8 bytes, in the order in which they came.
"""

from __future__ import annotations

from numba.extending import register_jitable

from .schedule import make_runnable, park, run, threads
from .state import BUCKETS, GRANULE_SHIFT
from .words import (
    address,
    compiled,
    declared,
    free_list,
    get_s32,
    get_s64,
    is_delayed,
    linked,
    linked_twice,
    put_s32,
    rows,
)

cells, buckets, segments = rows("cells"), rows("buckets"), rows("segments")
take_cell, give_cell = free_list("cells")
each_cell, each_earlier, each_watched = linked("cells"), linked("cells", "before"), linked("cells", "next_there")
append_polled, remove_polled = linked_twice("cells", "next", "before", "first_polled", "last_polled")
append_watched, remove_watched = linked_twice("cells", "next_there", "before_there")
woken_at = address("woken")
peek = declared("peek", int, int)


@register_jitable
def value_at(place, size):
    return get_s32(place) if size == 4 else get_s64(place)


@compiled
def new_cell(key: int, place: int, size: int, segment: int, value: int) -> int:
    k = take_cell()
    cell = cells(k)
    cell.key, cell.place, cell.size, cell.segment, cell.value = key, place, size, segment, value
    cell.thread, cell.next, cell.before = run(0).current, 0, 0
    return k


@compiled
def note_polled(key: int, place: int, size: int, segment: int, value: int, comes_last: int) -> None:
    """Remember what the running thread has seen; comes_last: also if it has looked there before."""
    t = threads(run(0).current)
    for k in each_earlier(t.last_polled):
        if cells(k).key == key:
            cells(k).size, cells(k).value = size, value
            if comes_last and k != t.last_polled:
                remove_polled(t, k)
                append_polled(t, k)
            return
    append_polled(t, new_cell(key, place, size, segment, value))


@compiled
def forget_last_polled() -> None:
    t = threads(run(0).current)
    k = t.last_polled
    if k != 0:
        remove_polled(t, k)
        give_cell(k)


@compiled
def forget_polled() -> None:
    t = threads(run(0).current)
    for k in each_cell(t.first_polled):
        give_cell(k)
    t.first_polled = t.last_polled = 0


@compiled
def have_changed(first: int) -> int:
    """Whether one of a list of cells holds another value than was seen, or is freed."""
    for k in each_cell(first):
        cell = cells(k)
        if segments(cell.segment).is_freed:
            return 1
        if (peek(k) if is_delayed() and cell.segment != 0 else value_at(cell.place, cell.size)) != cell.value:
            return 1
    return 0


@register_jitable
def bucket_of(granule):
    return buckets((granule ^ granule >> 29) & (BUCKETS - 1))


@compiled
def watch(first: int, deadline: int) -> int:
    """Park until a cell of a list changes; whether time ran out instead."""
    r = run(0)
    t = threads(r.current)
    for k in each_cell(first):
        append_watched(bucket_of(cells(k).key >> GRANULE_SHIFT), k)
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
    for k in each_cell(t.first_watched):
        remove_watched(bucket_of(cells(k).key >> GRANULE_SHIFT), k)
        give_cell(k)
    t.first_watched = 0
    t.polling = 0
    run(0).num_polling -= 1
    make_runnable(thread)


@compiled
def wake(granule: int) -> None:
    """Wake those who poll a cell of 8 bytes and have not seen its present value."""
    r = run(0)
    begin = number = r.num_woken  # `peek` may wake others
    for k in each_watched(bucket_of(granule).first):
        if cells(k).key >> GRANULE_SHIFT == granule:
            put_s32(woken_at(number), cells(k).thread)
            number += 1
    r.num_woken = number
    for i in range(begin, number):
        thread = get_s32(woken_at(i))
        t = threads(thread)
        if t.polling and have_changed(t.first_watched):
            t.has_looked_again = 0
            t.num_time_outs = 0
            unwatch(thread)
    r.num_woken = begin


@register_jitable
def notify(key, number):
    """Bytes have changed."""
    if run(0).num_polling > 0:
        for granule in range(key >> GRANULE_SHIFT, (key + number + 7) >> GRANULE_SHIFT):
            if bucket_of(granule).first != 0:
                wake(granule)


@compiled
def let_look_again(group: int) -> None:
    """The CPU has written to a cell of a group: whoever waits for any of them may look once more."""
    for b in range(BUCKETS):
        for k in each_watched(buckets(b).first):
            if cells(k).key >> 32 == group:
                threads(cells(k).thread).has_looked_again = 0
