"""What mbarriers tell, and bulk copies checked, for `checked`: the first half of `models.checked`, compiled."""

from __future__ import annotations

from numba.extending import register_jitable

from .knowledge import (
    OF_COPY,
    drop,
    epochs,
    join,
    joined,
    keep,
    know,
    loading,
    minds,
    new_epoch,
    owners,
    put_knowledge,
    signal,
    slot_of,
    storing,
)
from .notes import LOADS, OVER, WHOLE, remember_load, remember_store
from .races import copy_conflict
from .schedule import fault, launches, run, threads
from .signals import (
    OF_CTA,
    at_reach,
    blocks,
    bulk_groups,
    bulks,
    copies,
    fences_at,
    mbarriers,
    note_load,
    note_store,
    segments,
    take_heard,
    tell,
)
from .state import RACE, UNREAD
from .words import appending, compiled, free_list, get_s32, linked

take_bulk, give_bulk = free_list("bulks")
take_bulk_group, give_bulk_group = free_list("bulk_groups")
each_bulk, each_bulk_group = linked("bulks"), linked("bulk_groups")
append_group = appending("bulk_groups")


@register_jitable
def note_mbarrier(where, stores):
    notes = blocks(threads(run(0).current).block).notes
    if stores:
        note_store(notes, where, 8, 0, 0)
    else:
        note_load(notes, where, 8, OF_CTA)


@compiled
def begin_mbarrier(i: int) -> None:
    m = mbarriers(i)
    drop(m.told)
    drop(m.phase_told)
    m.told = m.phase_told = m.there = m.done = 0


@compiled
def tell_mbarrier(i: int, where: int) -> None:
    """The running thread arrives."""
    note_mbarrier(where, 0)
    who = run(0).current
    number = signal(who, 1)
    mbarriers(i).told = tell(joined(mbarriers(i).told, minds(who).known), slot_of(who), number)


@compiled
def end_phase(i: int) -> None:
    m = mbarriers(i)
    drop(m.phase_told)
    m.phase_told = keep(m.told)
    for bulk in each_bulk(m.there):
        bulks(bulk).next = m.done
        m.done = bulk
    m.there = 0


@compiled
def hear_phase(i: int, where: int) -> None:
    """A phase is over: this thread knows what those knew who arrived in it, and what the copies have done."""
    note_mbarrier(where, 0)
    r, m = run(0), mbarriers(i)
    r.signals += 1
    for bulk in each_bulk(m.done):
        epochs(bulks(bulk).load).number = epochs(bulks(bulk).store).number = r.signals
        slot = owners(epochs(bulks(bulk).load).owner).slot
        m.phase_told = tell(m.phase_told, slot, r.signals)
        m.told = tell(m.told, slot, r.signals)
        give_bulk(bulk)
    m.done = 0
    know(r.current, join(minds(r.current).known, m.phase_told))


@compiled
def note_copy(c: int, is_load: int) -> None:
    """A copy starts: check what it will do, and remember it, as the copy engine's until somebody waits for it."""
    r, it = run(0), copies(c)
    who = r.current
    m = minds(who)
    outside, inside = segments(it.segment).notes + it.where, blocks(it.block).notes + it.smem
    source, target = (outside, inside) if is_load else (inside, outside)
    if not r.has_failed:
        check_copy(who, source, it.number, 0, 1 - is_load)
        check_copy(who, target, it.number, 1, is_load)
    bulk = take_bulk()
    bulks(bulk).load = new_epoch(m.engine, m.lane | OF_COPY)
    bulks(bulk).store = new_epoch(m.engine, m.lane | OF_COPY)
    for i in range(0, it.number, 16):
        remember_load(who, source + i, WHOLE, bulks(bulk).load)
        remember_store(who, target + i, WHOLE, bulks(bulk).store)
    if is_load:
        it.bulk = bulk
    else:
        bulks(bulk).next = m.open
        m.open = bulk


@compiled
def check_copy(who: int, notes: int, number: int, is_store: int, is_shared: int) -> None:
    last = 0
    for here in range(notes, notes + number, 16):
        first = get_s32(here)
        if first == last and get_s32(here + OVER) == 0 and (first == 0 or first < 0):
            if not is_store or get_s32(here + LOADS) == 0:
                continue  # as the 16 bytes before
        last = first
        if copy_conflict(who, here, is_store, is_shared):
            fault(RACE, here - notes)


@compiled
def copy_is_there(c: int) -> None:
    """The bytes of a bulk load."""
    m = mbarriers(copies(c).goal)
    bulks(copies(c).bulk).next = m.there
    m.there = copies(c).bulk


@register_jitable
def new_bulk_group(first):
    g = take_bulk_group()
    bulk_groups(g).first, bulk_groups(g).next = first, 0
    return g


@compiled
def close_group() -> None:
    m = minds(run(0).current)
    append_group(m, new_bulk_group(m.open))
    m.open = 0
    m.num_groups += 1


@compiled
def waited(n: int, reads: int) -> None:
    """What the copy engine has done is as if this thread had done it."""
    who = run(0).current
    m = minds(who)
    if reads:
        g = m.first
        for _ in range(m.num_groups - n):
            for bulk in each_bulk(bulk_groups(g).first):
                take_over_load(who, bulk)
            g = bulk_groups(g).next
        return
    while m.num_groups > n:
        g = m.first
        for bulk in each_bulk(bulk_groups(g).first):
            take_over_load(who, bulk)
            epochs(bulks(bulk).store).same = storing(who)
            give_bulk(bulk)
        m.first = bulk_groups(g).next
        give_bulk_group(g)
        m.num_groups -= 1
    if m.first == 0:
        m.last = 0


@register_jitable
def take_over_load(who, bulk):
    if bulks(bulk).load != 0:
        epochs(bulks(bulk).load).same = loading(who)
        bulks(bulk).load = 0


@compiled
def depart() -> None:
    """A thread leaves its kernel. Copies for which it has not waited are over when that is."""
    who = run(0).current
    m, t = minds(who), threads(run(0).current)
    launch = launches(t.launch)
    if m.open != 0 or m.first != 0:
        new = new_bulk_group(m.open)
        bulk_groups(new).next = m.first
        for g in each_bulk_group(new):
            for bulk in each_bulk(bulk_groups(g).first):
                if bulks(bulk).load != 0:
                    fault(UNREAD, 0)
            bulk_groups(g).owner, bulk_groups(g).lane = m.owner, m.lane
            bulk_groups(g).next = launch.left
            launch.left = g
    signal(who, 1)
    launch.learned = joined(launch.learned, m.known)
    take_heard(who, 0, 0, 3)
    know(who, 0)
    for reach in range(1, 4):
        put_knowledge(at_reach(fences_at(who), reach), 0)


@compiled
def end_copies(number: int) -> None:
    """A launch is done, and so are copies for which no thread has waited."""
    launch = launches(number)
    last_owner, last_lane = 0, -1
    for g in each_bulk_group(launch.left):
        owner, lane = bulk_groups(g).owner, bulk_groups(g).lane
        for bulk in each_bulk(bulk_groups(g).first):
            if owner != last_owner or lane != last_lane:
                run(0).signals += 1
                last_owner, last_lane = owner, lane
            e = epochs(bulks(bulk).store)
            e.owner, e.lane, e.number = owner, lane | OF_COPY, run(0).signals
            give_bulk(bulk)
        give_bulk_group(g)
    launch.left = 0
