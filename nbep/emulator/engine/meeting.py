"""Where threads meet: collectives of a warp and barriers of a block, and what happens when a thread leaves.

`machine.warp` and `machine.block`, compiled. The last lane at a collective works out the results of all.
"""

from __future__ import annotations

from numba.extending import register_jitable

from .cells import forget_polled, unwatch
from .copies import leave_groups
from .copy_signals import depart
from .delayed import come_to_meet
from .knowledge import drop, joined, minds, signal
from .pending import knowing, learn
from .schedule import each_waiting, fault, lanes_of, make_runnable, park, run, step, threads
from .signals import come_to_barrier, conclude_warp, learn_at_barrier
from .state import BLOCK_LEFT, DIVERGED, NEVER_FULL, NUM_BARRIERS, NUM_COLLECTIVES
from .words import address, appending, compiled, get_s64, is_checked, is_delayed, put_s64, rows

warps, collectives, blocks, barriers = rows("warps"), rows("collectives"), rows("blocks"), rows("barriers")
values_at = address("values")
append_waiting = appending("threads")

SHFL_IDX, SHFL_XOR, SHFL_UP, SHFL_DOWN, ANY, ALL, BALLOT, SYNC, SAME, MATCH, MATCH_ALL = range(11)
NOT_BROUGHT = -1


@register_jitable
def shfl_source(name, lane, operand):
    if name == SHFL_IDX:
        return operand & 31
    source = lane ^ operand if name == SHFL_XOR else lane - operand if name == SHFL_UP else lane + operand
    return source if 0 <= source < 32 else lane


@register_jitable
def find_collective(warp, mask, name, site, t):
    """Where lanes of a mask meet: others wait there, or this one is the first."""
    w = warps(warp)
    begin = warp * NUM_COLLECTIVES
    found = free = begin + w.end
    for c in range(begin, begin + w.end):
        if collectives(c).mask == mask:
            found = c
            break
        if collectives(c).mask == 0:
            free = c
    here = collectives(found)
    if found < begin + w.end:
        if here.name != name or (here.site != site and not blocks(t.block).by_ptx):
            fault(DIVERGED, mask)
        return found
    if mask <= 0 or mask >> w.num_lanes or not (mask >> t.lane) & 1:
        fault(DIVERGED, mask)
    if mask & w.exited and not blocks(t.block).by_ptx:
        fault(DIVERGED, mask)
    here = collectives(free)
    here.mask, here.missing = mask, mask & ~w.exited
    here.name, here.site, here.first, here.last = name, site, 0, 0
    here.brought = NOT_BROUGHT
    w.num_pending += 1
    w.end = max(w.end, free - begin + 1)
    return free


@register_jitable
def check_others(warp, found, lane):
    """Does a lane wait for lanes that wait for it?"""
    w = warps(warp)
    for c in range(warp * NUM_COLLECTIVES, warp * NUM_COLLECTIVES + w.end):
        other = collectives(c)
        if c != found and other.mask != 0 and (other.missing >> lane) & 1:
            if other.mask & ~other.missing & collectives(found).missing:
                fault(DIVERGED, other.mask)


@compiled
def lanes_with(mask: int, values: int, value: int) -> int:
    """The lanes that pass a value."""
    lanes = 0
    for i in lanes_of(mask):
        if get_s64(values + 8 * i) == value:
            lanes |= 1 << i
    return lanes


@compiled
def work_out(c: int, warp: int) -> None:
    """The results of all lanes of a full collective."""
    here, w = collectives(c), warps(warp)
    name, mask, values = here.name, here.mask & ~w.exited, values_at(c * 32)
    ballot = lanes_with(mask, values, 0) ^ mask
    for i in lanes_of(mask):
        t = threads(w.first + i)
        if name <= SHFL_DOWN:
            source = t.result
            t.lost = (mask >> source) & 1 ^ 1
            t.result = get_s64(values + 8 * source)
        elif name == ANY:
            t.result = ballot != 0
        elif name == ALL:
            t.result = ballot == mask
        elif name == BALLOT:
            t.result = ballot
        elif name == SAME:
            t.result = ballot == 0 or ballot == mask
        elif name >= MATCH:
            same = lanes_with(mask, values, get_s64(values + 8 * i))
            t.result = same if name == MATCH or same == mask else 0


