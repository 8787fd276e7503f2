"""Which thread has signalled which, for `checked`, and each access checked: `models.signals` and `checked`, compiled.

Functions of the machine call these where `is_checked`, as classes of those modules call theirs.
"""

from __future__ import annotations

from numba.extending import register_jitable

from .knowledge import (
    BULK_GROUPS,
    BULKS,
    HEARD,
    MESSAGES,
    OF_COPY,
    copy_vector,
    distance,
    drop,
    drop_vector,
    epochs,
    join,
    joined,
    keep,
    keep_vector,
    know,
    knowledge,
    knows,
    lanes_known_at,
    later,
    loading,
    minds,
    new_epoch,
    new_knowledge,
    number_of,
    owners,
    pools,
    said_by_others,
    signal,
    slot_of,
    storing,
    used,
    vector_at,
    vectors,
    with_number,
    with_signal,
)
from .races import (
    LOADS,
    OVER,
    WHOLE,
    accesses,
    conflict,
    copy_conflict,
    free_message,
    is_changed,
    knows_store,
    last_to,
    may_not_meet,
    messages,
    observe,
    overlap,
    overwritten,
    reach_of,
    remember_load,
    remember_store,
    where_of,
)
from .schedule import fault, launches, run, threads
from .state import MOST_KNOWLEDGE, RACE, UNREAD
from .words import address, compiled, get_s32, get_s64, put_s32, rows

segments, blocks, barriers, collectives = rows("segments"), rows("blocks"), rows("barriers"), rows("collectives")
mbarriers, copies, warps = rows("mbarriers"), rows("copies"), rows("warps")
heard, bulks, bulk_groups = rows("heard"), rows("bulks"), rows("bulk_groups")
values_at = address("values")

# How memory is accessed: a bit or two for what `access` looks at, then the reach, 0 for a weak access, and the order
CONSTANT, REACH, ACQUIRE, RELEASE = 2, 2, 16, 32
OF_CTA = 1 << REACH


# --- accesses ----------------------------------------------------------------------------------------------------


@compiled
def note_load(notes: int, offset: int, size: int, how: int) -> None:
    """The running thread has loaded: check it, and remember it."""
    r = run(0)
    here = notes + (offset & ~15)
    where = where_of(offset & 15, (offset & 15) + size, (how >> REACH) & 3)
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
    where = where_of(offset & 15, (offset & 15) + size, (how >> REACH) & 3)
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
    hear(run(0).current, notes + (offset & ~15), where_of(offset & 15, (offset & 15) + size, (how >> REACH) & 3), how)
    note_store(notes, offset, size, how, 1)


@register_jitable
def new_message():
    i = pools(MESSAGES).free
    if i != 0:
        pools(MESSAGES).free = messages(i).next
    else:
        i = used(MESSAGES, MOST_KNOWLEDGE)
    return i


@register_jitable
def add_part(i, reach, k):
    """Let a message tell more; takes over the use."""
    m = messages(i)
    if reach == 1:
        m.part1 = joined(m.part1, k)
    elif reach == 2:
        m.part2 = joined(m.part2, k)
    else:
        m.part3 = joined(m.part3, k)
    drop(k)


@compiled
def send(who: int, store: int, how: int, old: int, before: int, is_atomic: int) -> None:
    """What a strong store tells. old, before: the last store of its size, and what that told

    An atomic passes that on. A release tells all that its thread knows, others what it knew at its last fence, and at
    its last release to this cell: those are the message's `own`.
    """
    reach = reach_of(accesses(store).where)
    number = signal(who, how & RELEASE)
    m = minds(who)
    i = new_message()
    message = messages(i)
    accesses(store).message = i
    if before != 0 and knows_itself(who, accesses(old).epoch):
        theirs = messages(before)
        message.own1, message.own2, message.own3 = keep(theirs.own1), keep(theirs.own2), keep(theirs.own3)
    if how & RELEASE:
        now = with_signal(m.known, slot_of(who), number)
        if reach == 1:
            drop(message.own1)
            message.own1 = keep(now)
        elif reach == 2:
            drop(message.own2)
            message.own2 = keep(now)
        else:
            drop(message.own3)
            message.own3 = keep(now)
        add_part(i, reach, now)
    else:
        loads = with_number(knowledge(m.known).loads, slot_of(who), number)
        add_part(i, reach, new_knowledge(0, 0, loads, 0, 0))
        add_part(i, 1, keep(m.fence1))
        add_part(i, min(2, reach), keep(m.fence2))
        add_part(i, reach, keep(m.fence3))
        add_part(i, 1, keep(message.own1))
        add_part(i, min(2, reach), keep(message.own2))
        add_part(i, reach, keep(message.own3))
    if is_atomic and before != 0 and reach >= distance(who, accesses(old).epoch):
        add_part(i, 1, keep(messages(before).part1))
        add_part(i, min(2, reach), keep(messages(before).part2))
        add_part(i, reach, keep(messages(before).part3))


