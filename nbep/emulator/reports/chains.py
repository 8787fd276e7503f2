"""Why nothing orders two accesses: the chain that was to order them, and where it is too weak.

After an access other threads may come to hear of it: its thread stores to a cell, another one loads what it has stored,
meets the rest of its block at a barrier, and so on to the thread of the second access. In the history such a chain can
be found also where a link of it orders nothing: a store without a release, a load without an acquire, a scope that is
too small, a vote in place of a syncwarp, a barrier that is left out, a bulk copy without a wait. Each such
*flaw* has a cost, and the cheapest chain is taken for the one that was meant.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..machine.orders import ACQUIRES, RELEASES, SCOPES
from ..machine.stream import MAX_BLOCK
from ..models import races
from ..models.history import (
    Arrived,
    Event,
    Fenced,
    Filled,
    Forgotten,
    History,
    Loaded,
    Met,
    Signed,
    Stored,
    Waited,
)
from ..models.knowledge import NOT_WAITED, Access, Owner, distance
from .causes import Cause, Link

if TYPE_CHECKING:
    from ..machine.memory import Allocation
    from ..machine.source import Site
    from ..run import Run

LANES = 32
FLAW = 1000  # an end of a link that orders nothing
NARROW = 900  # a fence with too small a scope: somebody has thought of it
LEFT_OUT = 1500  # threads of a block that have not met
ATOMIC = 600  # more for an atomic that acquires nothing: it is there to store
SAME_DATA = 500  # a link through bytes that are more likely data than a flag
HOP = 1  # short chains first


class Flaw(NamedTuple):
    """Where a chain orders nothing.

    what: "store too weak", "load too weak": an end of a link. "store scope", "load scope": its scope. "store fence
        scope", "load fence scope": that of its fence. "vote": lanes that have voted or shuffled. "before", "after":
        threads of a block that have not met, at the chain's begin or end. "copy": a bulk copy that its thread has not
        waited for.
    """

    what: str
    allocation: Allocation | None = None
    store: Access | None = None
    load: Access | None = None
    site: Site | None = None  # of a fence or a vote
    name: str = ""  # what has been met at; the scope of a fence
    needed: int = 0  # the reach that it takes


class Way(NamedTuple):
    """A chain from an access to a thread."""

    cost: int
    flaws: tuple[Flaw, ...] = ()
    links: tuple[Link, ...] = ()

    def by(self, *flaws: Flaw, cost: int = 0) -> Way:
        if not flaws:
            return self._replace(cost=self.cost + cost) if cost else self
        return self._replace(cost=self.cost + cost, flaws=self.flaws + flaws)


class Carried(NamedTuple):
    """What a store takes along: a chain, how far, and what is wrong with it already."""

    way: Way
    reach: int
    store: Access
    flaw: Flaw | None


Cell = tuple[Any, int]  # the identity of an allocation, and the offset


def key_of(owner: Owner) -> int:
    """A number for a thread, the same for its copy engine."""
    return owner.block * MAX_BLOCK + owner.thread_idx


def block_of(key: int) -> int:
    return key // MAX_BLOCK


def keys_of(owner: Owner, mask: int) -> list[int]:
    """Those of lanes of a thread's warp."""
    first = key_of(owner) - owner.thread_idx % LANES
    return [first + lane for lane in range(LANES) if mask >> lane & 1]


