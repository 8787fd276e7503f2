"""Stores on their way, for `delayed`, and who knows of those that have arrived: `models.pending`, compiled.

Rows of `stores` are stores and atomics on their way, each with its row of `versions`, which stays when it has arrived.
Those of 16 bytes are linked, oldest first: see `granules`.
"""

from __future__ import annotations

from numba.extending import register_jitable

from . import state, words
from .access import changed_by, mark_written, write
from .cells import notify, value_at
from .schedule import HUB, launches, operate, proceed, random_word, run, stop, threads, threads_at
from .signals import ACQUIRE, REACH
from .state import FULL_TABLE, MOST_OPERATIONS, MOST_THREADS
from .words import address, compiled, copy_bytes, fill_bytes, get_s32, get_s64, linked, put_s32, rows

segments, blocks = rows("segments"), rows("blocks")
versions, stores, queues, knowing = map(rows, ("versions", "stores", "queues", "knowing"))
granules, GRANULE_BYTES = rows("granules", by_address=True), state.TABLES["granules"].dtype.itemsize
versions_at, seen_at = address("versions"), address("seen")  # the first fields of a version are bytes
take_version, give_version = words.free_list("versions")
take_store, give_store = words.free_list("stores")
each_version, append_version = linked("versions"), words.appending("versions", "next", "oldest", "newest")
each_store, (append_store, remove_store) = linked("stores"), words.linked_twice("stores", "after", "before")
heard_at = address("knowing", "heard1")  # by reach, 1 to 3
copy = words.declared("copy", None, int)
KEPT = 8  # versions of 16 bytes in memory
NO_ATOMIC = -1
EVERYBODY, NOBODY = -1, -2  # in place of a thread
OF_BLOCKS = 2 * MOST_THREADS  # where queues of blocks begin
OF_RANKS = OF_BLOCKS + state.MOST_WARPS


@register_jitable
def granule_at(segment, offset):
    return segment.notes + (offset >> 4) * GRANULE_BYTES


@register_jitable
def new_version(thread, offset, size, reach):
    r, t = run(0), threads(thread)
    v = take_version()
    x = versions(v)
    r.num_versions += 1
    x.number = r.num_versions
    x.rank, x.block, x.thread_idx = t.rank, blocks(t.block).serial, t.thread_idx
    x.begin, x.end = offset & 15, (offset & 15) + size
    x.reach, x.says = reach, knowing(thread).released if reach else 0
    x.seen1 = x.seen2 = x.seen3 = 0
    return v


@register_jitable
def keep(v, segment, offset):
    """Keep the 16 bytes that a version is about to change."""
    low = offset & ~15
    size = min(16, segment.size - low)
    copy_bytes(versions_at(v), segment.memory + low, size)
    fill_bytes(versions_at(v) + 16, 1, 16)
    if segment.shadow != 0:
        copy_bytes(versions_at(v) + 16, segment.shadow + low, size)


@register_jitable
def be_there(g, v):
    """A version is in memory now, for everybody."""
    run(0).moment += 1
    moment, x = run(0).moment, versions(v)
    x.seen1, x.seen2, x.seen3 = x.seen1 or moment, x.seen2 or moment, x.seen3 or moment
    if g.count == KEPT:
        oldest = g.oldest
        g.oldest = versions(oldest).next
        give_version(oldest)
    else:
        g.count += 1
    append_version(g, v)


@register_jitable
def knows(thread, v):
    """Whether no load of a thread may miss a version that it sees."""
    x, t, mine = versions(v), threads(thread), knowing(thread)
    if x.block == blocks(t.block).serial:
        return x.thread_idx == t.thread_idx or x.seen1 <= max(mine.floor, mine.block_floor)
    return (x.seen2 if x.rank == t.rank else x.seen3) <= mine.floor


@register_jitable
def heard_within(thread, reach):
    """Where it is what a thread has read by strong accesses so far, of those whose scope reaches so far."""
    return heard_at(thread) + 4 * (reach - 1)


