"""The cause of a race in one sentence: which cell was to order two accesses, and which end of it is too weak."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..machine.memory import Allocation
from ..models.knowledge import NOT_WAITED, NOT_YET, Access, Owner, distance
from ..models.orders import SCOPES
from .chains import ATOMIC, FLAW, LEFT_OUT, Flaw, Link, Search, Way, told_by

if TYPE_CHECKING:
    from ..models.checked import CheckedThread

BETWEEN = {1: "threads of a block", 2: "blocks of a rank", 3: "ranks"}
SCOPE_OF = {reach: name for name, reach in SCOPES.items()}
# Chains are believed up to these costs, hops aside.
BOTH_ENDS = 2 * FLAW + ATOMIC
NOT_MET = LEFT_OUT + ATOMIC
POSSIBLE = LEFT_OUT + FLAW
HOPS = 200
MAX_TOLD = 16  # stores that are looked at, the last first


class Cause(NamedTuple):
    """What is wrong, and the cells that were to order the accesses, in the order of the run."""

    sentence: str
    links: tuple[Link, ...] = ()


class Race(NamedTuple):
    """Two accesses to the same bytes, by threads of which the second cannot know of the first."""

    thread: CheckedThread
    allocation: Allocation
    access: Access
    earlier: Access

    @property
    def cell(self) -> str:
        return self.allocation.cell(max(self.access.begin, self.earlier.begin))

    @property
    def order(self) -> str:
        """The order that is missing, in words."""
        if self.earlier.verb == self.access.verb:
            return "one store before the other"
        return f"the {self.earlier.verb} before this {self.access.verb}"


def find_cause(race: Race) -> Cause:
    thread, _, access, earlier = race
    history = thread.world.history
    search = Search(earlier)
    search.follow(history.between(earlier.time, history.now))
    way = search.result(thread.owner)
    if earlier.verb == "store" and not thread.is_new(earlier):
        return _proxy(race, way)
    cost = way.cost - HOPS if way is not None and way.flaws else sys.maxsize
    whats = set() if way is None else {flaw.what for flaw in way.flaws}
    ends = whats & {"before", "after"}
    if whats & {"vote", "after"} and (cause := _told_by_another(race)):
        return cause
    if way is not None and not ends and cost <= BOTH_ENDS:
        return _of_chain(race, way)
    if earlier.number == NOT_WAITED and not _is_overwritten(race):
        return Cause(_copy(race))
    if earlier.reach and access.reach:
        return Cause(_scope(race))
    if weak := _weak(race):
        return Cause(weak)
    if way is not None and cost <= NOT_MET and (ends == {"before"} or not _is_overwritten(race)):
        return _of_chain(race, way)
    if _is_overwritten(race):
        return _overwritten(race)
    if cause := _told_by_another(race):
        return cause
    if way is not None and cost <= POSSIBLE:
        return _of_chain(race, way)
    return _nothing(race)


# --- a chain with flaws -----------------------------------------------------------------------------------------


def _of_chain(race: Race, way: Way) -> Cause:
    """What the flaws of a chain say, those of one cell together."""
    texts: list[str] = []
    flaws = list(way.flaws)
    while flaws:
        flaw = flaws.pop(0)
        both = bool(flaws) and flaw.what == "store" and flaws[0].what == "load" and flaws[0].load is flaw.load
        texts.append(_both_ends(race, flaws.pop(0)) if both else _flaw(race, flaw, way))
    return Cause("; and ".join(texts), way.links)


def _link(flaw: Flaw) -> Link:
    """Where it is; not of flaws between threads of a block."""
    return Link(flaw.allocation, flaw.store, flaw.load)  # type: ignore[arg-type]


def _both_ends(race: Race, flaw: Flaw) -> str:
    allocation, store, load = _link(flaw)
    ends = "the atomics on" if store.is_atomic and load.is_atomic else f"the {_noun(store)} to and the load of"
    hows = store.how if store.how == load.how else f"{store.how} and {load.how}"
    what = f"{ends} {allocation.cell(load.begin)} are both too weak to order {race.order}"
    return f"{what}: with {hows} order they release and acquire nothing, and no fence does it for them"


def _flaw(race: Race, flaw: Flaw, way: Way) -> str:
    match flaw.what:
        case "copy":
            return _copy(race, way.links[0] if way.links else None)
        case "vote":
            return _vote(race, flaw, way)
        case "before" | "after":
            return _not_met(race, flaw.what, way)
    allocation, store, load = _link(flaw)
    cell = allocation.cell(load.begin)
    storing = f"the atomic on {cell}" if store.is_atomic else f"the store to {cell}"
    loading = f"the atomic on {cell} that reads it" if load.is_atomic else f"the load of {cell}"
    between = f"between {BETWEEN.get(flaw.needed, '')} it takes {SCOPE_OF.get(flaw.needed)}"
    match flaw.what:
        case "store":
            what = f"{storing} is too weak to order {race.order}"
            return f"{what}: with {store.how} order it releases nothing, and no fence comes before it"
        case "load":
            what = f"{loading} is too weak to order {race.order}"
            return f"{what}: with {load.how} order it acquires nothing, and no fence comes after it"
        case "store scope":
            return f"the scope of {storing} is too small to order {race.order}: {store.scope}, but {between}"
        case "load scope":
            return f"the scope of {loading} is too small to order {race.order}: {load.scope}, but {between}"
    side = f"before {storing}" if flaw.what == "fence scope" else f"after {loading}"
    return f"the scope of the fence {side} is too small to order {race.order}: {flaw.name}, but {between}"


def _vote(race: Race, flaw: Flaw, way: Way) -> str:
    what = f"a {flaw.name} brings lanes together, but orders no memory"
    if not way.links:
        return f"no syncwarp orders {race.order}: {what}"
    link = way.links[-1]
    return f"no syncwarp passes on to all lanes what one has heard by {link.allocation.cell(link.load.begin)}: {what}"


def _meeting(a: Owner, b: Owner) -> str:
    """What is missing between two threads of a block."""
    return "syncwarp" if abs(a.clock) == abs(b.clock) else "barrier or syncwarp"


def _not_met(race: Race, end: str, way: Way) -> str:
    """Threads of a block that have not met."""
    mine, theirs = race.thread.owner, race.earlier.owner
    if not way.links:
        is_warp = abs(mine.clock) == abs(theirs.clock)
        meeting, who = ("syncwarp", "lanes of a warp") if is_warp else ("barrier", "warps of a block")
        accesses = "two stores" if race.earlier.verb == race.access.verb else race.order.replace("before", "and")
        return f"no {meeting} is between {accesses} of {race.cell}: two {who} that have not met since"
    if end == "before":
        allocation, store, _ = way.links[0]
        what = f"no {_meeting(store.owner, theirs)} orders the {_noun(race.earlier)} before the {_noun(store)} to"
        return f"{what} {allocation.cell(store.begin)}: another thread of its block makes that one"
    allocation, _, load = way.links[-1]
    what = f"no {_meeting(load.owner, mine)} orders this {_noun(race.access)} behind the load of"
    return f"{what} {allocation.cell(load.begin)}: another thread of its block makes that one"


# --- no chain ---------------------------------------------------------------------------------------------------


def _proxy(race: Race, way: Way | None) -> Cause:
    links = way.links if way is not None else ()
    by = f" by {links[-1].allocation.cell(links[-1].load.begin)}" if links else ""
    told = "has stored itself" if race.earlier.owner is race.thread.owner else f"knows{by or ' of'}"
    what = f"the copy engine is not told what this thread {told}"
    return Cause(f"{what}: no fence.proxy.async.global comes before the bulk load of {race.cell}", links)


def _copy(race: Race, link: Link | None = None) -> str:
    """A bulk copy that nobody has waited for."""
    is_load = race.earlier.verb == "load"
    done = "reads" if is_load else "writes"
    if (race.allocation is race.thread.shared) is not is_load:
        return f"nobody has waited on the mbarrier of the bulk copy that {done} {race.cell}"
    wait = "wait_group.read" if is_load else "wait_group"
    what = f"the bulk copy that {done} {race.cell} has not been waited for: a {wait} is missing"
    if link is None:
        return what
    return f"{what} before the {_noun(link.store)} to {link.allocation.cell(link.store.begin)}"


def _scope(race: Race) -> str:
    """Both accesses are strong, but one does not reach the other."""
    needed = distance(race.earlier.owner, race.access.owner)
    ends = [
        f"the scope of {which} {access.verb} {'of' if access.verb == 'load' else 'to'} {race.cell}"
        for which, access in (("the", race.earlier), ("this", race.access))
        if access.reach < needed
    ]
    scopes = " and ".join(access.scope for access in (race.earlier, race.access) if access.reach < needed)
    are = "is" if len(ends) == 1 else "are"
    return f"{' and '.join(ends)} {are} too small: {scopes}, but between {BETWEEN[needed]} it takes {SCOPE_OF[needed]}"


def _weak(race: Race) -> str:
    """A cell that one polls and the other accesses with weak order."""
    earlier, access = race.earlier, race.access
    if bool(earlier.reach) == bool(access.reach) or earlier.verb == access.verb:
        return ""
    weak, strong = (earlier, access) if access.reach else (access, earlier)
    if strong.is_atomic or weak.order == "bulk":
        return ""
    which = "this" if weak is access else "the"
    to, of = ("to", "loads") if weak.verb == "store" else ("of", "stores to")
    what = f"{which} {weak.verb} {to} {race.cell} is too weak: {weak.order}, but another thread {of} it with"
    return f"{what} {strong.how} order, as a cell that threads wait for"


def _is_told(loading: Owner, storing: Owner, store: Access) -> bool:
    """Whether a store has been told of since the kernel of a thread has started, or is of those that store again."""
    if store.owner is loading or store.number >= NOT_YET:
        return False
    return store.number > loading.first_signal or store.owner.block == storing.block


def _is_overwritten(race: Race) -> bool:
    """Whether this thread was told of an earlier store to bytes that it loads."""
    thread, _, access, earlier = race
    return access.verb == "load" and any(
        _is_told(thread.owner, earlier.owner, store) and not thread.is_new(store) for store in earlier.before
    )


def _overwritten(race: Race) -> Cause:
    """A load that comes too late."""
    earlier, history = race.earlier, race.thread.world.history
    events = history.between(0, earlier.time)
    link = next(told_by(events, earlier.owner, race.thread.owner.block, is_store=False), None)
    what = f"{race.cell} was overwritten before this load: this thread was told of the store before that one"
    if link is None or link.store.time < earlier.before[0].time:
        return Cause(f"{what}, and nothing made the later one wait")
    cell = link.allocation.cell(link.load.begin)
    return Cause(
        f"{what}, and the later one did not wait for this load, but had heard of this block by {cell}", (link,)
    )


def _told_by_another(race: Race) -> Cause | None:
    """A thread that was told to load, but not by the one that stores, which may do that before or after the load."""
    thread, _, access, earlier = race
    if access.verb == earlier.verb or earlier.owner.block == thread.owner.block:
        return None
    link = next((link for link in islice(_told(race), MAX_TOLD) if _is_sound(race, link)), None)
    if link is None:
        return None
    store, load = (earlier, access) if access.verb == "load" else (access, earlier)
    storer = thread.owner if store is access else earlier.owner
    if store is access and _has_loaded_what_it_was_told(race):
        return None
    cell = link.allocation.cell(link.store.begin)
    if _is_older(race, link.store, store, storer):
        if store is earlier:
            return None
        what = f"nothing orders the {_noun(load)} of {race.cell} behind this {_noun(store)}"
        return Cause(f"{what}: the last that was heard of its block is {cell}, which was stored before", (link,))
    which = "this" if store is access else "the"
    what = f"no {_meeting(link.store.owner, storer)} orders {which} {_noun(store)} before the {_noun(link.store)} to"
    return Cause(f"{what} {cell}: another thread of its block makes that one", (link,))


def _told(race: Race) -> Iterator[Link]:
    """How the thread that loads has heard of the block that stores, the last first."""
    history = race.thread.world.history
    if race.access.verb == "load":
        return told_by(history.between(0, history.now), race.thread.owner, race.earlier.owner.block)
    return told_by(history.between(0, race.earlier.time), race.earlier.owner, race.thread.owner.block)


def _is_sound(race: Race, link: Link) -> bool:
    """Whether what was told by a cell has reached the thread that loads without a flaw."""
    history = race.thread.world.history
    owner, end = (
        (race.thread.owner, history.now) if race.access.verb == "load" else (race.earlier.owner, race.earlier.time)
    )
    search = Search(link.store)
    search.follow(history.between(link.store.time, end))
    way = search.way_to(owner)
    return way is not None and not way.flaws


def _has_loaded_what_it_was_told(race: Race) -> bool:
    """Whether an earlier load has met bytes that somebody had told its thread of: they are to be stored to again."""
    return any(_is_told(race.earlier.owner, race.thread.owner, store) for store in _met(race))


def _met(race: Race) -> list[Access]:
    """What an earlier load has loaded."""
    granules = range(race.earlier.begin >> 4, (race.earlier.end + 15) >> 4)
    stores = [store for granule in granules for store in race.allocation.last_stores.get(granule, ())]
    return [store for store in stores if store.begin < race.access.end and race.access.begin < store.end]


def _is_older(race: Race, told: Access, store: Access, storer: Owner) -> bool:
    """Whether what was told is older than a store, and known to its thread then."""
    if told.owner is storer:
        return told.time <= store.time
    if told.time > store.time:
        return False
    search = Search(told)
    search.follow(race.thread.world.history.between(told.time, store.time))
    way = search.way_to(storer)
    return way is not None and not way.flaws


def _nothing(race: Race) -> Cause:
    thread, _, access, earlier = race
    if earlier.verb == "load":
        what = f"{race.cell} is overwritten, and nothing at all tells this thread that it has been read"
        events = thread.world.history.between(0, thread.world.history.now)
        link = next(told_by(events, thread.owner, earlier.owner.block, is_store=False), None)
        if link is None or all(link.store.time < store.time for store in _met(race)):
            return Cause(f"{what}: it has waited for nothing that comes after the load")
        cell = link.allocation.cell(link.load.begin)
        return Cause(
            f"{what}: the last that it has heard of the other block is {cell}, stored before the load", (link,)
        )
    if access.verb == "store":
        return Cause(f"two threads store to {race.cell}, and nothing at all orders one before the other")
    what = f"nothing at all orders {race.order} of {race.cell}"
    link = next(_told(race), None)
    if link is not None and earlier.order == "bulk" and link.store.owner is earlier.owner:
        return Cause(_copy(race, link), (link,))
    if link is not None:
        who = "its thread" if link.store.owner is earlier.owner else "its block"
        cell = link.allocation.cell(link.store.begin)
        last = f"the last that this thread has heard of {who} is {cell}"
        return Cause(f"{what}: {last}, which was stored before", (link,))
    for mate in thread.block.threads:
        cells = mate.waits_for if isinstance(mate.waits_for, list) else [*mate.polled.values()]
        if mate is not thread and cells:
            cell = cells[0][0].cell(cells[0][1])
            return Cause(f"{what}: this thread goes on while thread {mate.thread_idx} of its block waits for {cell}")
    return Cause(f"{what}: this thread has waited for nothing that the other one, or its block, has stored")


def _noun(access: Access) -> str:
    if access.is_atomic:
        return "atomic"
    return f"bulk {access.verb}" if access.order == "bulk" else access.verb
