"""The cause of a race: which cell was to order two accesses, and which end of it is too weak."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

from ..machine.names import name_of
from ..machine.orders import RELEASES, SCOPES
from ..models.history import Stored
from ..models.knowledge import NOT_WAITED, NOT_YET, Access, Owner, distance
from .causes import Cause, Link
from .chains import ATOMIC, FLAW, LEFT_OUT, Flaw, Race, Search, Way, last_heard, signals_seen
from .missing_wait import (
    copy_not_waited,
    has_old_signal,
    loaded_again,
    meeting_of,
    on,
    proxy_fence,
    telling,
    wait_missing,
    which_of,
    who_is_behind,
)

BETWEEN = {1: "threads of a block", 2: "blocks of a rank", 3: "ranks"}
SCOPE_OF = {reach: name for name, reach in SCOPES.items()}
# Chains are believed up to these costs, hops aside.
BOTH_ENDS = 2 * FLAW + ATOMIC
NOT_MET = LEFT_OUT + ATOMIC
POSSIBLE = LEFT_OUT + FLAW
HOPS = 200
BY_ATOMIC = FLAW + ATOMIC - HOPS  # chains by atomics that acquire nothing are believed if there is no other signal
MOST_SIGNALS = 16  # those that are looked at, the last first

Causes = tuple[Cause, ...]


class Facts:
    """What is known of a race, each found out when a rule asks for it.

    way: the cheapest chain from the first access to the second; cost: of its flaws; what they are: see `Flaw`
    """

    def __init__(self, race: Race):
        self.race, self.earlier, self.access = race, race.earlier, race.access

    @cached_property
    def way(self) -> Way | None:
        search = Search(self.earlier)
        search.follow(self.race.since(self.earlier))
        return search.result(self.race.thread.owner)

    @cached_property
    def cost(self) -> int:
        return self.way.cost - HOPS if self.way is not None and self.way.flaws else sys.maxsize

    @cached_property
    def whats(self) -> set[str]:
        return set() if self.way is None else {flaw.what for flaw in self.way.flaws}

    @cached_property
    def is_overwritten(self) -> bool:
        """Whether this thread has seen an earlier store to bytes that it loads."""
        thread, _, access, earlier = self.race
        return access.verb == "load" and any(
            _is_published(thread.owner, earlier.owner, store) and not thread.is_new(store) for store in earlier.before
        )

    def chain(self, most: int, holds: bool = True) -> Causes:
        """The flaws of the chain, if there is one, they cost so little, and it is the one that was meant."""
        return _of_chain(self.race, self.way) if self.way is not None and holds and self.cost <= most else ()


Rule = Callable[[Facts], Cause | Causes | None]


def _no_wait(facts: Facts) -> Cause | None:
    has_chain = facts.way is not None and len(facts.way.flaws) <= 1
    return None if has_chain else wait_missing(facts.race.world, facts.earlier, facts.access)


def _doubtful_signal(facts: Facts) -> Cause | None:
    is_doubtful = facts.whats & {"vote", "after"} or BY_ATOMIC <= facts.cost < sys.maxsize
    return _signal_of_another(facts.race) if is_doubtful and not facts.is_overwritten else None


def _copy_alone(facts: Facts) -> Cause | Causes | None:
    if facts.earlier.number != NOT_WAITED or facts.is_overwritten:
        return None
    if causes := facts.chain(NOT_MET + FLAW, facts.whats == {"copy", "before"}):
        return causes
    return None if has_old_signal(facts.race) else copy_not_waited(facts.race)


def _not_met_first(facts: Facts) -> Causes:
    ends, way = facts.whats & {"before", "after"}, facts.way
    is_of_end = way is not None and ends == {"before"} and not _tells_of_other(facts.race, way)
    return facts.chain(NOT_MET, not facts.is_overwritten or is_of_end)


# The first rule that finds something is right. Each stands beside an example of the mistake that it is for.
RULES: tuple[tuple[str, Rule], ...] = (
    (
        "the CPU polls a flag that a kernel stores with weak order",
        lambda facts: _under_way(facts.race) if facts.earlier.owner.is_cpu and facts.earlier.reach else None,
    ),
    (
        "a tail says one row more than was stored: a slot is read again, then filled",
        lambda facts: loaded_again(facts.race),
    ),
    (
        "a row is stored to shared memory and copied from there in bulk, with no proxy fence between",
        lambda facts: (
            proxy_fence(facts.race, facts.way)
            if facts.earlier.verb == "store" and not facts.race.thread.is_new(facts.earlier)
            else None
        ),
    ),
    ("a kernel signals all ranks, and returns without waiting for their signals", _no_wait),
    ("lanes store a row, and a shuffle stands for the syncwarp before lane 0 raises the flag", _doubtful_signal),
    (
        "a flag is stored with relaxed order behind the data, or loaded so before them",
        lambda facts: facts.chain(BOTH_ENDS, not facts.whats & {"before", "after"}),
    ),
    ("a bulk copy to a peer is signalled before anybody has waited for it", _copy_alone),
    (
        "two blocks store to a word with volatile order, whose scope is a block",
        lambda facts: _scope(facts.race) if facts.earlier.reach and facts.access.reach else None,
    ),
    ("a flag that others poll is set with a weak store", lambda facts: _weak(facts.race)),
    ("32 lanes store a row, lane 0 raises its flag, and no syncwarp is between", _not_met_first),
    (
        "the head of a ring moves before the slot is loaded, which the sender then fills again",
        lambda facts: _overwritten(facts.race) if facts.is_overwritten else None,
    ),
    (
        "a thread counts its block in, and no barrier makes it wait for what other warps store",
        lambda facts: _signal_of_another(facts.race),
    ),
    ("two warps have not met, and one end of the signal is relaxed, too", lambda facts: facts.chain(POSSIBLE)),
    ("nobody waits for anything", lambda facts: _nothing(facts.race)),
)


def find_causes(race: Race) -> Causes:
    """What is wrong: one thing, or all flaws of a chain."""
    facts = Facts(race)
    found = next(found for _, rule in RULES if (found := rule(facts)))
    return (found,) if isinstance(found, Cause) else found


# --- a chain with flaws -----------------------------------------------------------------------------------------


def _of_chain(race: Race, way: Way) -> Causes:
    """The flaws of a chain, those of one cell together."""
    causes: list[Cause] = []
    flaws = list(way.flaws)
    while flaws:
        flaw = flaws.pop(0)
        is_pair = bool(flaws) and flaw.what == "store too weak" and flaws[0].what == "load too weak"
        if is_pair and flaws[0].load is flaw.load:
            _, store, load = link = _link(flaws.pop(0))
            ends = "the atomics on" if store.is_atomic and load.is_atomic else f"the {store.noun} to and the load of"
            hows = store.how if store.how == load.how else f"{store.how} and {load.how}"
            causes.append(race.cause("both too weak", link.cell, ends=ends, hows=hows))
        elif flaw.what == "copy":
            causes.append(copy_not_waited(race, way.links[0] if way.links else None))
        elif flaw.what == "vote":
            cell = (way.links[-1].cell,) if way.links else (race.cell,)
            causes.append(race.cause("shuffle passes on" if way.links else "shuffle", *cell, name=flaw.name))
        elif flaw.what in ("before", "after"):
            causes.append(_not_met(race, flaw.what, way))
        else:
            causes.append(_one_end(race, flaw))
    return tuple(cause._replace(lines=way.links) for cause in causes)


def _link(flaw: Flaw) -> Link:
    """Where it is; not of flaws between threads of a block."""
    return Link(flaw.allocation, flaw.store, flaw.load)  # type: ignore[arg-type]


def _one_end(race: Race, flaw: Flaw) -> Cause:
    _, store, load = link = _link(flaw)
    is_store = flaw.what.startswith("store")
    end = store if is_store else load
    return race.cause(
        flaw.what,
        link.cell,
        storing=f"the {'atomic on' if store.is_atomic else 'store to'} {link.cell}",
        loading=f"the atomic on {link.cell} that reads it" if load.is_atomic else f"the load of {link.cell}",
        how=end.how,
        name=flaw.name or end.scope,
        between=_between(flaw.needed),
    )


def _between(needed: int) -> str:
    return f"between {BETWEEN.get(needed, '')} it takes {SCOPE_OF.get(needed)}"


def _not_met(race: Race, end: str, way: Way) -> Cause:
    """Threads of a block that have not met."""
    mine, theirs = race.thread.owner, race.earlier.owner
    if not way.links:
        if link := _signal_of_mate(race):
            return _by_another(race, race.earlier, link)
        if abs(mine.clock) == abs(theirs.clock):
            return race.cause("no syncwarp", race.cell)
        # What reaches other blocks is not ordered by a barrier of one.
        reaches_others = max(race.access.reach, race.earlier.reach) > SCOPES["cta"]
        if race.allocation is not race.thread.shared and reaches_others:
            return _such_as(race, "warps not met")
        return race.cause("no barrier", race.cell)
    if end == "before":
        return _by_another(race, race.earlier, way.links[0])
    last = way.links[-1]
    return race.cause(f"heard by another {which_of(last.load.owner, mine)}", last.cell)


def _next_release(race: Race) -> Stored | None:
    """The first release after the earlier access by its warp: it publishes what that warp has done."""
    for event in race.since(race.earlier):
        if isinstance(event, Stored) and event.store.order in RELEASES and event.allocation is not race.thread.shared:
            if abs(event.store.owner.clock) == abs(race.earlier.owner.clock) and event.store is not race.earlier:
                return event
    return None


def _such_as(race: Race, kind: str) -> Cause:
    """A cause that ends in an example of what was not waited for."""
    release = _next_release(race)
    cells = (race.cell,) if release is None else (race.cell, release.cell)
    return race.cause(kind, *cells, such="" if release is None else f", such as {release.cell}")


def _signal_of_mate(race: Race) -> Link | None:
    """The signal in global memory by which a lane of the earlier one's warp has let another warp of the block go on."""
    thread, allocation, _, earlier = race
    if allocation is thread.shared or earlier.owner.clock == thread.owner.clock:
        return None
    for link in islice(signals_seen(race.since(earlier), thread.owner, earlier.owner), MOST_SIGNALS):
        signaler = link.store.owner
        is_mates = abs(signaler.clock) == abs(earlier.owner.clock) and signaler is not earlier.owner
        if is_mates and link.allocation is not thread.shared:
            if race.has_reached(link.store, thread.owner, race.history.now):
                return link
    return None


