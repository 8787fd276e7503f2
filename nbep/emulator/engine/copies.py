"""Bulk copies and the mbarriers that they complete on: `machine.bulk`, compiled.

A load happens at one step. A store reads its source at one step, into memory of its own, and writes at another.
"""

from __future__ import annotations

from numba import types
from numba.extending import register_jitable

from . import state
from .access import WRITTEN, is_constant, padded, segment_of
from .cells import new_cell, note_polled, notify, watch
from .copy_signals import (
    begin_mbarrier,
    close_group,
    copy_is_there,
    end_phase,
    hear_phase,
    note_copy,
    note_mbarrier,
    tell_mbarrier,
    waited,
)
from .delayed import look
from .knowledge import fence_proxies
from .pending import NO_ATOMIC, knowing, learn, new_store, publish
from .schedule import fault, launches, make_runnable, operations_at, park, run, step, stop, threads
from .words import (
    I8,
    I64,
    VOID,
    address,
    appending,
    call,
    compiled,
    copy_bytes,
    emitting,
    fill_bytes,
    free_list,
    get_s32,
    get_s64,
    is_checked,
    is_delayed,
    linked,
    pointer,
    put_s32,
    put_s64,
    rows,
)

segments, blocks = rows("segments"), rows("blocks")
copies, groups, mbarriers = rows("copies"), rows("groups"), rows("mbarriers")
take_copy, give_copy = free_list("copies")
take_group, give_group = free_list("groups")
take_mbarrier, _ = free_list("mbarriers")  # Python gives them back
each_group, append_group = linked("groups"), appending("groups", "next", "oldest_group", "latest_group")
mbarriers_at = address("mbarriers")  # whose first field is the phase

LOAD, READ, WRITE = range(3)
ORPHAN = -1


@emitting(types.int64, types.int64)
def malloc(builder, number):
    return builder.ptrtoint(call(builder, "malloc", I8.as_pointer(), [number]), I64)


@emitting(types.none, types.int64)
def free(builder, place):
    call(builder, "free", VOID, [pointer(builder, place)])


# --- mbarriers ---------------------------------------------------------------------------------------------------


@register_jitable
def mbarrier_place(t, where):
    """Where the number of the mbarrier of 8 shared bytes is kept."""
    if where & 7 or where < 0 or where + 8 > t.shared_bytes:
        fault(state.NO_MBARRIER, where)
    return t.side + padded(t) + (padded(t) >> 1) + ((where >> 3) << 2)


@compiled
def init_mbarrier(where: int, count: int) -> None:
    step()
    t = threads(run(0).current)
    place = mbarrier_place(t, where)
    if count < 1:
        fault(state.NO_MBARRIER, where)
    i = take_mbarrier()
    m = mbarriers(i)
    m.count = m.left = count
    m.expected = 0
    m.phase = 0
    m.next = blocks(t.block).mbarriers
    blocks(t.block).mbarriers = i
    put_s32(place, i)
    if is_delayed():
        m.told = 0
    if is_checked():
        begin_mbarrier(i)
        note_mbarrier(where, 1)


@register_jitable
def mbarrier_of(where):
    step()
    i = get_s32(mbarrier_place(threads(run(0).current), where))
    if i == 0:
        fault(state.NO_MBARRIER, where)
    return i


@compiled
def inval_mbarrier(where: int) -> None:
    mbarrier_of(where)
    put_s32(mbarrier_place(threads(run(0).current), where), 0)
    if is_checked():
        note_mbarrier(where, 1)


@register_jitable
def mbarrier_key(i):
    return (state.OF_MBARRIERS + i) << 32


@compiled
def update_mbarrier(i: int, arrivals: int, nbytes: int) -> None:
    """Count arrivals, and bytes expected (positive) or arrived (negative)."""
    m = mbarriers(i)
    m.left -= arrivals
    m.expected += nbytes
    if m.left == 0 and m.expected == 0:
        m.phase ^= 1
        m.left = m.count
        if is_checked():
            end_phase(i)
        notify(mbarrier_key(i), 8)


@compiled
def arrive_mbarrier(where: int, nbytes: int) -> None:
    i = mbarrier_of(where)
    if is_checked():
        tell_mbarrier(i, where)
    if is_delayed():
        publish(1)
        x = knowing(run(0).current)
        mbarriers(i).told = max(mbarriers(i).told, x.floor, x.heard1)
    update_mbarrier(i, 1, nbytes)


