"""The cause of a race in one sentence: which cell was to order two accesses, and which end of it is too weak."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from ..machine.orders import RELEASES, SCOPES
from ..models.history import EngineTold, Stored
from ..models.knowledge import NOT_WAITED, NOT_YET, Access, Owner, distance
from .chains import ATOMIC, FLAW, LEFT_OUT, Flaw, Link, Race, Search, Way, last_heard, told_by, waited_on_mbarrier
from .mates import who_is_behind
from .promised import is_told_before, loaded_again
from .unheard import wait_missing

BETWEEN = {1: "threads of a block", 2: "blocks of a rank", 3: "ranks"}
SCOPE_OF = {reach: name for name, reach in SCOPES.items()}
# Chains are believed up to these costs, hops aside.
BOTH_ENDS = 2 * FLAW + ATOMIC
NOT_MET = LEFT_OUT + ATOMIC
POSSIBLE = LEFT_OUT + FLAW
HOPS = 200
BY_ATOMIC = FLAW + ATOMIC - HOPS  # chains by atomics that acquire nothing are believed if nobody else has told anything
_OF = {"atomic": "on", "load": "of", "store": "to"}
MAX_TOLD = 16  # stores that are looked at, the last first


class Cause(NamedTuple):
    """What is wrong, and the cells that were to order the accesses, in the order of the run."""

    sentence: str
    links: tuple[Link, ...] = ()


def find_cause(race: Race) -> Cause:
    thread, _, access, earlier = race
    if earlier.owner.is_cpu and earlier.reach:
        needed = "a larger scope: sys" if access.reach else "an order, and scope sys"
        return Cause(f"the CPU stores to {race.cell} while the kernel runs: this {access.noun} needs {needed}")
    world, history = race.world, race.history
    search = Search(earlier)
    search.follow(history.between(earlier.time, history.now))
    way = search.result(thread.owner)
    if again := loaded_again(race):
        return Cause(*again)
    if earlier.verb == "store" and not thread.is_new(earlier):
        return _proxy(race, way)
    if (way is None or len(way.flaws) > 1) and (missing := wait_missing(world, earlier, access)):
        return Cause(missing)
    cost = way.cost - HOPS if way is not None and way.flaws else sys.maxsize
    whats = set() if way is None else {flaw.what for flaw in way.flaws}
    ends = whats & {"before", "after"}
    is_doubtful = way is not None and (whats & {"vote", "after"} or BY_ATOMIC <= cost < sys.maxsize)
    if is_doubtful and not _is_overwritten(race) and (cause := _told_by_another(race)):
        return cause
    if way is not None and not ends and cost <= BOTH_ENDS:
        return _of_chain(race, way)
    if earlier.number == NOT_WAITED and not _is_overwritten(race):
        if way is not None and whats == {"copy", "before"} and cost <= NOT_MET + FLAW:
            return _of_chain(race, way)
        if not is_told_before(race):
            return Cause(_copy(race))
    if earlier.reach and access.reach:
        return Cause(_scope(race))
    if weak := _weak(race):
        return Cause(weak)
    is_first = not _is_overwritten(race) or (way is not None and ends == {"before"} and not _tells_of_other(race, way))
    if way is not None and cost <= NOT_MET and is_first:
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
    ends = "the atomics on" if store.is_atomic and load.is_atomic else f"the {store.noun} to and the load of"
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
        return f"no syncwarp is between {race.accesses} of {race.cell}: {what}"
    link = way.links[-1]
    return f"no syncwarp passes on to all lanes what one has heard by {link.allocation.cell(link.load.begin)}: {what}"


def _meeting(a: Owner, b: Owner) -> str:
    """What is missing between two threads of a block."""
    return "syncwarp" if abs(a.clock) == abs(b.clock) else "barrier or syncwarp"


def _not_met(race: Race, end: str, way: Way) -> str:
    """Threads of a block that have not met."""
    mine, theirs = race.thread.owner, race.earlier.owner
    if not way.links:
        if link := _told_by_mate(race):
            return _by_another(race.earlier, "the", link)
        is_warp = abs(mine.clock) == abs(theirs.clock)
        if not is_warp and race.allocation is not race.thread.shared and _is_for_others(race):
            what = f"nothing orders {race.accesses} of {race.cell}: two warps of a block that have not met since, and"
            what += " this thread has waited for nothing that the other one, or its warp, has stored since"
            return what + _such_as(_told_next(race))
        meeting, who = ("syncwarp", "lanes of a warp") if is_warp else ("barrier", "warps of a block")
        return f"no {meeting} is between {race.accesses} of {race.cell}: two {who} that have not met since"
    if end == "before":
        return _by_another(race.earlier, "the", way.links[0])
    allocation, _, load = way.links[-1]
    what = f"no {_meeting(load.owner, mine)} orders this {race.access.noun} behind the load of"
    return f"{what} {allocation.cell(load.begin)}: another thread of its block makes that one"


def _is_for_others(race: Race) -> bool:
    """Whether one of the two accesses reaches other blocks: then a barrier of a block is not what orders such bytes."""
    return max(race.access.reach, race.earlier.reach) > SCOPES["cta"]


def _told_next(race: Race) -> Stored | None:
    """How the earlier one's warp has told of what it has done, to whoever waits for that."""
    for event in race.history.between(race.earlier.time, race.history.now):
        if isinstance(event, Stored) and event.store.order in RELEASES and event.allocation is not race.thread.shared:
            if abs(event.store.owner.clock) == abs(race.earlier.owner.clock) and event.store is not race.earlier:
                return event
    return None