# --- no chain ---------------------------------------------------------------------------------------------------


def _under_way(race: Race) -> Cause:
    """The CPU polls a cell, or stores to one, that a kernel accesses with too little order."""
    needed = "a larger scope: sys" if race.access.reach else "an order, and scope sys"
    did = "polls" if race.earlier.verb == "load" else "stores to"
    return race.cause("CPU under way", race.cell, did=did, needed=needed)


def causes_of_late(race: Race) -> Causes:
    """The same with weak memory as choices, where threads know of single accesses: a chain, or what the two are."""
    thread, access = race.thread, race.access
    earlier: Any = race.earlier
    if earlier.owner.is_cpu and earlier.reach:
        return (_under_way(race),)
    if earlier.order == "bulk":
        done = "reads" if earlier.verb == "load" else "writes"
        if earlier.verb in earlier.who.waited_for:
            return (race.cause("unordered", race.cell),)
        if earlier.who.is_load:
            return (race.cause("copy, mbarrier", race.cell, "the mbarrier", done=done),)
        return (race.cause(f"copy {done}", race.cell, where=""),)
    search = Search(earlier)
    search.follow(race.since(earlier))
    way = search.result(thread.owner)
    if way is not None and way.flaws and way.cost - HOPS <= BOTH_ENDS:
        if not {flaw.what for flaw in way.flaws} & {"before", "after"}:
            return _of_chain(race, way)
        if not way.links:
            return (_not_met(race, "before", way),)
    if earlier.reach and access.reach:
        return (_scope(race),)
    return (_weak(race) or race.cause("unordered", race.cell),)


