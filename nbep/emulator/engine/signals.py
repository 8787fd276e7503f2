"""Which thread has signalled which, for `checked`, and each access checked: `models.signals` and `checked`, compiled.

Functions of the machine call these where `is_checked`, as classes of those modules call theirs.
"""

from __future__ import annotations

from numba.extending import register_jitable

from .knowledge import (
    LOADS,
    distance,
    drop,
    drop_vector,
    epochs,
    join,
    joined,
    keep,
    know,
    knowledge,
    lanes_known_at,
    later,
    loading,
    minds,
    new_knowledge,
    number_of,
    owners,
    parts_at,
    put_knowledge,
    put_vector,
    said_by_others,
    same,
    signal,
    slot_of,
    storing,
    vector_at,
    vectors,
    with_number,
    with_signal,
)
from .notes import (
    accesses,
    free_message,
    last_to,
    messages,
    observe,
    reach_of,
    remember_load,
    remember_store,
    take_message,
    where_of,
)
from .races import conflict, is_changed, knows_access, may_not_meet
from .schedule import fault, lanes_of, run
from .state import RACE
from .words import address, compiled, free_list, get_s32, get_s64, linked, put_s32, rows

segments, blocks, barriers, collectives = rows("segments"), rows("blocks"), rows("barriers"), rows("collectives")
mbarriers, copies, warps = rows("mbarriers"), rows("copies"), rows("warps")
heard, bulks, bulk_groups = rows("heard"), rows("bulks"), rows("bulk_groups")
values_at = address("values")
take_heard_row, give_heard_row = free_list("heard")
each_heard = linked("heard")
# What threads and messages know by reach, 1 to 3, in fields one behind the other
parts_of_messages, own_at, said_at = (address("messages", name) for name in ("part1", "own1", "heard1"))
fences_at = address("minds", "fence1")

# How memory is accessed: a bit or two for what `access` looks at, then the reach, 0 for a weak access, and the order
CONSTANT, REACH, ACQUIRE, RELEASE = 2, 2, 16, 32
UNUSED, RETURNED = 64, 128  # of atomics: what is done with the result
OF_CTA = 1 << REACH


# --- accesses ----------------------------------------------------------------------------------------------------


@register_jitable
def place_in(offset, size, how):
    """An access, as it is noted of its 16 bytes."""
    return where_of(offset & 15, (offset & 15) + size, (how >> REACH) & 3)


@register_jitable
def at_reach(place, reach):
    """Of three fields, the one of a reach."""
    return place + 4 * (reach - 1)


@compiled
def note_load(notes: int, offset: int, size: int, how: int) -> None:
    """The running thread has loaded: check it, and remember it."""
    r = run(0)
    here = notes + (offset & ~15)
    where = place_in(offset, size, how)
    if not r.has_failed:
        if conflict(r.current, here, where, 0):
            fault(RACE, offset)
        if how & 3 == CONSTANT and is_changed(r.current, here, where):
            fault(RACE, offset)
    remember_load(r.current, here, where, loading(r.current))
    if how & 1:
        hear(r.current, here, where, how)


@compiled
def note_store(notes: int, offset: int, size: int, how: int, is_atomic: int) -> None:
    """The running thread has stored: check it, and remember it with what it tells."""
    r = run(0)
    who = r.current
    here = notes + (offset & ~15)
    where = place_in(offset, size, how)
    if not r.has_failed and conflict(who, here, where, 1):
        fault(RACE, offset)
    if reach_of(where) == 0:
        remember_store(who, here, where, storing(who))
        return
    old, message = last_to(here, where), 0
    if old != 0:
        message = accesses(old).message
        accesses(old).message = 0
    may_meet = old != 0 and not may_not_meet(who, where, old)
    new = remember_store(who, here, where, storing(who))
    if is_atomic and may_meet:
        accesses(old).successor = new
    send(who, new, how, old, message, is_atomic)
    free_message(message)


@compiled
def note_atomic(notes: int, offset: int, size: int, how: int, has_written: int) -> None:
    if not has_written:
        note_load(notes, offset, size, how | 1)
        return
    hear(run(0).current, notes + (offset & ~15), place_in(offset, size, how), how)
    note_store(notes, offset, size, how, 1)