@compiled
def try_wait_mbarrier(where: int, parity: int) -> int:
    """Whether the phase of a parity is over; waits for that, within the limit of the hardware's patience."""
    i = mbarrier_of(where)
    m, t = mbarriers(i), threads(run(0).current)
    phase = m.phase
    if phase == parity & 1:
        deadline = state.NEVER if t.waited_once else 0
        t.waited_once = 1
        key, place = mbarrier_key(i), mbarriers_at(i)
        expired = watch(new_cell(key, place, 8, 0, phase), deadline)
        if expired or m.phase == phase:
            note_polled(key, place, 8, 0, phase, 0)
            return 0
        t.waited_once = 0
    if is_checked():
        hear_phase(i, where)
    if is_delayed():
        learn(run(0).current, m.told)
    return 1


# --- copies ------------------------------------------------------------------------------------------------------


@register_jitable
def check_range(where, nbytes, lowest, end):
    if where & 15 or nbytes & 15 or nbytes <= 0:
        fault(state.MISALIGNED, where)
    if where < lowest or where + nbytes > end:
        fault(state.OUT_OF_BOUNDS, where)


@compiled
def submit(what: int) -> None:
    """Have a copy happen at a later step."""
    r = run(0)
    r.has_changed = 1
    put_s32(operations_at(r.num_operations), what)
    r.num_operations += 1


@register_jitable
def new_copy(kind, t, where, smem, nbytes):
    i = take_copy()
    c = copies(i)
    c.kind, c.thread, c.block, c.launch = kind, run(0).current, t.block, t.launch
    c.where, c.smem, c.number = where, smem, nbytes
    launches(t.launch).copies += 1
    blocks(t.block).copies += 1
    return i


@compiled
def bulk_load(smem: int, where: int, nbytes: int, mbarrier: int) -> None:
    i = mbarrier_of(mbarrier)
    t = threads(run(0).current)
    s = segment_of(where, t)
    check_range(where & 0xFFFFFFFF, nbytes, segments(s).lowest, segments(s).end)
    check_range(smem, nbytes, 0, t.shared_bytes)
    c = new_copy(LOAD, t, where & 0xFFFFFFFF, smem, nbytes)
    copies(c).segment, copies(c).goal = s, i
    submit(c)
    if is_checked():
        note_copy(c, 1)


@compiled
def bulk_store(where: int, smem: int, nbytes: int) -> None:
    step()
    t = threads(run(0).current)
    s = segment_of(where, t)
    check_range(where & 0xFFFFFFFF, nbytes, segments(s).lowest, segments(s).end)
    if segments(s).is_writable == 0:
        fault(state.READ_ONLY, where)
    check_range(smem, nbytes, 0, t.shared_bytes)
    first = blocks(t.block).first
    for granule in range(smem >> 4, (smem + nbytes) >> 4):
        place = t.side + padded(t) + (granule << 3)
        word = get_s64(place)  # see `access.store_shared`
        if word != 0:
            if (word >> 10) - 1 >= max(threads(first + (word & 1023)).fenced, t.fenced):
                fault(state.UNFENCED, smem)
            put_s64(place, 0)
    if t.open_group == 0:
        t.open_group = new_group()
    groups(t.open_group).reads += 1
    groups(t.open_group).writes += 1
    c = new_copy(READ, t, where & 0xFFFFFFFF, smem, nbytes)
    copies(c).segment, copies(c).goal = s, t.open_group
    submit(c)
    if is_checked():
        note_copy(c, 0)


@register_jitable
def is_all_written(shadow, number):
    i = 0
    while i < number and get_s64(shadow + i) == WRITTEN:
        i += 8
    return i >= number