@register_jitable
def knows_itself(who, epoch):
    here, m = epochs(epoch), minds(who)
    return here.owner == m.owner and here.lane == m.lane


@compiled
def said(i: int, needed: int) -> int:
    """What a message tells a thread that is so far away: a proxy fence of another block says nothing."""
    m = messages(i)
    kept = m.heard1 if needed == 1 else m.heard2 if needed == 2 else m.heard3
    if kept != 0:
        return kept
    k = keep(m.part3)
    if needed <= 2:
        k = joined(k, m.part2)
    if needed == 1:
        k = joined(k, m.part1)
        m.heard1 = k
        return k
    mine = said_by_others(k)
    drop(k)
    if needed == 2:
        m.heard2 = mine
    else:
        m.heard3 = mine
    return mine


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
            stores, engine = keep_vector(x.stores), keep_vector(x.engine)
            know(who, new_knowledge(stores, engine, loads, keep_vector(x.shared), keep_vector(x.read)))
    if store != 0 and reach >= needed and reach_of(accesses(store).where) >= needed and not knows_store(who, store):
        observe(store, storing(who))


@register_jitable
def add_heard(who, notes, where, needed, k):
    h = minds(who).heard
    while h != 0:
        it = heard(h)
        if it.place == notes and it.where == where & 0x7FF and it.needed == needed:
            it.known = joined(it.known, k)
            return
        h = it.next
    h = pools(HEARD).free
    if h != 0:
        pools(HEARD).free = heard(h).next
    else:
        h = used(HEARD, MOST_KNOWLEDGE)
    it = heard(h)
    it.place, it.where, it.needed, it.known, it.next = notes, where & 0x7FF, needed, keep(k), minds(who).heard
    minds(who).heard = h


@compiled
def take_heard(who: int, notes: int, where: int, reach: int) -> None:
    """Acquire what relaxed loads have met that came from so far away: of one cell, or of any if notes is 0."""
    h, last = minds(who).heard, 0
    while h != 0:
        it = heard(h)
        after = it.next
        if it.needed <= reach and (notes == 0 or (it.place == notes and it.where == where & 0x7FF)):
            know(who, join(minds(who).known, it.known))
            drop(it.known)
            if last != 0:
                heard(last).next = after
            else:
                minds(who).heard = after
            it.next = pools(HEARD).free
            pools(HEARD).free = h
        else:
            last = h
        h = after


@compiled
def note_fence(reach: int) -> None:
    who = run(0).current
    m = minds(who)
    if m.heard != 0:
        take_heard(who, 0, 0, reach)
    now = with_signal(m.known, slot_of(who), signal(who, 1))
    if reach == 1:
        drop(m.fence1)
        m.fence1 = now
    elif reach == 2:
        drop(m.fence2)
        m.fence2 = now
    else:
        drop(m.fence3)
        m.fence3 = now


# --- where threads meet ------------------------------------------------------------------------------------------


@register_jitable
def telling(told, who, latest):
    """What those who meet know with one more. latest: what the one before knew"""
    k = minds(who).known
    return told if k == latest else joined(told, k)


@compiled
def tell(told: int, slot: int, number: int) -> int:
    """The same with a signal; takes over the use, and changes what nobody else has."""
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
    here.told = telling(here.told, r.current, here.latest)
    if here.latest != minds(r.current).known:
        drop(here.latest)
        here.latest = keep(minds(r.current).known)
    here.told = tell(here.told, slot_of(r.current), r.signals)


@compiled
def conclude_barrier(b: int, last: int) -> None:
    """All are there: what those know who wait, and the last one if it does."""
    here = barriers(b)
    thread = here.first
    while thread != 0:
        learn_at_barrier(thread, here.told)
        thread = threads(thread).next
    if last != 0:
        learn_at_barrier(last, here.told)
    drop(here.told)
    drop(here.latest)
    here.told = here.latest = 0


@register_jitable
def learn_at_barrier(who, told):
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
        for i in range(32):
            if (here.mask >> i) & 1:
                warp_known = max(warp_known, minds(w.first + i).warp_known)
        for j in range(32):
            number = get_s64(values_at(c * 32 + j)) if (here.mask >> j) & 1 else 0
            for i in range(32):
                if (here.mask >> i) & 1 and minds(w.first + i).has_lanes:
                    number = max(number, get_s32(lanes_known_at((w.first + i) * 32 + j)))
            for i in range(32):
                # The others' are read for the lanes that follow: those of j are read already.
                if (here.mask >> i) & 1:
                    put_s32(lanes_known_at((w.first + i) * 32 + j), number)
    for i in range(32):
        if (here.mask >> i) & 1:
            m = minds(w.first + i)
            if m.known != here.told:
                know(w.first + i, keep(here.told))
            m.warp_known = warp_known
            m.has_lanes = 0 if is_all else 1
    drop(here.told)
    here.told = 0