def _scope(race: Race) -> Cause:
    """Both accesses are strong, but one does not reach the other."""
    needed = distance(race.earlier.owner, race.access.owner)
    small = [(which, one) for which, one in (("the", race.earlier), ("this", race.access)) if one.reach < needed]
    verbs = {access.verb for _, access in small}
    return race.cause(
        f"racing {verbs.pop()}'s scope" if len(verbs) == 1 else "both racing scopes",
        race.cell,
        ends=" and ".join(f"the scope of {which} {on(access, race.cell)}" for which, access in small),
        are="is" if len(small) == 1 else "are",
        scopes=" and ".join(access.scope for _, access in small),
        between=_between(needed),
    )


def _weak(race: Race) -> Cause | None:
    """A cell that one polls and the other accesses with weak order."""
    earlier, access = race.earlier, race.access
    if bool(earlier.reach) == bool(access.reach) or earlier.verb == access.verb:
        return None
    weak, strong = (earlier, access) if access.reach else (access, earlier)
    if strong.is_atomic or weak.order == "bulk":
        return None
    meeting = ""
    if earlier.owner.block == access.owner.block:
        meeting = f"; nor is there a {meeting_of(earlier.owner, access.owner)} between the two"
    return race.cause(
        f"weak {weak.verb}",
        race.cell,
        which="this" if weak is access else "the",
        weak=weak.order,
        strong=strong.how,
        meeting=meeting,
    )