@compiled
def bring(c: int, warp: int) -> None:
    """Wake the lanes that a collective misses and that are parked at a cell."""
    here = collectives(c)
    if here.brought == NOT_BROUGHT:
        here.brought = 0
    first = warps(warp).first
    for i in lanes_of(here.missing & ~here.brought):
        if threads(first + i).polling:
            here.brought |= 1 << i
            threads(first + i).has_news = 0
            unwatch(first + i)


@compiled
def is_missed(thread: int) -> int:
    """Whether a lane that is about to park is to come to a collective first."""
    t = threads(thread)
    begin = t.warp * NUM_COLLECTIVES
    for c in range(begin, begin + warps(t.warp).end):
        here = collectives(c)
        if here.mask != 0 and here.brought != NOT_BROUGHT and ((here.missing & ~here.brought) >> t.lane) & 1:
            here.brought |= 1 << t.lane
            return 1
    return 0


@compiled
def conclude(c: int, warp: int) -> None:
    """All lanes are there for which a collective waits."""
    here, w = collectives(c), warps(warp)
    work_out(c, warp)
    if is_checked() and here.name == SYNC:
        conclude_warp(c, warp)
    if is_delayed() and here.name == SYNC:
        for i in lanes_of(here.mask):
            knowing(w.first + i).told = here.told
        here.told = 0
    release(here.first)
    here.mask = 0
    w.num_pending -= 1
    begin = warp * NUM_COLLECTIVES
    while w.end > 0 and collectives(begin + w.end - 1).mask == 0:
        w.end -= 1


@compiled
def collect(name: int, mask: int, value: int, operand: int, site: int) -> int:
    """Wait in a collective for the other lanes of `mask`; this lane's result."""
    thread = run(0).current
    t = threads(thread)
    t.empty_spins = 0
    passed = value
    if is_checked() and name == SYNC:
        passed = signal(thread, 1)
    if is_delayed() and name == SYNC:
        come_to_meet()
    step()
    w = warps(t.warp)
    c = find_collective(t.warp, mask, name, site, t)
    here = collectives(c)
    if w.num_pending > 1:
        check_others(t.warp, c, t.lane)
    put_s64(values_at(c * 32 + t.lane), passed)
    if is_checked() and name == SYNC and here.told != minds(thread).known:
        here.told = joined(here.told, minds(thread).known)
    if is_delayed() and name == SYNC:
        here.told = max(here.told, knowing(thread).floor)
    if name <= SHFL_DOWN:
        t.result = shfl_source(name, t.lane, operand)
    here.missing ^= 1 << t.lane
    if here.missing != 0:
        append_waiting(here, thread)
        if t.has_news:
            t.has_news = 0
            bring(c, t.warp)
        park()
    else:
        conclude(c, t.warp)
    if is_delayed() and name == SYNC:
        learn(thread, knowing(thread).told)
    if t.lost:
        fault(DIVERGED, mask)
    return t.result


@compiled
def release(first: int) -> None:
    """Make runnable who has waited, in the order of arrival."""
    for thread in each_waiting(first):
        make_runnable(thread)


@register_jitable
def absent(block, here):
    """How many threads have left for which a barrier does not wait."""
    return block.num_threads - block.live if block.by_ptx and here.expected == block.num_threads else 0


@register_jitable
def pass_barrier(thread, here, result):
    threads(thread).result = result
    if is_delayed():
        knowing(thread).told = here.told
    if is_checked():
        learn_at_barrier(thread, here.told)


@compiled
def fill(block: int, number: int, last: int) -> None:
    """Let those go on who wait at a barrier, and tell them how many predicates hold. last: who fills it, if it waits"""
    here = barriers(block * NUM_BARRIERS + number)
    result = here.holds | (here.arrived - here.holds) << 32
    here.arrived = 0
    blocks(block).phase += 1
    for waiting in each_waiting(here.first):
        pass_barrier(waiting, here, result)
    if last != 0:
        pass_barrier(last, here, result)
    if here.passed:
        for i in range(blocks(block).num_threads):
            threads(blocks(block).first + i).passed &= ~(1 << number)
    if is_checked():
        drop(here.told)
        drop(here.latest)
        here.told = here.latest = 0
    release(here.first)


