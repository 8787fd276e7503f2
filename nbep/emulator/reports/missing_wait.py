"""What a race is due to if not to a chain with flaws: a wait that is missing, or a signal that comes too soon.

A kernel tells other ranks something, and does not wait for what they tell it. A thread goes on where others of its
block still wait. Nobody waits for a bulk copy, or fences it from plain stores. A tail says one row more than has been
stored, or a reader goes beyond it: it loads again what it has loaded before, and the row comes a moment later.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from types import CodeType
from typing import TYPE_CHECKING

from ..machine.memory import Allocation
from ..machine.names import name_of
from ..machine.orders import ACQUIRES, RELEASES
from ..machine.source import Site, call_chain, describe_site, polling
from ..models.history import Loaded, ProxyFenced, Stored, Waited
from ..models.knowledge import Access, Owner
from .causes import Cause, Link
from .chains import Race, Way

if TYPE_CHECKING:
    from ..machine.block import Block
    from ..machine.thread import Thread
    from ..run import Run

_OF = {"atomic": "on", "load": "of", "store": "to"}


def wait_missing(world: Run, earlier: Access, access: Access) -> Cause | None:
    """That one of two ranks has gone on in a kernel, and has waited there for no thread.

    The other one has not left it yet: that is what the wait is for. One of the two accesses is of this kernel.
    """
    for ahead, behind in ((earlier, access), (access, earlier)):
        if ahead.owner.rank != behind.owner.rank and (signal := _signal_without_wait(world, ahead, behind.owner)):
            who, whom = name_of(ahead.owner.rank), name_of(behind.owner.rank)
            return Cause(
                "no wait", (signal.cell,), words={"kernel": signal.store.owner.kernel, "who": who, "whom": whom}
            )
    return None


def _signal_without_wait(world: Run, access: Access, behind: Owner) -> Stored | None:
    """The last signal to the memory of the one behind, by such a kernel. It tells all ranks, as a barrier does.

    access: of the one ahead. One with an order may be a signal itself: its kernel may wait after that. So may a later
    one, for a signal of the kernel that the other has not left
    """
    ahead = access.owner
    has_waited: set[tuple[str, int]] = set()
    loaded: set[tuple[Allocation, int]] = set()
    has_answered: set[tuple[str, int]] = set()
    signals: list[Stored] = []
    ranks: dict[object, set[int]] = {}  # that a line of a launch has signalled
    for event in reversed(world.history.between(0, world.history.now)):
        if isinstance(event, Loaded) and event.load.owner.rank == ahead.rank and event.load.order in ACQUIRES:
            has_waited.add((event.load.owner.kernel, event.load.owner.launch))
            loaded.add((event.allocation, event.load.begin))
        elif isinstance(event, Stored) and event.store.owner.rank == behind.rank and event.store.order in RELEASES:
            if (event.allocation, event.store.begin) in loaded:
                has_answered.add((event.store.owner.kernel, event.store.owner.launch))
        elif isinstance(event, Stored) and event.store.owner.rank == ahead.rank and event.store.order in RELEASES:
            signals += [event] if event.allocation.rank == behind.rank else []
            ranks.setdefault((event.store.owner.launch, event.store.site), set()).add(event.allocation.rank)
    for event in signals:
        kernel, number = event.store.owner.kernel, event.store.owner.launch
        is_one = kernel in (ahead.kernel, behind.kernel) and (kernel, number) not in has_waited | has_answered
        is_here = (ahead.kernel, ahead.launch) == (kernel, number) and not access.reach
        is_past = is_here or _has_left(world, ahead.rank, kernel, number)
        if is_one and is_past and len(ranks[number, event.store.site]) == world.num_ranks:
            if not _has_left(world, behind.rank, kernel, number):
                return event
    return None


def _has_left(world: Run, rank: int, kernel: str, number: int) -> bool:
    """Whether a rank has run a kernel to its end for the given time."""
    queued = [item for s in world.streams if s.rank == rank for what, item, _ in s.queue if what == "launch"]
    running = [launch for launch in world.launches if launch.rank == rank]
    open_ = [launch.number for launch in (*queued, *running) if launch.name == kernel]
    return world.num_launches[rank, kernel] >= number and number not in open_


# Other threads of a block, which still wait in a place that this one has left: a hint that they were to meet there

LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD"}
MOST_CALLS = 32


def block_of(world: Run, owner: Owner) -> Block | None:
    """The block of a thread that has accessed something; None if its launch is over."""
    for launch in world.launches:
        if (launch.rank, launch.name, launch.number) == (owner.rank, owner.kernel, owner.launch):
            return launch.blocks[owner.block_idx]
    return None


def who_is_behind(world: Run, owner: Owner, only_waiting: bool = False) -> Cause | None:
    """A thread of the same block that still waits at the place which this thread has left.

    One that does not wait yet counts if it is on its way there: what it comes to is named `wait_...`.
    only_waiting: it does not count; this thread has waited itself
    """
    block = block_of(world, owner)
    if block is None:
        return None
    here = block.threads[owner.thread_idx]
    own = _places(here)
    found = [
        (waits, depth, mate.warp == here.warp, -mate.thread_idx)
        for mate in block.threads
        if (depth := _common_calls(places := _places(mate), own))
        and ((waits := _waits(mate, places[depth:])) or (not only_waiting and _will_wait(places, own, depth)))
    ]
    if not found:
        return None
    waits, *_, number = max(found)
    mate, words = block.threads[-number], {"thread": -number}
    site = _places(mate)[-1]
    if not waits:
        return Cause("behind, on its way", words={**words, "site": describe_site(site)})
    if mate not in world.polling or not mate.waits_for:
        return Cause("behind, waits", words={**words, "function": site[0].co_name})
    allocation, offset, *_ = mate.waits_for[-1]  # those before it may have been met on the way to the loop
    return Cause("behind, polls", (allocation.cell(offset),), words=words)


def _places(thread: Thread) -> list[Site]:
    """The calls that a thread is in, the kernel's first."""
    frame = sys._getframe() if thread is thread.world.current else thread.gr_frame
    return [] if thread.exited else call_chain(frame, MOST_CALLS)[::-1]