def _is_published(loading: Owner, storing: Owner, store: Access) -> bool:
    """Whether a store was published since the kernel of a thread has started, or is of those that store again."""
    if store.owner is loading or store.number >= NOT_YET:
        return False
    is_since = loading.place is None or store.is_beyond(loading.place.start.stores)
    return is_since or store.owner.block == storing.block


def _tells_of_other(race: Race, way: Way) -> bool:
    """Whether the last link of a chain publishes an earlier store to bytes that this thread loads: it is for that."""
    if not way.links:
        return False
    load = way.links[-1].load
    known = [store for store in race.earlier.before if not race.thread.is_new(store)]
    return any(not race.has_reached(store, load.owner, load.time) for store in known)


def _overwritten(race: Race) -> Cause:
    """A load that comes too late."""
    earlier = race.earlier
    link = next(race.signals_seen(earlier.owner, race.thread.owner, earlier.time, is_store=False), None)
    if link is None or link.store.time < earlier.before[0].time:
        return race.cause("overwritten", race.cell)
    return race.cause("overwritten, heard", race.cell, link.cell, lines=(link,))


class Hearing(NamedTuple):
    """A thread that may have heard of another one's block before some time, and what that other one does.

    is_late: whether the listener is the second of the race
    """

    listener: Owner
    end: int
    act: Access
    is_late: bool


def _hearings(race: Race) -> list[Hearing]:
    """Who may have seen a signal and gone on before the other one's access: who loads, or each of two that store."""
    access, earlier = race.access, race.earlier
    late = Hearing(race.thread.owner, race.history.now, earlier, True)
    soon = Hearing(earlier.owner, earlier.time, access, False)
    if access.verb == earlier.verb:
        return [late, soon]
    return [late] if access.verb == "load" else [soon]


def _signal_of_another(race: Race) -> Cause | None:
    """A thread has gone on for a signal of another thread than the one that stores, which may store before or after."""
    if race.earlier.owner.block == race.thread.owner.block:
        return None
    return next((cause for hearing in _hearings(race) if (cause := _signal_too_soon(race, hearing))), None)


def _signal_too_soon(race: Race, hearing: Hearing) -> Cause | None:
    listener, end, act, is_late = hearing
    are_stores = race.access.verb == race.earlier.verb
    links = islice(race.signals_seen(listener, act.owner, end), MOST_SIGNALS)
    # The first that has reached it without a flaw.
    link = next((one for one in links if race.has_reached(one.store, listener, end)), None)
    if link is None or (are_stores and link.store.owner is act.owner):
        return None
    if not is_late and not are_stores and _has_loaded_what_was_published(race):
        return None
    storer = act.owner if is_late else race.thread.owner
    if link.store.time <= act.time and (link.store.owner is storer or race.has_reached(link.store, storer, act.time)):
        if is_late or are_stores:
            return None
        return race.cause("old signal, loader", race.cell, link.cell, lines=(link,))
    return _by_another(race, act, link)


def _by_another(race: Race, act: Access, link: Link) -> Cause:
    """A thread of another one's block speaks for it, and does not wait for it."""
    which = f"{'this' if act is race.access else 'the'} {act.noun}"
    kind = f"another {which_of(link.store.owner, act.owner)} signals"
    return race.cause(kind, link.cell, lines=(link,), which=which, telling=telling(link))