@register_jitable
def check_site(t, site):
    """Lanes of a warp come to the same barrier of a kernel."""
    w, phase = warps(t.warp), blocks(t.block).phase + 1
    if w.phase != phase:
        w.phase, w.site = phase, site
    elif w.site != site:
        fault(DIVERGED, site)


@compiled
def meet(number: int, expected: int, waits: int, predicate: int, site: int) -> int:
    """Come to a barrier; if this thread waits, whether the predicates of all hold.

    waits: 2 for how many hold, and << 32 how many do not, 3 for whether it has come first; site: of the call, 0 if all
    may come to different ones
    """
    thread = run(0).current
    t = threads(thread)
    if site != 0:
        check_site(t, site)
    if waits:
        t.empty_spins = 0
    if is_checked():
        signal(thread, 1)
    if is_delayed():
        come_to_meet()
    step()
    block = blocks(t.block)
    if number < 0 or number >= NUM_BARRIERS:
        fault(NEVER_FULL, number)
    here = barriers(t.block * NUM_BARRIERS + number)
    if here.arrived == 0:
        if expected != t.block_dim and not (expected < t.block_dim and expected % 32 == 0):
            fault(NEVER_FULL, number)
        here.expected = expected
        here.first = here.last = here.waiting = here.passed = here.told = here.holds = 0
    elif here.expected != expected or (t.passed >> number) & 1:
        fault(DIVERGED, number)
    is_first = here.arrived == 0
    here.arrived += 1
    here.holds += predicate
    if is_checked():
        come_to_barrier(t.block * NUM_BARRIERS + number)
    if is_delayed():
        here.told = max(here.told, knowing(thread).floor)
    if here.arrived + absent(block, here) == expected:
        fill(t.block, number, thread if waits else 0)
    else:
        wait_at(t, number, waits)
    if is_delayed() and waits:
        learn(thread, knowing(thread).told)
    return is_first if waits == 3 else t.result if waits == 2 else t.result >> 32 == 0


@register_jitable
def wait_at(t, number, waits):
    """Wait for those who have not come; or go on, if this thread does not wait."""
    here = barriers(t.block * NUM_BARRIERS + number)
    if waits:
        append_waiting(here, run(0).current)
        here.waiting += 1
    else:
        t.passed |= 1 << number
        here.passed += 1
    if blocks(t.block).live < blocks(t.block).num_threads:
        check_barrier(t.block, number)
    if waits:
        park()


@register_jitable
def check_barrier(block, number):
    """Stop the run when the threads still alive cannot fill a barrier."""
    here = barriers(block * NUM_BARRIERS + number)
    b = blocks(block)
    if here.arrived + b.live - here.waiting < here.expected - absent(b, here):
        fault(NEVER_FULL, number)


@compiled
def leave() -> None:
    """A thread has returned from the kernel."""
    r = run(0)
    t = threads(r.current)
    if is_checked():
        depart()
    leave_groups(r.current)
    t.exited = 1
    forget_polled()
    r.has_changed = 1
    block, w = blocks(t.block), warps(t.warp)
    block.live -= 1
    w.exited |= 1 << t.lane
    for c in range(t.warp * NUM_COLLECTIVES, t.warp * NUM_COLLECTIVES + w.end):
        here = collectives(c)
        if here.mask != 0 and (here.missing >> t.lane) & 1:
            if not block.by_ptx:
                fault(DIVERGED, here.mask)
            here.missing ^= 1 << t.lane
            if here.missing == 0:
                conclude(c, t.warp)
    for number in range(NUM_BARRIERS):
        barrier = barriers(t.block * NUM_BARRIERS + number)
        if barrier.arrived != 0:
            if block.live != 0 and barrier.arrived + absent(block, barrier) == barrier.expected:
                fill(t.block, number, 0)
            else:
                check_barrier(t.block, number)
    if block.live == 0:
        r.event = BLOCK_LEFT
        r.event_arg = t.block
    park()
