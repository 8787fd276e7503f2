"""Whether two accesses race, for `checked`: `models.races`, compiled."""

from __future__ import annotations

from numba.extending import register_jitable

from .knowledge import distance, epochs, is_fenced, is_told, knowledge, knows, minds, resolve
from .notes import (
    LOADS,
    OVER,
    accesses,
    each_access,
    each_group,
    each_observer,
    each_successor,
    is_partial,
    observers,
    overlap,
    overwritten,
    place_of,
    reach_of,
)
from .schedule import launches, threads
from .words import compiled, get_s32


@compiled
def is_observed(who: int, store: int) -> int:
    """Whether one who has read the value of a strong store is `who`, or is known to it."""
    for a in each_successor(store):
        for o in each_observer(accesses(a).observed):
            if knows(who, observers(o).epoch, 0):
                return 1
    return 0


@register_jitable
def knows_access(who, a, is_load):
    """Whether somebody can know of an access, or of one who has read what it stored."""
    if knows(who, accesses(a).epoch, is_load):
        return True
    return not is_load and reach_of(accesses(a).where) != 0 and is_observed(who, a) != 0


@register_jitable
def may_not_meet(who, where, a):
    """Whether an access and one of a list need an order."""
    other = accesses(a).where
    return overlap(where, other) and (
        is_partial(where, other) or min(reach_of(where), reach_of(other)) < distance(who, accesses(a).epoch)
    )


@compiled
def races_in(who: int, first: int, where: int, is_load: int) -> int:
    """Whether an access races with one of a list."""
    if first < 0:
        return not knows(who, -first, is_load)
    for a in each_access(first):
        if may_not_meet(who, where, a) and not knows_access(who, a, is_load):
            return 1
    return 0


@compiled
def conflict(who: int, notes: int, where: int, is_store: int) -> int:
    """Whether an access races with an earlier one."""
    if races_in(who, get_s32(notes), where, 0):
        return 1
    for group in each_group(get_s32(notes + OVER)):
        g = overwritten(group)
        reach = reach_of(g.where)
        is_met = reach != 0 and reach_of(where) >= reach and place_of(minds(who).owner, reach) == g.at
        if overlap(g.where, where) and (not is_met or is_partial(g.where, where)):
            if races_in(who, g.first, where, 0):
                return 1
    return is_store and races_in(who, get_s32(notes + LOADS), where, 1)


@compiled
def copy_races_in(who: int, first: int, is_load: int, is_proxys: int, is_shared: int) -> int:
    """Whether a bulk copy races with one of a list. is_proxys: a proxy fence must be between, too"""
    if first < 0:
        return not (knows(who, -first, is_load) and (not is_proxys or is_fenced(who, -first, is_load, is_shared)))
    for a in each_access(first):
        if not knows_access(who, a, is_load) or (is_proxys and not is_access_fenced(who, a, is_load, is_shared)):
            return 1
    return 0


@compiled
def copy_conflict(who: int, notes: int, is_store: int, is_shared: int) -> int:
    """Whether a bulk copy, which somebody starts, of 16 bytes races with an earlier access."""
    is_proxys = is_shared or not is_store
    if copy_races_in(who, get_s32(notes), 0, is_proxys, is_shared):
        return 1
    for group in each_group(get_s32(notes + OVER)):
        if copy_races_in(who, overwritten(group).first, 0, 0, is_shared):
            return 1
    return is_store and copy_races_in(who, get_s32(notes + LOADS), 1, is_proxys, is_shared)


@compiled
def is_access_fenced(who: int, access: int, is_load: int, is_shared: int) -> int:
    """Whether a proxy fence is behind an access, or behind one who has read the value of a store."""
    if is_fenced(who, accesses(access).epoch, is_load, is_shared):
        return 1
    if not is_load:
        for a in each_successor(access):
            for o in each_observer(accesses(a).observed):
                if is_fenced(who, observers(o).epoch, 0, is_shared):
                    return 1
    return 0


@compiled
def is_changed(thread: int, notes: int, where: int) -> int:
    """Whether bytes that are read as constant may have changed since the thread's kernel began."""
    known = knowledge(launches(threads(thread).launch).known).stores
    first = get_s32(notes)
    if first < 0:
        return is_beyond(known, -first)
    for a in each_access(first):
        if overlap(where, accesses(a).where) and is_beyond(known, accesses(a).epoch):
            return 1
    return 0


@register_jitable
def is_beyond(known, epoch):
    here = epochs(resolve(epoch))
    return here.number == 0 or not is_told(known, here.owner, here.number)