def _has_loaded_what_was_published(race: Race) -> bool:
    """Whether an earlier load has met bytes that were published to its thread: they are to be stored to again."""
    return any(_is_published(race.earlier.owner, race.thread.owner, store) for store in _met(race))


def _met(race: Race) -> list[Access]:
    """What an earlier load has loaded."""
    granules = range(race.earlier.begin >> 4, (race.earlier.end + 15) >> 4)
    stores = [store for granule in granules for store in race.allocation.last_stores.get(granule, ())]
    return [store for store in stores if store.begin < race.access.end and race.access.begin < store.end]


def _nothing(race: Race) -> Cause:
    thread, _, access, earlier = race
    if earlier.verb == "load":
        return _load_not_published(race)
    listener, end, act, _ = _hearings(race)[0]
    link = next(race.signals_seen(listener, act.owner, end), None)
    if access.verb == "store":
        if link is not None:
            return race.cause("two stores", race.cell)
        return _such_as(race, "two stores, not waited")
    if link is not None and earlier.order == "bulk" and link.store.owner is earlier.owner:
        return copy_not_waited(race, link)._replace(lines=(link,))
    if link is not None:
        cells, its_signal = [race.cell, link.cell], ""
        if (release := _next_release(race)) is not None:
            is_here = release.allocation.identity is link.allocation.identity
            is_same = is_here and release.store.begin == link.store.begin
            cells += [] if is_same else [release.cell]
            its_signal = f"; its signal for the store is {'a later store to that cell' if is_same else release.cell}"
        who = "the storing thread" if link.store.owner is earlier.owner else "the storing block"
        return race.cause("old signal", *cells, lines=(link,), who=who, its_signal=its_signal)
    if earlier.serving is not None and (cause := _by_another_queue_pair(race)):
        return cause
    heard = last_heard(race.history.between(0, race.history.now), thread.owner)
    if behind := who_is_behind(race.world, thread.owner, only_waiting=heard is not None):
        return race.cause("gone on", race.cell, *behind.cells, behind=behind.sentence)
    return _waited_last(race, "not waited", "it has", heard)


def _waited_last(race: Race, kind: str, who: str, heard: Stored | None) -> Cause:
    """A cause that ends in what a thread has waited for instead."""
    if heard is None:
        return race.cause(kind, race.cell, last="")
    last = f"; the last that {who} waited for is {heard.cell}, stored by {name_of(heard.store.owner.rank)}"
    return race.cause(kind, race.cell, heard.cell, last=last)


def _by_another_queue_pair(race: Race) -> Cause | None:
    """What a NIC has written, and a thread that has heard of what it did for another queue pair."""
    earlier = race.earlier
    signals = race.signals_seen(race.thread.owner, earlier.owner, of_rank=True)
    link = next((link for link in signals if link.store.serving not in (None, earlier.serving)), None)
    if link is None or link.store.serving is None or earlier.serving is None:
        return None
    wrote, heard = (f"entry {entry} of queue pair {number}" for number, entry in (earlier.serving, link.store.serving))
    return race.cause("queue pairs", race.cell, link.cell, lines=(link,), wrote=wrote, heard=heard)


def _load_not_published(race: Race) -> Cause:
    """A store to bytes that another thread has loaded: this thread has seen no signal that comes after the load."""
    thread, _, _, earlier = race
    link = next(race.signals_seen(thread.owner, earlier.owner, is_store=False), None)
    is_old = link is None or all(link.store.time < store.time for store in _met(race))
    from_there = any(store.owner.rank == thread.owner.rank != earlier.owner.rank for store in _met(race))
    if not from_there and not _has_loaded_what_was_published(race):
        heard = last_heard(race.history.between(0, earlier.time), earlier.owner)
        if behind := who_is_behind(race.world, earlier.owner, only_waiting=heard is not None):
            return race.cause("loader gone on", race.cell, *behind.cells, behind=behind.sentence)
        if is_old:
            return _waited_last(race, "neither waited", "the one that loads has", heard)
    if link is None or is_old:
        return race.cause("unread", race.cell)
    if link.store.owner is not earlier.owner and not race.has_reached(link.store, earlier.owner, earlier.time):
        return _by_another(race, earlier, link)
    return race.cause("unread, heard", race.cell, link.cell, lines=(link,))