@register_jitable
def note_release(mine):
    """A thread releases what it knows: its later strong stores say that, too."""
    mine.released_floor, mine.released = mine.floor, run(0).moment


@compiled
def hear_store(thread: int, granule: int, count: int, offset: int, size: int, how: int) -> int:
    """A strong access has read bytes, in which the first versions of `seen` are: what they say."""
    r, t, mine, g = run(0), threads(thread), knowing(thread), granules(granule)
    begin, reach = offset & 15, (how >> REACH) & 3
    away, said = 1, versions(g.oldest).seen3 if g.count == KEPT else 0  # of what is forgotten
    for i in range(count):
        x = versions(get_s32(seen_at(i)))
        if x.begin < begin + size and begin < x.end:
            away = 1 if x.block == blocks(t.block).serial else 2 if x.rank == t.rank else 3
            said = x.says if min(x.reach, reach) >= away else 0
    if count == 0 and g.signal:
        said, away = r.moment, 3
    if how & ACQUIRE:
        mine.floor = max(mine.floor, said, get_s32(heard_within(thread, reach)))
        return said
    for level in range(away, 4):
        place = heard_within(thread, level)
        put_s32(place, max(get_s32(place), said))
    return said


@register_jitable
def learn(thread, floor):
    mine = knowing(thread)
    mine.floor = max(mine.floor, floor)
    mine.block_floor = max(mine.block_floor, run(0).moment)


@compiled
def see(granule: int, thread: int) -> int:
    """Put into `seen` the versions in memory, oldest first, and those on their way that a thread sees: how many."""
    g, count = granules(granule), 0
    for v in each_version(g.oldest):
        put_s32(seen_at(count), v)
        count += 1
    for i in each_store(g.pending if thread != NOBODY else 0):
        if thread == EVERYBODY or sees(thread, i):
            put_s32(seen_at(count), stores(i).version)
            count += 1
    return count


# --- stores on their way -----------------------------------------------------------------------------------------


@register_jitable
def below(number):
    """As `Run.early.randrange(number)`."""
    shift = 32
    while number >> (32 - shift):
        shift -= 1
    word = number
    while word >= number:
        word = random_word(1) >> shift
    return word


@register_jitable
def move(i, q):
    """Take a store out of the queue in which it is, and put it into another one; 0: none."""
    if stores(i).queue != 0:
        remove_store(queues(stores(i).queue), i)
    stores(i).queue = q
    if q != 0:
        append_store(queues(q), i)


@register_jitable
def sees(thread, i):
    """Whether a store that is not in memory yet is visible to a thread."""
    x, t = stores(i), threads(thread)
    if x.thread == thread or x.level == 0:
        return x.thread == thread
    return threads(x.thread).block == t.block or (x.level >= 2 and threads(x.thread).rank == t.rank)


@compiled
def new_store(thread: int, s: int, where: int, size: int, reach: int, op: int, low: int, high: int) -> int:
    """A store or an atomic is on its way: behind those to its 16 bytes that its thread sees."""
    i, t = take_store(), threads(thread)
    x = stores(i)
    x.thread, x.segment, x.where, x.size, x.op, x.low, x.high = thread, s, where, size, op, low, high
    x.version = new_version(thread, where, size, reach)
    x.granule = granule_at(segments(s), where)
    x.level = x.done = x.queue = 0
    g = granules(x.granule)
    least = most = 0
    for other in each_store(g.pending):
        most += 1
        if sees(thread, other):
            least = most
    place = least if least == most else least + below(most - least + 1)
    if place == 0:
        x.next, g.pending = g.pending, i
    else:
        before = g.pending
        for _ in range(place - 1):
            before = stores(before).next
        x.next, stores(before).next = stores(before).next, i
    move(i, 2 * thread + (op != NO_ATOMIC))
    launches(t.launch).copies += 1
    blocks(t.block).copies += 1
    return i