def _common_calls(places: list[Site], further: list[Site]) -> int:
    """How many calls a thread has in common with another one that is further; 0 if that is not further."""
    depth = next((i for i, (a, b) in enumerate(zip(places, further, strict=False)) if a != b), None)
    if depth is None or places[depth][0] is not further[depth][0] or places[depth][1] > further[depth][1]:
        return 0
    return depth + 1


def _waits(thread: Thread, inner: list[Site]) -> bool:
    """Whether a thread polls; inner: the calls in which it may do so."""
    return thread in thread.world.polling or any(not polling.isdisjoint(code.co_names) for code, _ in inner)


def _will_wait(places: list[Site], further: list[Site], depth: int) -> bool:
    """Whether a thread is in a call that waits, or has one to come before it is as far as the other one."""
    code, begin = places[depth - 1]
    names = _loaded(code, begin, further[depth - 1][1])
    for inner, at in places[depth:]:
        names |= _loaded(inner, at, len(inner.co_code))  # what it has called there before is past
    return any(name.startswith("wait_") for name in names)


def _loaded(code: CodeType, begin: int, end: int) -> set[str]:
    """The names of functions and values of others that code uses between two of its instructions."""
    return {str(i.argval) for i in dis.get_instructions(code) if i.opname in LOADS and begin < i.offset < end}


# Rows that are promised too soon


def loaded_again(race: Race) -> Cause | None:
    """That a signal let a thread load bytes again, to which this thread is about to store; and the signal's cell.

    This thread knows that the block has loaded them before, and had not acquired that cell then.
    """
    earlier, storer = race.earlier, race.thread.owner
    if earlier.verb == "store" or earlier.reach or earlier.owner.block == storer.block:
        return None  # a store, a poll, or what a barrier orders
    first = next((load for load in _loads(race) if not race.thread.is_new(load)), None)
    if first is None:
        return None
    link = next(race.signals_seen(earlier.owner, storer, earlier.time), None)
    if link is None or link.load.time < first.time or race.has_reached(link.store, first.owner, first.time):
        return None
    return race.cause("promised", link.cell, race.cell, lines=(link,), store=link.store.noun)


