"""Who has accessed which bytes, for `checked`: what `models.knowledge` keeps of memory, compiled.

For 16 bytes of memory there are 16 of *notes*: the last stores, the loads since, and what strong stores have stored
over; and after how many more loads the list of these is looked through.

 0             a list is empty
 an epoch < 0  one weak access to all 16 bytes, in that epoch
 a row > 0     of `accesses`, the latest first

Rows of weak accesses are used again. Those of strong ones are not: who observes a store stays its observer.
"""

from __future__ import annotations

from numba.extending import register_jitable

from .knowledge import drop, epochs, knowledge, knows, minds, number_of, owners, resolve
from .schedule import launches, run, threads
from .state import MOST_STAMPS, MOST_THREADS
from .words import address, compiled, free_list, get_s32, linked, put_s32, rows, unused

accesses, observers, messages, overwritten = rows("accesses"), rows("observers"), rows("messages"), rows("overwritten")
stamps = rows("stamps")
told_at = address("messages")  # whose first fields are what is known by somebody
take_access, give_access = free_list("accesses")  # also of strong loads: nobody observes those
take_message, give_message = free_list("messages")
take_group, give_group = free_list("overwritten")
unused_observer = unused("observers")
each_access, each_group = linked("accesses"), linked("overwritten")
each_observer, each_successor = linked("observers"), linked("accesses", "successor")

LOADS, OVER, MORE_LOADS = 4, 8, 12  # where they are in notes; stores come first
FEW_LOADS = 32
MANY_STORES = 64  # as `models.knowledge` has it
RANGE = 0x7FF  # of `where`: the first byte, the one behind the last << 5, and 1024 if there are more in the next 16
WHOLE = 16 << 5
NUM_TOLD = 11  # fields of a message


@register_jitable
def where_of(low, high, reach):
    return low | high << 5 | reach << 11


@register_jitable
def reach_of(where):
    return where >> 11


@register_jitable
def overlap(a, b):
    return (a & 31) < ((b >> 5) & 31) and (b & 31) < ((a >> 5) & 31)


@register_jitable
def is_partial(a, b):
    return (a ^ b) & RANGE != 0 or a & 1024 != 0


@register_jitable
def is_left(old, new):
    """Whether an access is to other bytes, too."""
    return (old & 31) < (new & 31) or ((old >> 5) & 31) > ((new >> 5) & 31)


# --- rows --------------------------------------------------------------------------------------------------------


@compiled
def new_access(epoch: int, where: int, following: int) -> int:
    a = take_access()
    here = accesses(a)
    here.epoch, here.where, here.next = epoch, where, following
    return a


@compiled
def free_message(i: int) -> None:
    """Nobody reads the value of a store any more."""
    if i != 0:
        for place in range(told_at(i), told_at(i) + 4 * NUM_TOLD, 4):
            drop(get_s32(place))
            put_s32(place, 0)
        give_message(i)


@register_jitable
def drop_message(a):
    free_message(accesses(a).message)
    accesses(a).message = 0


@register_jitable
def drop_store(a):
    drop_message(a)
    if reach_of(accesses(a).where) == 0:
        give_access(a)


@compiled
def forget_list(first: int) -> None:
    for a in each_access(first):
        drop_store(a)


@compiled
def forget(notes: int, number: int) -> None:
    """Memory is gone: so are the notes of these many bytes."""
    for p in range(notes, notes + number, 16):
        if get_s32(p) != 0 or get_s32(p + LOADS) != 0 or get_s32(p + OVER) != 0:
            forget_list(get_s32(p))
            for a in each_access(get_s32(p + LOADS)):
                give_access(a)
            for group in each_group(get_s32(p + OVER)):
                forget_list(overwritten(group).first)
                give_group(group)
            for field in (0, LOADS, OVER):
                put_s32(p + field, 0)


# --- what is noted -----------------------------------------------------------------------------------------------


@register_jitable
def is_by(epoch, other):
    """Whether two epochs are of one thread, or of its copy engine."""
    a, b = epochs(resolve(epoch)), epochs(resolve(other))
    return a.owner == b.owner and a.lane == b.lane


@register_jitable
def as_list(notes):
    """The list of loads or stores, all of it in rows."""
    a = get_s32(notes)
    if a < 0:
        a = new_access(-a, WHOLE, 0)
        put_s32(notes, a)
    return a


@register_jitable
def is_covered(who, earlier, where):
    """Whether all that races with a load also races with a later access by `who`, who knows of the load."""
    if reach_of(where) == 0:
        return not is_left(accesses(earlier).where, where)
    return (
        reach_of(where) <= reach_of(accesses(earlier).where)
        and not is_partial(accesses(earlier).where, where)
        and owners(minds(who).owner).rank == owners(epochs(accesses(earlier).epoch).owner).rank
    )


@compiled
def remember_load(who: int, notes: int, where: int, epoch: int) -> None:
    first = get_s32(notes + LOADS)
    if where == WHOLE and (first == 0 or (first < 0 and (first == -epoch or is_by(-first, epoch)))):
        put_s32(notes + LOADS, -epoch)
        return
    a = as_list(notes + LOADS)
    for _ in range(FEW_LOADS):
        if a == 0:
            break
        here = accesses(a)
        if here.where == where and (here.epoch == epoch or is_by(here.epoch, epoch)):
            here.epoch = epoch
            return
        a = here.next
    put_s32(notes + LOADS, new_access(epoch, where, get_s32(notes + LOADS)))
    more = get_s32(notes + MORE_LOADS)
    if more == 1:
        more = look_through(who, get_s32(notes + LOADS))
    put_s32(notes + MORE_LOADS, more - 1 if more > 1 else 2 * FEW_LOADS)


