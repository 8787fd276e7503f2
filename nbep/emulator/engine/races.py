"""Whether two accesses race, for `checked`: `models.races`, compiled."""

from __future__ import annotations

from numba.extending import register_jitable

from .knowledge import (
    distance,
    epochs,
    is_fenced,
    is_told,
    knowledge,
    knows,
    minds,
    resolve,
)
from .notes import (
    LOADS,
    MIXED,
    OVER,
    accesses,
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
    a = store
    while a != 0:
        o = accesses(a).observed
        while o != 0:
            if knows(who, observers(o).epoch, 0):
                return 1
            o = observers(o).next
        a = accesses(a).successor
    return 0


@register_jitable
def knows_store(who, a):
    return knows(who, accesses(a).epoch, 0) or (reach_of(accesses(a).where) != 0 and is_observed(who, a))


@register_jitable
def may_not_meet(who, where, a):
    """Whether an access and one of a list need an order."""
    other = accesses(a).where
    return overlap(where, other) and (
        is_partial(where, other) or min(reach_of(where), reach_of(other)) < distance(who, accesses(a).epoch)
    )


@compiled
def conflict(who: int, notes: int, where: int, is_store: int) -> int:
    """The epoch of an access with which this one races; 0 if there is none."""
    a = get_s32(notes)
    if a < 0 and not knows(who, -a, 0):
        return -a
    while a > 0:
        if may_not_meet(who, where, a) and not knows_store(who, a):
            return accesses(a).epoch
        a = accesses(a).next
    group = get_s32(notes + OVER)
    while group != 0:
        g = overwritten(group)
        is_met = g.reach != 0 and reach_of(where) >= g.reach and place_of(minds(who).owner, g.reach) == g.at
        if not is_met or g.where == MIXED or is_partial(g.where, where):
            a = g.first
            while a != 0:
                if may_not_meet(who, where, a) and not knows_store(who, a):
                    return accesses(a).epoch
                a = accesses(a).next
        group = g.next
    if is_store:
        a = get_s32(notes + LOADS)
        if a < 0 and not knows(who, -a, 1):
            return -a
        while a > 0:
            if may_not_meet(who, where, a) and not knows(who, accesses(a).epoch, 1):
                return accesses(a).epoch
            a = accesses(a).next
    return 0


@compiled
def copy_conflict(who: int, notes: int, is_store: int, is_shared: int) -> int:
    """The same of a bulk copy, which somebody starts, of 16 bytes. It must be behind a proxy fence, too."""
    is_proxys = is_shared or not is_store
    a = get_s32(notes)
    if a < 0 and not (knows(who, -a, 0) and (not is_proxys or is_fenced(who, -a, 0, is_shared))):
        return -a
    while a > 0:
        if not knows_store(who, a) or (is_proxys and not is_store_fenced(who, a, is_shared)):
            return accesses(a).epoch
        a = accesses(a).next
    group = get_s32(notes + OVER)
    while group != 0:
        a = overwritten(group).first
        while a != 0:
            if not knows_store(who, a):
                return accesses(a).epoch
            a = accesses(a).next
        group = overwritten(group).next
    if is_store:
        a = get_s32(notes + LOADS)
        if a < 0 and not (knows(who, -a, 1) and (not is_proxys or is_fenced(who, -a, 1, is_shared))):
            return -a
        while a > 0:
            e = accesses(a).epoch
            if not knows(who, e, 1) or (is_proxys and not is_fenced(who, e, 1, is_shared)):
                return e
            a = accesses(a).next
    return 0


@compiled
def is_store_fenced(who: int, store: int, is_shared: int) -> int:
    """Whether a proxy fence is behind a store, or behind one who has read its value."""
    if is_fenced(who, accesses(store).epoch, 0, is_shared):
        return 1
    a = store
    while a != 0:
        o = accesses(a).observed
        while o != 0:
            if is_fenced(who, observers(o).epoch, 0, is_shared):
                return 1
            o = observers(o).next
        a = accesses(a).successor
    return 0


@compiled
def is_changed(thread: int, notes: int, where: int) -> int:
    """Whether bytes that are read as constant may have changed since the thread's kernel began."""
    known = knowledge(launches(threads(thread).launch).known).stores
    a = get_s32(notes)
    if a < 0:
        return is_beyond(known, -a)
    while a > 0:
        if overlap(where, accesses(a).where) and is_beyond(known, accesses(a).epoch):
            return 1
        a = accesses(a).next
    return 0


@register_jitable
def is_beyond(known, epoch):
    here = epochs(resolve(epoch))
    return here.number == 0 or not is_told(known, here.owner, here.number)