def _such_as(told: Stored | None) -> str:
    return "" if told is None else f", such as {told.allocation.cell(told.store.begin)}"


def _told_by_mate(race: Race) -> Link | None:
    """How a lane of the earlier one's warp has told another warp of its block to go on, through global memory."""
    thread, allocation, _, earlier = race
    if allocation is thread.shared or earlier.owner.clock == thread.owner.clock:
        return None
    now = race.history.now
    events = race.history.between(earlier.time, now)
    for link in islice(told_by(events, thread.owner, earlier.owner), MAX_TOLD):
        teller = link.store.owner
        is_mates = abs(teller.clock) == abs(earlier.owner.clock) and teller is not earlier.owner
        if is_mates and link.allocation is not thread.shared and race.has_reached(link.store, thread.owner, now):
            return link
    return None


# --- no chain ---------------------------------------------------------------------------------------------------


def _proxy(race: Race, way: Way | None) -> Cause:
    owner, history = race.thread.owner, race.history
    links = way.links if way is not None else ()
    by = f" by {links[-1].allocation.cell(links[-1].load.begin)}" if links else ""
    told = "has stored itself" if race.earlier.owner is owner else f"knows{by or ' of'}"
    what = f"the copy engine is not told what this thread {told}"
    since = history.between(race.earlier.time, history.now)
    if not any(isinstance(event, EngineTold) and event.owner is owner for event in since):
        return Cause(f"{what}: no fence.proxy.async.global comes before the bulk load of {race.cell}", links)
    what += f": its fence.proxy.async.global before the bulk load of {race.cell} comes too soon"
    if links and links[-1].load.owner is not owner:
        what += f", no {_meeting(links[-1].load.owner, owner)} makes it wait for the thread that has loaded that"
    return Cause(what, links)


def _copy(race: Race, link: Link | None = None) -> str:
    """A bulk copy that nobody has waited for."""
    is_load = race.earlier.verb == "load"
    done = "reads" if is_load else "writes"
    if (race.allocation is race.thread.shared) is not is_load:
        return f"{waited_on_mbarrier(race.thread, race.earlier)} the bulk copy that {done} {race.cell}"
    wait = "wait_group.read" if is_load else "wait_group"
    what = f"the bulk copy that {done} {race.cell} has not been waited for: a {wait} is missing"
    if link is None:
        is_own = race.earlier.owner.thread_idx == race.thread.thread_idx
        return what if is_own else f"{what} in the thread that has started it"
    return f"{what} before the {_telling(link)}"