@register_jitable
def is_repeated(a):
    """Whether one like this access, by the same thread, has been asked for since `stamps_round` changed."""
    here = epochs(resolve(accesses(a).epoch))
    key = (here.owner << 7 | here.lane) << 16 | accesses(a).where
    place = (key * 0x9E3779B97F4A7C1) >> 40
    for i in range(8):
        stamp = stamps((place + i) & (MOST_STAMPS - 1))
        if stamp.round != run(0).stamps_round:
            stamp.round, stamp.key = run(0).stamps_round, key
            return False
        if stamp.key == key:
            return True
    return False


@compiled
def look_through(who: int, first: int) -> int:
    """Of the loads behind the first one, forget older ones of the same threads, and those that whoever knows of the
    first one knows of: its kernel knew of them when it started. How many loads may come before the next look.
    """
    run(0).stamps_round += 1
    is_repeated(first)
    known = knowledge(launches(threads(who).launch).known).loads if who < MOST_THREADS else 0
    number, kept = 1, first
    for a in each_access(accesses(first).next):
        here = epochs(resolve(accesses(a).epoch))
        is_old = here.number != 0 and here.number <= number_of(known, owners(here.owner).stream)
        if is_repeated(a) or (is_old and is_covered(who, a, accesses(first).where)):
            give_access(a)
        else:
            accesses(kept).next = a
            kept = a
            number += 1
    accesses(kept).next = 0
    return max(number, 2 * FEW_LOADS)


@register_jitable
def remember_store(who, notes, where, epoch):
    """Make a store the last one to its bytes; its row, if it is strong.

    Who races with what is there before races with a weak store, too. With a strong one it may do what it may not do
    with others: so those stay, and loads that its thread does not know of, or whose scope is smaller.
    """
    if where == WHOLE:
        if get_s32(notes) > 0 or get_s32(notes + LOADS) > 0 or get_s32(notes + OVER) != 0:
            forget(notes, 16)
        put_s32(notes + LOADS, 0)
        put_s32(notes, -epoch)
        return 0
    return store_over(who, notes, where, epoch)


@compiled
def store_over(who: int, notes: int, where: int, epoch: int) -> int:
    reach = reach_of(where)
    # The loads
    last = 0  # the row of none: there stands where the list of those that stay begins
    for a in each_access(as_list(notes + LOADS)):
        here = accesses(a)
        stays = is_left(here.where, where)
        if not stays and reach != 0:
            stays = not is_covered(who, a, where) or not knows(who, here.epoch, 1)
        if stays:
            accesses(last).next = a
            last = a
        else:
            give_access(a)
    accesses(last).next = 0
    put_s32(notes + LOADS, accesses(0).next)
    if reach == 0 and get_s32(notes + OVER) != 0:
        take_overwritten(notes, where)
    # The stores
    new = new_access(epoch, where, 0)
    last = new
    for a in each_access(as_list(notes)):
        if is_left(accesses(a).where, where):
            accesses(last).next = a
            last = a
        elif reach != 0:
            drop_message(a)
            overwrite(notes, a)
        else:
            drop_store(a)
    accesses(last).next = 0
    put_s32(notes, new)
    return new


@register_jitable
def place_of(owner, reach):
    """Those for whom it is the same may meet if both reach so far."""
    return owners(owner).block if reach == 1 else owners(owner).rank if reach == 2 else 0


@compiled
def overwrite(notes: int, a: int) -> None:
    """A strong store has stored over a store: keep it with those to the same bytes by those nearby."""
    where = accesses(a).where
    at = place_of(epochs(accesses(a).epoch).owner, reach_of(where))
    group = get_s32(notes + OVER)
    while group != 0 and (overwritten(group).where != where or overwritten(group).at != at):
        group = overwritten(group).next
    if group == 0:
        group = take_group()
        g = overwritten(group)
        g.where, g.at, g.first, g.count, g.limit = where, at, 0, 0, MANY_STORES
        g.next = get_s32(notes + OVER)
        put_s32(notes + OVER, group)
    g = overwritten(group)
    accesses(a).next = g.first
    g.first = a
    g.count += 1
    if g.count >= g.limit:
        thin_out(group)


@compiled
def thin_out(group: int) -> None:
    """Of those that are older than the latest 32, keep the last one of each thread to the same bytes."""
    g = overwritten(group)
    last = g.first
    for _ in range(MANY_STORES // 2 - 1):
        last = accesses(last).next
    number = MANY_STORES // 2
    run(0).stamps_round += 1
    for a in each_access(accesses(last).next):
        if is_repeated(a):
            drop_store(a)
        else:
            accesses(last).next = a
            last = a
            number += 1
    accesses(last).next = 0
    g.count = number
    g.limit = max(MANY_STORES, 2 * number)


@compiled
def take_overwritten(notes: int, where: int) -> None:
    """A weak store takes the bytes of some that were stored over."""
    before = 0
    for group in each_group(get_s32(notes + OVER)):
        if is_left(overwritten(group).where, where):
            overwritten(before).next = group
            before = group
        else:
            forget_list(overwritten(group).first)
            give_group(group)
    overwritten(before).next = 0
    put_s32(notes + OVER, overwritten(0).next)


@compiled
def last_to(notes: int, where: int) -> int:
    """Of the last stores, the one whose value these bytes are: a row; 0 if they are of another size, or all weak."""
    for a in each_access(get_s32(notes)):
        if overlap(accesses(a).where, where):
            return 0 if is_partial(accesses(a).where, where) else a
    return 0


@compiled
def observe(store: int, epoch: int) -> None:
    """One has read the value of a strong store: from its next release on it tells of that store, too."""
    o = unused_observer()
    observers(o).epoch, observers(o).next = epoch, accesses(store).observed
    accesses(store).observed = o