@register_jitable
def add_part(i, reach, k):
    """Let a message tell more; takes over the use."""
    place = at_reach(parts_of_messages(i), reach)
    put_s32(place, joined(get_s32(place), k))
    drop(k)


@register_jitable
def add_parts(i, reach, place):
    """Let a message tell more, of each reach, but none farther than its own."""
    for part in range(1, 4):
        add_part(i, min(part, reach), keep(get_s32(at_reach(place, part))))


@compiled
def send(who: int, store: int, how: int, old: int, before: int, is_atomic: int) -> None:
    """What a strong store tells. old, before: the last store of its size, and what that told

    An atomic passes that on. A release tells all that its thread knows, others what it knew at its last fence, and at
    its last release to this cell: those are the message's `own`.
    """
    reach = reach_of(accesses(store).where)
    number = signal(who, how & RELEASE)
    m = minds(who)
    i = take_message()
    accesses(store).message = i
    if before != 0 and knows_itself(who, accesses(old).epoch):
        for part in range(1, 4):
            put_s32(at_reach(own_at(i), part), keep(get_s32(at_reach(own_at(before), part))))
    if how & RELEASE:
        now = with_signal(m.known, slot_of(who), number)
        put_knowledge(at_reach(own_at(i), reach), keep(now))
        add_part(i, reach, now)
    else:
        loads = with_number(knowledge(m.known).loads, slot_of(who), number)
        add_part(i, reach, new_knowledge(0, 0, loads, 0, 0))
        add_parts(i, reach, fences_at(who))
        add_parts(i, reach, own_at(i))
    if is_atomic and before != 0 and reach >= distance(who, accesses(old).epoch):
        add_parts(i, reach, parts_of_messages(before))


@register_jitable
def knows_itself(who, epoch):
    here, m = epochs(epoch), minds(who)
    return here.owner == m.owner and here.lane == m.lane


@compiled
def said(i: int, needed: int) -> int:
    """What a message tells a thread that is so far away: a proxy fence of another block says nothing."""
    place = at_reach(said_at(i), needed)
    if get_s32(place) == 0:
        k = keep(messages(i).part3)
        for reach in range(2, needed - 1, -1):
            k = joined(k, get_s32(at_reach(parts_of_messages(i), reach)))
        if needed > 1:
            whole = k
            k = said_by_others(whole)
            drop(whole)
        put_s32(place, k)
    return get_s32(place)


@compiled
def hear(who: int, notes: int, where: int, how: int) -> None:
    """A strong access has read a cell, and this is what it tells.

    It observes a store of the same size alone: others are not morally strong with it, and tell it nothing.
    """
    m = minds(who)
    store = last_to(notes, where)
    if m.last_store == store and m.last_place == notes and m.last_how == (where << 6 | how):
        return  # a poll that finds what the last one has found
    m.last_store, m.last_place, m.last_how = store, notes, where << 6 | how
    reach = reach_of(where)
    needed, message = 0, 0
    if store != 0:
        needed = distance(who, accesses(store).epoch)
        if reach >= needed:
            message = accesses(store).message
    if how & ACQUIRE:
        if message != 0:
            it = messages(message)
            if it.before != m.known or it.reach != needed:
                after = join(m.known, said(message, needed))
                drop(it.before)
                drop(it.after)
                it.before, it.reach, it.after = keep(m.known), needed, after
            know(who, keep(it.after))
        if m.heard != 0:
            take_heard(who, notes, where, reach)
    elif message != 0:
        k = said(message, needed)
        if knowledge(k).stores != 0:  # else an acquire would tell nothing more than the loads, which are known at once
            add_heard(who, notes, where, needed, k)
        x = knowledge(m.known)
        loads = later(x.loads, knowledge(k).loads)
        if loads == x.loads:
            drop_vector(loads)
        else:
            now = same(m.known)
            put_vector(parts_at(now) + LOADS, loads)
            know(who, now)
    if store != 0 and reach >= needed and reach_of(accesses(store).where) >= needed and not knows_access(who, store, 0):
        observe(store, storing(who))


