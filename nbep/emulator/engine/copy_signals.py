"""What mbarriers tell, and bulk copies checked, for `checked`: the first half of `models.checked`, compiled."""

from __future__ import annotations

from numba.extending import register_jitable

from .knowledge import (
    BULK_GROUPS,
    BULKS,
    OF_COPY,
    drop,
    epochs,
    free_list,
    join,
    joined,
    keep,
    know,
    loading,
    minds,
    new_epoch,
    owners,
    signal,
    slot_of,
    storing,
)
from .notes import (
    LOADS,
    OVER,
    WHOLE,
    remember_load,
    remember_store,
)
from .races import copy_conflict
from .schedule import fault, launches, run, threads
from .signals import (
    OF_CTA,
    blocks,
    bulk_groups,
    bulks,
    copies,
    mbarriers,
    note_load,
    note_store,
    segments,
    take_heard,
    tell,
)
from .state import MOST_KNOWLEDGE, RACE, UNREAD
from .words import compiled, get_s32

take_bulk, give_bulk = free_list(BULKS, bulks, MOST_KNOWLEDGE)
take_bulk_group, give_bulk_group = free_list(BULK_GROUPS, bulk_groups, MOST_KNOWLEDGE)


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
    while m.there != 0:
        bulk = m.there
        m.there = bulks(bulk).next
        bulks(bulk).next = m.done
        m.done = bulk


@compiled
def hear_phase(i: int, where: int) -> None:
    """A phase is over: this thread knows what those knew who arrived in it, and what the copies have done."""
    note_mbarrier(where, 0)
    r, m = run(0), mbarriers(i)
    r.signals += 1
    while m.done != 0:
        bulk = m.done
        m.done = bulks(bulk).next
        epochs(bulks(bulk).load).number = epochs(bulks(bulk).store).number = r.signals
        slot = owners(epochs(bulks(bulk).load).owner).slot
        m.phase_told = tell(m.phase_told, slot, r.signals)
        m.told = tell(m.told, slot, r.signals)
        give_bulk(bulk)
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
    g = new_bulk_group(m.open)
    m.open = 0
    if m.last != 0:
        bulk_groups(m.last).next = g
    else:
        m.first = g
    m.last = g
    m.num_groups += 1


@compiled
def waited(n: int, reads: int) -> None:
    """What the copy engine has done is as if this thread had done it."""
    who = run(0).current
    m = minds(who)
    if reads:
        g = m.first
        for _ in range(m.num_groups - n):
            bulk = bulk_groups(g).first
            while bulk != 0:
                take_over_load(who, bulk)
                bulk = bulks(bulk).next
            g = bulk_groups(g).next
        return
    while m.num_groups > n:
        g = m.first
        bulk = bulk_groups(g).first
        while bulk != 0:
            take_over_load(who, bulk)
            epochs(bulks(bulk).store).same = storing(who)
            after = bulks(bulk).next
            give_bulk(bulk)
            bulk = after
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
        g = new_bulk_group(m.open)
        bulk_groups(g).next = m.first
        while g != 0:
            bulk = bulk_groups(g).first
            while bulk != 0:
                if bulks(bulk).load != 0:
                    fault(UNREAD, 0)
                bulk = bulks(bulk).next
            bulk_groups(g).owner, bulk_groups(g).lane = m.owner, m.lane
            after = bulk_groups(g).next
            bulk_groups(g).next = launch.left
            launch.left = g
            g = after
    signal(who, 1)
    launch.learned = joined(launch.learned, m.known)
    take_heard(who, 0, 0, 3)
    know(who, 0)
    drop(m.fence1)
    drop(m.fence2)
    drop(m.fence3)


@compiled
def end_copies(number: int) -> None:
    """A launch is done, and so are copies for which no thread has waited."""
    launch = launches(number)
    last_owner, last_lane = 0, -1
    while launch.left != 0:
        g = launch.left
        launch.left = bulk_groups(g).next
        owner, lane = bulk_groups(g).owner, bulk_groups(g).lane
        bulk = bulk_groups(g).first
        while bulk != 0:
            if owner != last_owner or lane != last_lane:
                run(0).signals += 1
                last_owner, last_lane = owner, lane
            e = epochs(bulks(bulk).store)
            e.owner, e.lane, e.number = owner, lane | OF_COPY, run(0).signals
            after = bulks(bulk).next
            give_bulk(bulk)
            bulk = after
        give_bulk_group(g)
