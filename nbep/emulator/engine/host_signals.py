"""Hosts as readers and writers, for `checked`: `models.host`, compiled. Python calls these functions.

A host's vectors are its own: they change in place.
"""

from __future__ import annotations

from numba.extending import register_jitable

from .knowledge import (
    copy_vector,
    drop_vector,
    epochs,
    knowledge,
    knows,
    later,
    minds,
    new_epoch,
    new_knowledge,
    owners,
    slot_of,
    vector_at,
    vectors,
)
from .notes import (
    LOADS,
    OVER,
    WHOLE,
    accesses,
    each_access,
    each_group,
    last_to,
    messages,
    observe,
    overlap,
    overwritten,
    remember_load,
    remember_store,
    take_message,
    where_of,
)
from .races import conflict, knows_access
from .schedule import run
from .words import compiled, get_s32, put_s32

READS, POLLS, LOOKS = range(3)


@register_jitable
def host_signal(who):
    """What it does now is known to all that it queues or stores from now on."""
    r = run(0)
    r.signals += 1
    x = knowledge(minds(who).known)
    put_s32(vector_at(x.stores) + 4 * slot_of(who), r.signals)
    put_s32(vector_at(x.loads) + 4 * slot_of(who), r.signals)
    return r.signals


@register_jitable
def host_epoch(who):
    number = host_signal(who)
    e = new_epoch(minds(who).owner, 0)
    epochs(e).number = number
    return e


@register_jitable
def part_of(here, begin, end, reach):
    """The bytes of an access that are among 16. here: where those begin, as begin and end"""
    low, high = max(begin - here, 0), min(end - here, 16)
    is_more = reach != 0 and (begin < here or end > here + 16)
    return where_of(low, high, reach) | (1024 if is_more else 0)


@compiled
def host_load(who: int, notes: int, offset: int, number: int, how: int) -> int:
    """A host reads: whether that races with an access."""
    reach = 0 if how == READS else 3
    e = 0 if how == LOOKS else host_epoch(who)
    for here in range(offset & ~15, offset + number, 16):
        where = part_of(here, offset, offset + number, reach)
        if conflict(who, notes + here, where, 0):
            return 1
        for a in each_access(get_s32(notes + here) if how == POLLS else 0):
            if overlap(accesses(a).where, where) and not knows_access(who, a, 0):
                observe(a, host_epoch(who))
        if how != LOOKS:
            remember_load(who, notes + here, where, e)
    if how == POLLS:
        a = last_to(notes + (offset & ~15), part_of(offset & ~15, offset, offset + number, reach))
        if a != 0 and accesses(a).message != 0:
            host_learns(who, messages(accesses(a).message).part3)
    return 0


@register_jitable
def host_learns(who, k):
    x = knowledge(minds(who).known)
    stores, loads = later(x.stores, knowledge(k).stores), later(x.loads, knowledge(k).loads)
    drop_vector(x.stores)
    drop_vector(x.loads)
    x.stores, x.loads = own_vector(stores), own_vector(loads)


@register_jitable
def own_vector(v):
    if v != 0 and vectors(v).uses == 1:
        return v
    new = copy_vector(v)
    drop_vector(v)
    return new


@compiled
def host_store(who: int, notes: int, offset: int, number: int) -> int:
    """A host writes: whether that races with an access."""
    reach = 3 if number <= 8 else 0
    for here in range(offset & ~15, offset + number, 16):
        if conflict(who, notes + here, part_of(here, offset, offset + number, reach), 1):
            return 1
    e = host_epoch(who)
    for here in range(offset & ~15, offset + number, 16):
        a = remember_store(who, notes + here, part_of(here, offset, offset + number, reach), e)
        if reach != 0 and here <= offset:
            i = take_message()
            accesses(a).message = i
            x = knowledge(minds(who).known)
            messages(i).part3 = new_knowledge(copy_vector(x.stores), 0, copy_vector(x.loads), 0, 0)
    return 0


@compiled
def remains(who: int, notes: int, number: int, rank: int) -> int:
    """Memory is given up: whether a host cannot know of an access to it. rank: whose; -2 for all"""
    for here in range(notes, notes + number, 16):
        if get_s32(here) != 0 or get_s32(here + LOADS) != 0 or get_s32(here + OVER) != 0:
            if conflict(who, here, WHOLE, 1) if rank == -2 else is_unknown(who, here, rank):
                return 1
    return 0


@compiled
def is_unknown(who: int, here: int, rank: int) -> int:
    if unknown_in(who, get_s32(here), rank, 0) or unknown_in(who, get_s32(here + LOADS), rank, 1):
        return 1
    for group in each_group(get_s32(here + OVER)):
        if unknown_in(who, overwritten(group).first, rank, 0):
            return 1
    return 0


@compiled
def unknown_in(who: int, first: int, rank: int, is_load: int) -> int:
    if first < 0:
        return owners(epochs(-first).owner).rank == rank and not knows(who, -first, is_load)
    for a in each_access(first):
        if owners(epochs(accesses(a).epoch).owner).rank == rank and not knows_access(who, a, is_load):
            return 1
    return 0