@compiled
def add_heard(who: int, notes: int, where: int, needed: int, k: int) -> None:
    for h in each_heard(minds(who).heard):
        it = heard(h)
        if it.place == notes and it.where == where & 0x7FF and it.needed == needed:
            it.known = joined(it.known, k)
            return
    new = take_heard_row()
    it = heard(new)
    it.place, it.where, it.needed, it.known, it.next = notes, where & 0x7FF, needed, keep(k), minds(who).heard
    minds(who).heard = new


@compiled
def take_heard(who: int, notes: int, where: int, reach: int) -> None:
    """Acquire what relaxed loads have met that came from so far away: of one cell, or of any if notes is 0."""
    last = 0  # the row of none: there stands where the list of those that stay begins
    for h in each_heard(minds(who).heard):
        it = heard(h)
        if it.needed <= reach and (notes == 0 or (it.place == notes and it.where == where & 0x7FF)):
            know(who, join(minds(who).known, it.known))
            drop(it.known)
            give_heard_row(h)
        else:
            heard(last).next = h
            last = h
    heard(last).next = 0
    minds(who).heard = heard(0).next


@compiled
def note_fence(reach: int) -> None:
    who = run(0).current
    m = minds(who)
    if m.heard != 0:
        take_heard(who, 0, 0, reach)
    put_knowledge(at_reach(fences_at(who), reach), with_signal(m.known, slot_of(who), signal(who, 1)))


# --- where threads meet ------------------------------------------------------------------------------------------


@compiled
def tell(told: int, slot: int, number: int) -> int:
    """What those who meet know, and a signal; takes over the use, and changes what nobody else has."""
    x = knowledge(told)
    if x.uses == 1 and x.stores != x.loads and vectors(x.stores).uses == 1 and vectors(x.loads).uses == 1:
        put_s32(vector_at(x.stores) + 4 * slot, max(number, number_of(x.stores, slot)))
        put_s32(vector_at(x.loads) + 4 * slot, max(number, number_of(x.loads, slot)))
        return told
    new = with_signal(told, slot, number)
    drop(told)
    return new


@compiled
def come_to_barrier(b: int) -> None:
    """The running thread is counted in."""
    r = run(0)
    here = barriers(b)
    known = minds(r.current).known
    if here.latest != known:
        here.told = joined(here.told, known)
        drop(here.latest)
        here.latest = keep(known)
    here.told = tell(here.told, slot_of(r.current), r.signals)


@compiled
def learn_at_barrier(who: int, told: int) -> None:
    know(who, keep(told))
    m = minds(who)
    stores, o = knowledge(told).stores, owners(m.owner)
    m.warp_known = max(number_of(stores, o.slot), number_of(stores, o.stream))
    m.has_lanes = 0


@compiled
def conclude_warp(c: int, warp: int) -> None:
    """All lanes of a syncwarp are there, and have left the numbers of their signals in its values."""
    here, w = collectives(c), warps(warp)
    is_all = here.mask == (1 << w.num_lanes) - 1
    warp_known = run(0).signals
    if not is_all:
        warp_known = 0
        for i in lanes_of(here.mask):
            warp_known = max(warp_known, minds(w.first + i).warp_known)
        for j in range(32):
            number = get_s64(values_at(c * 32 + j)) if (here.mask & ~w.exited) >> j & 1 else 0
            for i in lanes_of(here.mask):
                if minds(w.first + i).has_lanes:
                    number = max(number, get_s32(lanes_known_at((w.first + i) * 32 + j)))
            for i in lanes_of(here.mask):
                # The others' are read for the lanes that follow: those of j are read already.
                put_s32(lanes_known_at((w.first + i) * 32 + j), number)
    for i in lanes_of(here.mask):
        m = minds(w.first + i)
        if m.known != here.told:
            know(w.first + i, keep(here.told))
        m.warp_known = warp_known
        m.has_lanes = 0 if is_all else 1
    drop(here.told)
    here.told = 0