def has_old_signal(race: Race) -> bool:
    """Whether the last signal of another block that this thread has seen comes before what that one has stored."""
    earlier, listener = race.earlier, race.thread.owner
    if earlier.verb == "load" or earlier.owner.block == listener.block:
        return False
    link = next(race.signals_seen(listener, earlier.owner), None)
    return link is not None and link.store.time < earlier.time


def _loads(race: Race) -> Iterator[Access]:
    """What the block has loaded of the bytes of both since they were stored, before the load of the race."""
    begin, end = max(race.access.begin, race.earlier.begin), min(race.access.end, race.earlier.end)
    for granule in range(begin >> 4, (end + 15) >> 4):
        for last in race.allocation.last_loads.get(granule, {}).values():
            for load in (last, *last.before):
                if load.owner.block == race.earlier.owner.block and load.begin < end and begin < load.end:
                    if load.time < race.earlier.time:
                        yield load


# The copy engine


def proxy_fence(race: Race, way: Way | None) -> Cause:
    owner = race.thread.owner
    links = way.links if way is not None else ()
    cells = (race.cell, links[-1].cell) if links else (race.cell,)
    knows = f"has learned from {links[-1].cell}" if links else "knows"
    known = "has stored itself" if race.earlier.owner is owner else knows
    if not any(isinstance(event, ProxyFenced) and event.owner is owner for event in race.since(race.earlier)):
        return race.cause("no proxy fence", *cells, lines=links, known=known)
    unmet = ""
    if links and links[-1].load.owner is not owner:
        meeting = meeting_of(links[-1].load.owner, owner)
        unmet = f", no {meeting} makes it wait for the thread that has loaded that"
    return race.cause("early proxy fence", *cells, lines=links, known=known, unmet=unmet)


def copy_not_waited(race: Race, link: Link | None = None) -> Cause:
    """A bulk copy that no thread has waited for."""
    is_load = race.earlier.verb == "load"
    done = "reads" if is_load else "writes"
    if (race.allocation is race.thread.shared) is not is_load:
        return _copy_to_mbarrier(race, done)
    where = f" before the {telling(link)}" if link is not None else ""
    if link is None and race.earlier.owner.thread_idx != race.thread.thread_idx:
        where = " in the thread that has started it"
    cells = (race.cell,) if link is None else (race.cell, link.cell)
    return race.cause(f"copy {done}", *cells, where=where)


def _copy_to_mbarrier(race: Race, done: str) -> Cause:
    """Who has waited on the mbarrier of a bulk copy that is not there yet."""
    block, copy = race.thread.block, race.earlier
    issued = [one for mate in block.threads for one in mate.issued]
    under_way = (mbarrier for *accesses, mbarrier in issued if copy in accesses)
    there = (mbarrier for mbarrier in block.mbarriers.values() if copy in (*mbarrier.copies, *mbarrier.done))
    mbarrier = next(under_way, None) or next(there, None)
    if mbarrier is None:
        return race.cause("copy, mbarrier", race.cell, "the mbarrier", done=done)
    waits = [e for e in race.since(copy) if isinstance(e, Waited) and e.address == mbarrier.address]
    is_early = any(wait.owner is race.thread.owner for wait in waits)
    name = f"the mbarrier at shared byte {mbarrier.address}"
    return race.cause("copy, phase" if is_early else "copy, mbarrier", race.cell, name, done=done)


# Words


def which_of(a: Owner, b: Owner) -> str:
    """What the second of two threads of a block is for the first."""
    return "lane" if abs(a.clock) == abs(b.clock) else "warp"


def meeting_of(a: Owner, b: Owner) -> str:
    """What is missing between the two."""
    return "syncwarp" if which_of(a, b) == "lane" else "barrier or syncwarp"


def on(access: Access, cell: str) -> str:
    """`store to CELL`"""
    return f"{access.noun} {_OF[access.noun]} {cell}"


def telling(link: Link) -> str:
    """What publishes all that was done before, as `store to CELL`."""
    return on(link.store, link.cell)