# --- mbarriers and bulk copies -----------------------------------------------------------------------------------


@register_jitable
def note_mbarrier(where, stores):
    notes = blocks(threads(run(0).current).block).races
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
        free_bulk(bulk)
    know(r.current, join(minds(r.current).known, m.phase_told))


@register_jitable
def free_bulk(bulk):
    bulks(bulk).next = pools(BULKS).free
    pools(BULKS).free = bulk


@compiled
def note_copy(c: int, is_load: int) -> None:
    """A copy starts: check what it will do, and remember it, as the copy engine's until somebody waits for it."""
    r, it = run(0), copies(c)
    who = r.current
    m = minds(who)
    outside, inside = segments(it.segment).races + it.where, blocks(it.block).races + it.smem
    source, target = (outside, inside) if is_load else (inside, outside)
    if not r.has_failed:
        check_copy(who, source, it.number, 0, 1 - is_load)
        check_copy(who, target, it.number, 1, is_load)
    bulk = pools(BULKS).free
    if bulk != 0:
        pools(BULKS).free = bulks(bulk).next
    else:
        bulk = used(BULKS, MOST_KNOWLEDGE)
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
    g = pools(BULK_GROUPS).free
    if g != 0:
        pools(BULK_GROUPS).free = bulk_groups(g).next
    else:
        g = used(BULK_GROUPS, MOST_KNOWLEDGE)
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
            free_bulk(bulk)
            bulk = after
        m.first = bulk_groups(g).next
        bulk_groups(g).next = pools(BULK_GROUPS).free
        pools(BULK_GROUPS).free = g
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
            free_bulk(bulk)
            bulk = after
        bulk_groups(g).next = pools(BULK_GROUPS).free
        pools(BULK_GROUPS).free = g


# --- hosts -------------------------------------------------------------------------------------------------------
# A host's vectors are its own: they change in place.

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
    """A host reads: the epoch of an access with which that races, or 0."""
    reach = 0 if how == READS else 3
    e = 0 if how == LOOKS else host_epoch(who)
    for here in range(offset & ~15, offset + number, 16):
        where = part_of(here, offset, offset + number, reach)
        found = conflict(who, notes + here, where, 0)
        if found != 0:
            return found
        a = get_s32(notes + here) if how == POLLS else 0
        while a > 0:
            if overlap(accesses(a).where, where) and not knows_store(who, a):
                observe(a, host_epoch(who))
            a = accesses(a).next
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
    """A host writes: the epoch of an access with which that races, or 0."""
    reach = 3 if number <= 8 else 0
    for here in range(offset & ~15, offset + number, 16):
        found = conflict(who, notes + here, part_of(here, offset, offset + number, reach), 1)
        if found != 0:
            return found
    e = host_epoch(who)
    for here in range(offset & ~15, offset + number, 16):
        a = remember_store(who, notes + here, part_of(here, offset, offset + number, reach), e)
        if reach != 0 and here <= offset:
            i = new_message()
            accesses(a).message = i
            x = knowledge(minds(who).known)
            messages(i).part3 = new_knowledge(copy_vector(x.stores), 0, copy_vector(x.loads), 0, 0)
    return 0


@compiled
def remains(who: int, notes: int, number: int, rank: int) -> int:
    """Memory is given up: the epoch of an access to it that a host cannot know of. rank: whose; -2 for all"""
    for here in range(notes, notes + number, 16):
        if get_s32(here) != 0 or get_s32(here + LOADS) != 0 or get_s32(here + OVER) != 0:
            found = conflict(who, here, WHOLE, 1) if rank == -2 else unknown_of(who, here, rank)
            if found != 0:
                return found
    return 0


@register_jitable
def unknown_of(who, here, rank):
    found = unknown_in(who, get_s32(here), rank, 0)
    if found == 0:
        found = unknown_in(who, get_s32(here + LOADS), rank, 1)
    group = get_s32(here + OVER)
    while found == 0 and group != 0:
        found = unknown_in(who, overwritten(group).first, rank, 0)
        group = overwritten(group).next
    return found


@compiled
def unknown_in(who: int, first: int, rank: int, is_load: int) -> int:
    if first < 0:
        return -first if owners(epochs(-first).owner).rank == rank and not knows(who, -first, is_load) else 0
    a = first
    while a != 0:
        e = accesses(a).epoch
        if owners(epochs(e).owner).rank == rank and not knows(who, e, is_load) and (is_load or not knows_store(who, a)):
            return e
        a = accesses(a).next
    return 0