def _scope(race: Race) -> str:
    """Both accesses are strong, but one does not reach the other."""
    needed = distance(race.earlier.owner, race.access.owner)
    ends = [
        f"the scope of {which} {_on(access, race.cell)}"
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
    what += f" {strong.how} order, as a cell that threads wait for"
    is_one_block = earlier.owner.block == access.owner.block
    return f"{what}; nor is there a {_meeting(earlier.owner, access.owner)} between the two" if is_one_block else what


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


def _tells_of_other(race: Race, way: Way) -> bool:
    """Whether the last link of a chain has told of an earlier store to bytes that this thread loads: it is for that."""
    if not way.links:
        return False
    load = way.links[-1].load
    known = [store for store in race.earlier.before if not race.thread.is_new(store)]
    return any(not race.has_reached(store, load.owner, load.time) for store in known)


def _overwritten(race: Race) -> Cause:
    """A load that comes too late."""
    earlier, history = race.earlier, race.history
    events = history.between(0, earlier.time)
    link = next(told_by(events, earlier.owner, race.thread.owner, is_store=False), None)
    what = f"{race.cell} was overwritten before this load: this thread was told of the store before that one"
    if link is None or link.store.time < earlier.before[0].time:
        return Cause(f"{what}, and nothing made the later one wait")
    cell = link.allocation.cell(link.load.begin)
    return Cause(
        f"{what}, and the later one did not wait for this load, but had heard of this block by {cell}", (link,)
    )


class Hearing(NamedTuple):
    """A thread that may have heard of another one's block before some time, and what that other one does.

    is_late: whether the listener is the second of the race
    """

    listener: Owner
    end: int
    act: Access
    is_late: bool


def _hearings(race: Race) -> list[Hearing]:
    """Who may have been told to go on before the other one's access: whoever loads, or each of two that store."""
    access, earlier = race.access, race.earlier
    late = Hearing(race.thread.owner, race.history.now, earlier, True)
    soon = Hearing(earlier.owner, earlier.time, access, False)
    if access.verb == earlier.verb:
        return [late, soon]
    return [late] if access.verb == "load" else [soon]


def _told_by_another(race: Race) -> Cause | None:
    """A thread that was told to go on, but not by the one that stores, which may do that before or after."""
    if race.earlier.owner.block == race.thread.owner.block:
        return None
    return next((cause for hearing in _hearings(race) if (cause := _told_too_soon(race, hearing))), None)


def _told_too_soon(race: Race, hearing: Hearing) -> Cause | None:
    act, is_late = hearing.act, hearing.is_late
    are_stores = race.access.verb == race.earlier.verb
    links = islice(_told(race, hearing), MAX_TOLD)  # the first that has reached the listener without a flaw
    link = next((one for one in links if race.has_reached(one.store, hearing.listener, hearing.end)), None)
    if link is None or (are_stores and link.store.owner is act.owner):
        return None
    if not is_late and not are_stores and _has_loaded_what_it_was_told(race):
        return None
    cell = link.allocation.cell(link.store.begin)
    if _is_older(race, link.store, act, act.owner if is_late else race.thread.owner):
        if is_late or are_stores:
            return None
        what = f"nothing orders the {race.earlier.noun} of {race.cell} behind this {act.noun}"
        last = f"the last that the thread that loads has heard of this block is {cell}"
        return Cause(f"{what}: {last}, which was stored before", (link,))
    return Cause(_by_another(act, "the" if is_late else "this", link), (link,))


def _by_another(act: Access, which: str, link: Link) -> str:
    """A thread of another one's block speaks for it, and does not wait for it."""
    what = f"no {_meeting(link.store.owner, act.owner)} orders {which} {act.noun} before the {_telling(link)}"
    return f"{what}: another thread of its block makes that one"


def _told(race: Race, hearing: Hearing) -> Iterator[Link]:
    """How a thread has heard of the other one's block, the last first."""
    events = race.history.between(0, hearing.end)
    return told_by(events, hearing.listener, hearing.act.owner)


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
    return race.has_reached(told, storer, store.time)


def _nothing(race: Race) -> Cause:
    thread, _, access, earlier = race
    if earlier.verb == "load":
        return _not_told_of_load(race)
    if access.verb == "store":
        what = f"two threads store to {race.cell}, and nothing at all orders one before the other"
        if next(_told(race, _hearings(race)[0]), None) is None:
            such = _such_as(_told_next(race))
            what += f": the second has waited for nothing that the first one, or its block, has stored{such}"
        return Cause(what)
    what = f"nothing at all orders {race.order} of {race.cell}"
    link = next(_told(race, _hearings(race)[0]), None)
    if link is not None and earlier.order == "bulk" and link.store.owner is earlier.owner:
        return Cause(_copy(race, link), (link,))
    if link is not None:
        who = "the one that stores" if link.store.owner is earlier.owner else "the block that stores"
        cell = link.allocation.cell(link.store.begin)
        last = f"the last that this thread has heard of {who} is {cell}, which was stored before"
        if (told := _told_next(race)) is not None:
            is_same = told.allocation is link.allocation and told.store.begin == link.store.begin
            teller = "a later store to that cell" if is_same else told.allocation.cell(told.store.begin)
            last += f"; what tells of the store is {teller}"
        return Cause(f"{what}: {last}", (link,))
    if earlier.serving is not None and (cause := _by_another_queue_pair(race, what)):
        return cause
    heard = last_heard(race.history.between(0, race.history.now), thread.owner)
    if behind := who_is_behind(race.world, thread.owner, only_waiting=bool(heard)):
        return Cause(f"{what}: this thread has gone on while {behind}")
    last = f"; the last that it has waited for is {heard}" if heard else ""
    return Cause(f"{what}: this thread has waited for nothing that the other one, or its block, has stored{last}")


def _by_another_queue_pair(race: Race, what: str) -> Cause | None:
    """What a NIC has written, and a thread that has heard of what it did for another queue pair."""
    thread, earlier = race.thread, race.earlier
    events = race.history.between(0, race.history.now)
    told = told_by(events, thread.owner, earlier.owner, of_rank=True)
    link = next((link for link in told if link.store.serving not in (None, earlier.serving)), None)
    if link is None or link.store.serving is None or earlier.serving is None:
        return None
    cell = link.allocation.cell(link.load.begin)
    wrote, heard = (f"entry {entry} of queue pair {number}" for number, entry in (earlier.serving, link.store.serving))
    last = f"the last that this thread has heard of the NIC is {cell}, for {heard}"
    return Cause(f"{what}: the NIC has stored it for {wrote}, {last}, and nothing orders two queue pairs", (link,))


def _not_told_of_load(race: Race) -> Cause:
    """A store to bytes that another thread has loaded, which has told nobody."""
    thread, _, _, earlier = race
    events = race.history.between(0, race.history.now)
    link = next(told_by(events, thread.owner, earlier.owner, is_store=False), None)
    is_old = link is None or all(link.store.time < store.time for store in _met(race))
    from_there = any(store.owner.rank == thread.owner.rank != earlier.owner.rank for store in _met(race))
    if not from_there and not _has_loaded_what_it_was_told(race):
        what = f"nothing at all orders the {earlier.noun} and this {race.access.noun} of {race.cell}"
        heard = last_heard(race.history.between(0, earlier.time), earlier.owner)
        if behind := who_is_behind(race.world, earlier.owner, only_waiting=bool(heard)):
            return Cause(f"{what}: the thread that loads has gone on while {behind}")
        if is_old:
            last = f"; the last that the one that loads has waited for is {heard}" if heard else ""
            return Cause(f"{what}: none of the two threads has waited for the other, or for its block{last}")
    what = f"{race.cell} is overwritten, and nothing at all tells this thread that it has been read"
    if link is None or is_old:
        return Cause(f"{what}: it has waited for nothing that comes after the load")
    if link.store.owner is not earlier.owner and not race.has_reached(link.store, earlier.owner, earlier.time):
        return Cause(_by_another(earlier, "the", link), (link,))
    cell = link.allocation.cell(link.load.begin)
    return Cause(f"{what}: the last that it has heard of the other block is {cell}, stored before the load", (link,))


def _on(access: Access, cell: str) -> str:
    """`store to CELL`"""
    return f"{access.noun} {_OF[access.noun]} {cell}"


def _telling(link: Link) -> str:
    """What tells of all that was done before, as `store to CELL`."""
    return _on(link.store, link.allocation.cell(link.store.begin))