@compiled
def commit(i: int) -> None:
    """Write a store to memory, after the earlier ones to its 16 bytes."""
    r = run(0)
    g = granules(stores(i).granule)
    while stores(i).done == 0:
        arrive(g.pending)
        if r.operating and r.event != 0 and stores(i).done == 0:
            r.unfinished = i
            return


@compiled
def arrive(i: int) -> None:
    r, x = run(0), stores(i)
    t, segment, g = threads(x.thread), segments(x.segment), granules(x.granule)
    launch = t.launch
    g.pending = x.next
    x.done = 1
    move(i, 0)
    launches(launch).copies -= 1
    blocks(t.block).copies -= 1
    if segment.is_freed:
        give_version(x.version)
    else:
        low = x.low
        if x.op != NO_ATOMIC:
            version = versions(x.version)
            low = changed_by(x.op, value_at(segment.memory + x.where, x.size), low, x.high)
            count = see(x.granule, NOBODY)
            said = hear_store(x.thread, x.granule, count, x.where, x.size, version.reach << REACH)
            version.says = max(version.says, said)
        keep(x.version, segment, x.where)
        be_there(g, x.version)
        write(segment.memory + x.where, x.size, low, x.high)
        if segment.shadow != 0:
            mark_written(segment.shadow + x.where, x.size)
        g.arriving += 1
        notify(segment.group << 32 | x.where, x.size)
        g.arriving -= 1
    if launches(launch).copies or launches(launch).live or launches(launch).is_done or r.event == state.STOPPED:
        return
    if r.event != 0 or r.operating > 1:  # of two launches, or while an operation looks at what a thread sees
        stop(FULL_TABLE, launch, r.current)
        return
    r.event, r.event_arg = state.COPIES_DONE, launch  # Python ends the launch at once
    if not r.operating:
        r.resumes = 1
        words.switch_stacks(threads_at(r.current), get_s64(threads_at(HUB)))


@compiled
def come(what: int) -> int:
    """An operation happens. Whether it is a store that has arrived before"""
    run(0).operating = 1
    i, had_come = what - MOST_OPERATIONS, 0
    if i < 0:
        copy(what)
    else:
        had_come = stores(i).done
        commit(i)
        if stores(i).done:
            give_store(i)
    run(0).operating = 0
    return had_come


@compiled
def drain() -> None:
    """Let operations happen, each in a batch of steps, until somebody can run, or Python has something to do."""
    r = run(0)
    operate()
    while r.event == 0 and r.num_operations > 0 and r.num_runnable + r.num_slow == 0:
        proceed(1)
        r.event = 0
        operate()


@compiled
def perform(thread: int, group: int) -> None:
    """Let those atomics of a thread arrive that are on their way to a group of cells; 0: all."""
    r = run(0)
    outer, r.operating = r.operating, 2 * r.operating
    i = queues(2 * thread + 1).first
    while i != 0:
        if group == 0 or segments(stores(i).segment).group == group:
            commit(i)
            i = queues(2 * thread + 1).first
        else:
            i = stores(i).after
        if r.operating and r.event != 0:
            break
    r.operating = outer


@compiled
def publish(level: int) -> None:
    """Lift this thread's stores, and what its block and rank have published below that level, to a level."""
    thread = run(0).current
    block, rank = threads(thread).block, OF_RANKS + threads(thread).rank
    if queues(2 * thread).first != 0 or queues(2 * thread + 1).first != 0:
        perform(thread, 0)
        lift(2 * thread, 1, OF_BLOCKS + block)
    if level >= 2 and queues(OF_BLOCKS + block).first != 0:
        lift(OF_BLOCKS + block, 2, rank)
    if level >= 3:
        while queues(rank).first != 0:
            commit(queues(rank).first)


@register_jitable
def lift(source, level, target):
    run(0).moment += 1
    moment = run(0).moment
    while queues(source).first != 0:
        i = queues(source).first
        x = stores(i)
        move(i, target)
        x.level = level
        version = versions(x.version)
        version.seen1 = version.seen1 or moment
        if level == 2:
            version.seen2 = moment
        notify(segments(x.segment).group << 32 | x.where, x.size)