class Search:
    """The cheapest chains from an access to every thread, after some events.

    Only a store needs releases and acquires: that a load is over, a relaxed store can tell.
    """

    def __init__(self, source: Access):
        self.source = source
        self.is_store = source.verb == "store"
        self.block = source.owner.block
        start = Way(FLAW, (Flaw("copy"),)) if source.number == NOT_WAITED else Way(0)
        # A copy that an mbarrier tells of is known to those who have waited there.
        is_mbarriers = source.order == "bulk" and source.number != NOT_WAITED and source.owner.clock < 0
        self.ways: dict[int, Way] = {} if is_mbarriers else {key_of(source.owner): start}
        self.stranger = start.by(Flaw("before"), cost=LEFT_OUT)
        self.cells: dict[Cell, list[Carried]] = {}
        self.own: dict[tuple[int, Cell], list[Carried]] = {}  # what a thread has released to a cell before
        self.fences: dict[int, dict[int, tuple[Way, Site | None]]] = {}
        self.heard: dict[int, list[tuple[int, Way]]] = {}  # for a later fence: the reach that it needs, the chain
        self.arrived: dict[tuple[int, int], dict[int, Way | None]] = {}
        self.mbarriers: dict[tuple[int, int], Way] = {}

    def follow(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Stored(allocation, store):
                    if store.is_atomic:
                        self.load(allocation, store)
                    self.store(allocation, store)
                case Loaded(allocation, load):
                    self.load(allocation, load)
                case Forgotten(allocation, offset):
                    self.cells.pop((allocation.identity, offset), None)
                case Fenced(owner, reach, site):
                    self.fence(owner, reach, site)
                case Met():
                    self.meet(event)
                case Arrived(owner, barrier):
                    kept = self.arrived.setdefault((owner.block, barrier), {})
                    kept[key_of(owner)] = self.ways.get(key_of(owner))
                case Filled():
                    self.fill(event)
                case Signed(owner, address):
                    self.improve_mbarrier((owner.block, address), self.way_to(owner))
                case Waited(owner, address, copies):
                    if self.source in copies:
                        self.improve_mbarrier((owner.block, address), Way(0))
                    self.improve(key_of(owner), self.mbarriers.get((owner.block, address)))

    # --- chains to threads ----------------------------------------------------------------------------------------

    def way_to(self, owner: Owner) -> Way | None:
        return self.way(key_of(owner), owner)

    def way(self, key: int, owner: Owner) -> Way | None:
        """The cheapest chain to a thread; owner: it, or another one of its block."""
        way = self.ways.get(key)
        if way is None and owner.place is not None and not self.source.is_beyond(owner.place.start.loads):
            way = Way(0)  # its kernel knew of it when it started
        if block_of(key) == self.block and (way is None or way.cost > self.stranger.cost):
            return self.stranger
        return way

    def improve(self, key: int, way: Way | None) -> None:
        if way is not None and ((old := self.ways.get(key)) is None or way.cost < old.cost):
            self.ways[key] = way

    def improve_mbarrier(self, key: tuple[int, int], way: Way | None) -> None:
        if way is not None and ((old := self.mbarriers.get(key)) is None or way.cost < old.cost):
            self.mbarriers[key] = way

    def result(self, owner: Owner) -> Way | None:
        """The cheapest chain to a thread, if need be from another one of its block that it has not met since."""
        ways = [way] if (way := self.way_to(owner)) is not None else []
        block_ways = [way for key, way in self.ways.items() if block_of(key) == owner.block and key != key_of(owner)]
        if block_ways:
            ways.append(min(block_ways, key=lambda way: way.cost).by(Flaw("after"), cost=LEFT_OUT))
        return min(ways, key=lambda way: way.cost, default=None)

    # --- links ----------------------------------------------------------------------------------------------------

    def store(self, allocation: Allocation, store: Access) -> None:
        owner, cell = store.owner, (allocation.identity, store.begin)
        key = key_of(owner)
        way = self.way_to(owner)
        carried: list[Carried] = []
        if way is not None:
            if not self.is_store or store.order in RELEASES:
                carried.append(Carried(way, store.reach, store, None))
                self.own.setdefault((key, cell), []).append(carried[0])
            else:
                carried.append(Carried(way, store.reach, store, Flaw("store too weak", allocation, store)))
        for reach, (before, site) in self.fences.get(key, {}).items():
            name = next(name for name, number in SCOPES.items() if number == reach)
            flaw = Flaw("store fence scope", allocation, store, None, site, name) if reach < store.reach else None
            carried.append(Carried(before, min(reach, store.reach), store, flaw))
        carried += self.own.get((key, cell), [])
        if store.is_atomic:
            carried += [one._replace(reach=min(one.reach, store.reach)) for one in self.cells.get(cell, [])]
        if carried:
            self.cells[cell] = _cheapest(carried)
        else:
            self.cells.pop(cell, None)

    def load(self, allocation: Allocation, load: Access) -> None:
        """What a thread hears by a load, or by an atomic."""
        owner = load.owner
        for way, reach, store, flaw in self.cells.get((allocation.identity, load.begin), []):
            if store.owner is owner:
                continue
            needed = distance(store.owner, owner)
            cost = HOP
            flaws: list[Flaw] = []
            if flaw is not None and (flaw.what == "store too weak" or reach < needed):
                flaws.append(flaw._replace(load=load, needed=needed))
                cost += FLAW if flaw.what == "store too weak" else NARROW
            elif reach < needed:
                flaws.append(Flaw("store scope", allocation, store, load, needed=needed))
                cost += FLAW
            if store is self.source or (store.site, store.verb) == (self.source.site, self.source.verb):
                cost += SAME_DATA
            way = way.by(*flaws, cost=cost)._replace(links=(*way.links, Link(allocation, store, load)))
            if load.reach < needed:
                way = way.by(Flaw("load scope", allocation, store, load, needed=needed), cost=FLAW)
            if not self.is_store or load.order in ACQUIRES:
                self.improve(key_of(owner), way)
            else:
                self.heard.setdefault(key_of(owner), []).append((needed, way))
                cost = FLAW + ATOMIC * load.is_atomic
                self.improve(key_of(owner), way.by(Flaw("load too weak", allocation, store, load), cost=cost))

    def fence(self, owner: Owner, reach: int, site: Site | None) -> None:
        key = key_of(owner)
        for needed, way in self.heard.get(key, []):
            if needed <= reach:
                self.improve(key, way)
            else:
                link = way.links[-1]
                name = next(name for name, number in SCOPES.items() if number == reach)
                flaw = Flaw("load fence scope", link.allocation, link.store, link.load, site, name, needed)
                self.improve(key, way.by(flaw, cost=NARROW))
        so_far = self.way_to(owner)
        if so_far is not None:
            self.fences.setdefault(key, {})[reach] = so_far, site

    # --- meetings -------------------------------------------------------------------------------------------------

    def meet(self, met: Met) -> None:
        keys = keys_of(met.owner, met.mask)
        if not any(key in self.ways for key in keys):
            return
        known = [way for key in keys if (way := self.way(key, met.owner)) is not None]
        best = min(known, key=lambda way: way.cost)
        if met.name != "syncwarp":
            best = best.by(Flaw("vote", site=met.site, name=met.name), cost=FLAW)
        best = best.by(cost=HOP)
        for key in keys:
            self.improve(key, best)

    def fill(self, filled: Filled) -> None:
        owner = filled.owner
        only_arrived = self.arrived.pop((owner.block, filled.barrier), {})
        first = owner.block * MAX_BLOCK
        waiting = [first + index for index in filled.waiting]
        ways = [*only_arrived.values(), *(self.ways.get(key) for key in waiting)]
        known = [way for way in ways if way is not None]
        if known:
            best = min(known, key=lambda way: way.cost).by(cost=HOP)
            for key in waiting:
                self.improve(key, best)


class Race(races.Race):
    """A race, with what is asked of it again and again."""

    __slots__ = ()

    @property
    def world(self) -> Run:
        return cast("Run", self.thread.world)

    @property
    def history(self) -> History:
        return self.world.history

    @property
    def cell(self) -> str:
        return self.allocation.cell(max(self.access.begin, self.earlier.begin))

    def cause(self, kind: str, *cells: str, lines: tuple[Link, ...] = (), **words: object) -> Cause:
        """A cause of it, with the words that many sentences take."""
        noun, before = self.access.noun, self.earlier.noun
        order, accesses = "one store before the other", "two stores"
        if self.earlier.verb != self.access.verb:
            order = f"the {self.earlier.verb} before this {self.access.verb}"
            accesses = f"the {self.earlier.verb} and this {self.access.verb}"
        return Cause(
            kind, cells, lines, {"noun": noun, "before": before, "order": order, "accesses": accesses, **words}
        )

    def since(self, access: Access) -> list[Event]:
        """What has happened since one of the two."""
        return self.history.between(access.time, self.history.now)

    def has_reached(self, access: Access, owner: Owner, end: int) -> bool:
        """Whether a thread knows of an access at some time."""
        search = Search(access)
        search.follow(self.history.between(access.time, end))
        way = search.way_to(owner)
        return way is not None and not way.flaws

    def signals_seen(
        self, listener: Owner, signaler: Owner, end: int | None = None, is_store: bool = True, of_rank: bool = False
    ) -> Iterator[Link]:
        """See `signals_seen`: up to a time, or to now."""
        events = self.history.between(0, self.history.now if end is None else end)
        return signals_seen(events, listener, signaler, is_store, of_rank)


def _cheapest(carried: list[Carried]) -> list[Carried]:
    """A few of them: one for each reach and flaw is enough."""
    best: dict[tuple[int, str, Owner], Carried] = {}
    for one in carried:
        key = one.reach, one.flaw.what if one.flaw else "", one.store.owner
        if key not in best or one.way.cost < best[key].way.cost:
            best[key] = one
    return list(best.values())


def signals_seen(
    events: list[Event], listener: Owner, signaler: Owner | None, is_store: bool = True, of_rank: bool = False
) -> Iterator[Link]:
    """The stores by threads of the signaler's block that a listener can have seen, and the loads; the last first.

    signaler: None for all blocks but the listener's
    of_rank: by those of all blocks of its rank, or of its NIC
    is_store: they are to publish a store, so one end at least has an order

    events: up to the time in question
    """
    listeners = {key_of(listener)}
    wanted: dict[Cell, Access] = {}
    for event in reversed(events):
        match event:
            case Loaded(allocation, load):
                if key_of(load.owner) in listeners:
                    wanted[allocation.identity, load.begin] = load
            case Forgotten(allocation, offset):
                wanted.pop((allocation.identity, offset), None)
            case Stored(allocation, store):
                cell = allocation.identity, store.begin
                reader = wanted.get(cell)
                if reader is not None and store.owner is not reader.owner:
                    has_order = store.order in RELEASES or reader.order in ACQUIRES
                    if signaler is None:
                        is_signalers = store.owner.block != listener.block
                    else:
                        is_same_block = store.owner.block == signaler.block
                        is_signalers = store.owner.rank == signaler.rank if of_rank else is_same_block
                    if is_signalers and (has_order or not is_store):
                        yield Link(allocation, store, reader)
                    listeners.add(key_of(store.owner))
                if store.is_atomic:
                    if key_of(store.owner) in listeners:
                        wanted[cell] = store
                else:
                    wanted.pop(cell, None)
            case Met(owner, _, mask, _):
                keys = set(keys_of(owner, mask))
                if not keys.isdisjoint(listeners):
                    listeners |= keys
            case Filled(owner, _, arrived, waiting):
                first = owner.block * MAX_BLOCK
                if any(first + index in listeners for index in waiting):
                    listeners |= {first + index for index in arrived}


def last_heard(events: list[Event], owner: Owner) -> Stored | None:
    """The store that ended a thread's last wait; None if it has waited for no other thread."""
    wanted: Cell | None = None
    for event in reversed(events):
        if wanted is None and isinstance(event, Loaded) and event.load.owner is owner:
            wanted = (event.allocation.identity, event.load.begin) if event.load.order in ACQUIRES else None
        elif isinstance(event, Stored) and wanted == (event.allocation.identity, event.store.begin):
            if event.store.owner is not owner:
                return event
            wanted = None
    return None