@compiled
def copy(i: int) -> None:
    """An operation under way happens: a load, or one half of a store."""
    c = copies(i)
    segment = segments(c.segment)
    shared = blocks(c.block).shared + c.smem
    side = blocks(c.block).side + c.smem
    there, shadow = segment.memory + c.where, segment.shadow
    if c.kind == READ:
        if not is_all_written(side, c.number):
            stop(state.UNWRITTEN, c.smem, c.thread)
            return
        c.buffer = malloc(c.number)
        copy_bytes(c.buffer, shared, c.number)
        groups(c.goal).reads -= 1
        progress(c.thread)
        c.kind = WRITE
        submit(i)
        return
    if segment.is_freed:
        stop(state.UNMAPPED, c.where, c.thread)
        return
    if c.kind == LOAD:
        is_seen = is_delayed()
        if is_delayed():
            for k in range(0, c.number, 16):
                look(c.thread, c.segment, c.where + k, 16, 1, shared + k)
                if run(0).has_hole:
                    is_seen = 0
        if not is_seen:
            if shadow != 0 and not is_all_written(shadow + c.where, c.number):
                stop(state.UNWRITTEN, c.where, c.thread)
                return
            copy_bytes(shared, there, c.number)
        fill_bytes(side, 1, c.number)
        notify(blocks(c.block).group << 32 | c.smem, c.number)
        if is_checked():
            copy_is_there(i)
        update_mbarrier(c.goal, 0, -c.number)
    else:
        if segment.constant != 0 and is_constant(segment.constant, c.where, c.number):
            stop(state.NOT_CONSTANT, c.where, c.thread)
            return
        if is_delayed():
            for k in range(0, c.number, 16):
                low, high = get_s64(c.buffer + k), get_s64(c.buffer + k + 8)
                new = new_store(c.thread, c.segment, c.where + k, 16, 0, NO_ATOMIC, low, high)
                submit(state.MOST_OPERATIONS + new)
            free(c.buffer)
        else:
            copy_bytes(there, c.buffer, c.number)
            free(c.buffer)
            if shadow != 0:
                fill_bytes(shadow + c.where, 1, c.number)
            notify(segment.group << 32 | c.where, c.number)
        group = groups(c.goal)
        group.writes -= 1
        if group.writes == 0 and group.next == ORPHAN:
            give_group(c.goal)
        progress(c.thread)
    give_copy(i)
    blocks(c.block).copies -= 1
    launch = launches(c.launch)
    launch.copies -= 1
    if launch.copies == 0 and launch.live == 0:
        run(0).event, run(0).event_arg = state.COPIES_DONE, c.launch


# --- bulk groups: the open one, and the committed ones in order --------------------------------------------------


@compiled
def new_group() -> int:
    i = take_group()
    groups(i).reads = groups(i).writes = groups(i).next = 0
    return i


@compiled
def commit_group() -> None:
    step()
    t = threads(run(0).current)
    i = t.open_group if t.open_group != 0 else new_group()
    t.open_group = 0
    append_group(t, i)
    t.num_groups += 1
    if is_checked():
        close_group()


@compiled
def is_satisfied(thread: int, n: int, reads: int) -> int:
    """Whether all but the n latest groups are done; reads: have read their source."""
    t = threads(thread)
    while t.oldest_group != 0 and groups(t.oldest_group).writes == 0:
        i = t.oldest_group
        t.oldest_group = groups(i).next
        t.num_groups -= 1
        give_group(i)
    if t.oldest_group == 0:
        t.latest_group = 0
    i = t.oldest_group
    for _ in range(t.num_groups - n):
        if (groups(i).reads if reads else groups(i).writes) != 0:
            return 0
        i = groups(i).next
    return 1


@compiled
def wait_group(n: int, reads: int) -> None:
    step()
    thread = run(0).current
    t = threads(thread)
    if not is_satisfied(thread, n, reads):
        t.wanted, t.wanted_reads = n + 1, reads
        park()
    if is_checked():
        waited(n, reads)


@compiled
def progress(thread: int) -> None:
    t = threads(thread)
    if t.wanted != 0 and is_satisfied(thread, t.wanted - 1, t.wanted_reads):
        t.wanted = 0
        make_runnable(thread)


@compiled
def leave_groups(thread: int) -> None:
    """A thread leaves. What still reads shared memory is an error; what still writes frees its group at its end."""
    t = threads(thread)
    for i in each_group(t.oldest_group):
        leave_group(i)
    if t.open_group != 0:
        leave_group(t.open_group)
    t.oldest_group = t.latest_group = t.open_group = 0


@register_jitable
def leave_group(i):
    if groups(i).reads != 0:
        fault(state.UNREAD, 0)
    if groups(i).writes == 0:
        give_group(i)
    else:
        groups(i).next = ORPHAN


@compiled
def fence_proxy() -> None:
    """Order ordinary stores to shared memory before the copies that follow."""
    step()
    t = threads(run(0).current)
    blocks(t.block).proxy_fences += 1
    t.fenced = blocks(t.block).proxy_fences
    if is_checked():
        fence_proxies(run(0).current, 1)


@compiled
def fence_proxy_global() -> None:
    """Order global memory that this thread has seen before the copies that follow: checked by `checked` alone."""
    step()
    if is_checked():
        fence_proxies(run(0).current, 0)
