"""What a thread knows of the accesses of others, for `checked`: numbers of signals, by clock; and who was the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..machine.orders import SCOPES, WEAK
from ..machine.source import Site

if TYPE_CHECKING:
    from ..machine.memory import Allocation

NOT_YET = 1 << 62  # the number of a signal that has not been given
NOT_WAITED = NOT_YET + 1  # nor can it, before somebody has waited for the bulk copy
GRANULE_BITS = 4  # accesses are looked up by 16 aligned bytes
MAX_WARPS = 32  # of a block
# Clocks are numbers. That of a warp is part of that of its launch's stream: who knows a signal of the stream knows what
# all have signalled so far that have run in it. All are part of ALL_CLOCKS.
STREAM_BITS = 48  # of a clock: above them the number of the stream, below them of the warp; 0: the stream's own
OF_THREAD = 1 << 47  # likewise, of a single thread: see `every`
ALL_CLOCKS = 0
MAX_BEFORE = 4  # stores to the same bytes that a report knows of
MANY_STORES = 64  # over which others have stored: of those that are older only the last one of each thread is kept
CPU = -1  # in place of a rank: a host, as `host` has them; its block_idx is its rank then
CPU_CLOCK = -1  # of the caller of a world; of rank r's host: r + 1 less

Numbers = dict[int, int]  # clock -> its latest signal that is known.  Never changed once made.


class Knowledge(NamedTuple):
    """Of stores, what a thread knows itself, and what the copy engine knows when it starts a copy; of loads.

    engine, shared: of global and of shared memory, what was known at a proxy fence that the thread knows of
    read: of shared memory, which loads were known at such a fence

    Those who know the same have the same object where that is cheap: what they know together is found sooner then.
    """

    stores: Numbers
    engine: Numbers
    loads: Numbers
    shared: Numbers
    read: Numbers

    def with_loads(self, loads: Numbers) -> Knowledge:
        """The same but for the loads."""
        return self if loads is self.loads else self._replace(loads=loads)


NOTHING = Knowledge({}, {}, {}, {}, {})


@dataclass(eq=False)
class Place:
    """A launch in its stream. It stays when the launch is gone.

    clock: of the stream; queued_as: its number among all launches that hosts have queued
    start: what was known when it started; end: the signal at its end, NOT_YET before
    """

    stream: str
    clock: int
    title: str
    queued_as: int
    start: Knowledge
    end: int = NOT_YET

    def is_before(self, other: Place) -> bool:
        return self.end <= latest(other.start.stores, self.clock)


@dataclass(eq=False, slots=True)
class Owner:
    """Who accessed.  There is one for each thread of each launch, and one for its copy engine."""

    rank: int
    kernel: str
    block: int  # a number that no other block of the run has
    clock: int  # of its warp, or of the copy engine of that warp
    block_idx: int
    thread_idx: int
    launch: int = 1  # of this kernel on this rank, counted from 1
    place: Place | None = None  # of that launch
    own: int = 0  # a clock of its thread alone; 0 if it has none, as under all strategies but `every`

    @property
    def is_cpu(self) -> bool:
        return self.rank == CPU

    @property
    def host(self) -> int | None:
        """The rank whose host this is; None if it is no host, or the caller of the world."""
        return self.block_idx if self.rank == CPU and self.clock != CPU_CLOCK else None


def distance(a: Owner, b: Owner) -> int:
    """The reach that an order needs between the two, as `SCOPES` has it."""
    return 1 if a.block == b.block else 2 if a.rank == b.rank else 3


class Message:
    """What the last store to a cell tells those who read it, by how far it tells it.

    passes_on: whether that is an atomic that has met another thread's message, and passes on what it tells
    by_reach: what threads have acquired of it, by how far; last: the last that did: what it knew before, and after
    """

    __slots__ = ("owner", "parts", "passes_on", "by_reach", "last")

    def __init__(self, owner: Owner, parts: dict[int, Knowledge], passes_on: bool):
        self.owner = owner
        self.parts = parts
        self.passes_on = passes_on
        self.by_reach: dict[int, Knowledge] = {}
        self.last: tuple[Knowledge, int, Knowledge] = NOTHING, 0, NOTHING

    def heard(self, needed: int) -> Knowledge:
        return join(part for reach, part in self.parts.items() if reach >= needed)

    def heard_by_thread(self, needed: int) -> Knowledge:
        """The same, but a proxy fence of another block says nothing to the copy engine of who reads it."""
        if needed not in self.by_reach:
            said = self.heard(needed)
            if needed > SCOPES["cta"]:
                said = said._replace(engine=NOTHING.engine, shared=NOTHING.shared, read=NOTHING.read)
            self.by_reach[needed] = said
        return self.by_reach[needed]

    def known_by(self, knowledge: Knowledge, needed: int) -> Knowledge:
        """What one knows then who has known so much before: the same for all lanes that know the same."""
        before, reach, after = self.last
        if before is not knowledge or reach != needed:
            after = join_two(knowledge, self.heard_by_thread(needed))
            self.last = knowledge, needed, after
        return after


class Epoch:
    """What one thread does between two of its signals: the same one tells of all of it. Loads have epochs of their own.

    number: of the first signal that tells of it; at_exit: that was the end of the kernel
    A bulk copy is an epoch by itself until somebody has waited for it.
    """

    __slots__ = ("number", "at_exit")

    def __init__(self, number: int = NOT_YET):
        self.number = number
        self.at_exit = False


class Signalled:
    """What the signals of a thread tell of.

    proxy_fences: the signals at its thread's proxy fences for this kind of memory; of a load, if that is shared
    """

    proxy_fences: Sequence[int] = ()

    def __init__(self, owner: Owner, epoch: Epoch, proxy_fences: Sequence[int] = ()):
        self.owner = owner
        self.epoch = epoch
        self.proxy_fences = proxy_fences

    @property
    def number(self) -> int:
        return self.epoch.number

    @property
    def at_exit(self) -> bool:
        return self.epoch.at_exit

    def is_beyond(self, known: Numbers) -> bool:
        """Whether no signal with a known number tells of it."""
        owner, number = self.owner, self.epoch.number
        if number >= NOT_YET:
            return True
        clock = owner.clock
        if number <= known.get(clock, 0) or number <= known.get(ALL_CLOCKS, 0):
            return False
        if number <= known.get(stream_of(clock), 0):
            return False
        return owner.own == 0 or number > known.get(owner.own, 0)


class Access(Signalled):
    """A store or a load of some bytes.

    reach: of its scope; 0 for a weak one, which may meet no other access unordered
    serving: the queue pair and the entry that a NIC did it for
    observed_by: of a strong store, the threads that have read its value with strong loads, and when they released next
    successor: of a strong store, the atomic that has read its value and stored after it
    For reports: time: how much history there was; is_atomic: whether it is the store of an atomic; before: of a
    store, those whose bytes it took before anybody has loaded them, the last first; of a load, the first one of its
    thread to these bytes since they were stored.
    """

    # What few accesses have otherwise; there is one for each load and store of a run.
    serving: tuple[int, int] | None = None
    is_atomic = False
    before: tuple[Access, ...] = ()
    observed_by: tuple[Signalled, ...] = ()
    successor: Access | None = None

    def __init__(
        self, owner: Owner, epoch: Epoch, verb: str, begin: int, end: int, order: str, scope: str, site: Site | None,
        time: int = 0,
    ):  # fmt: skip
        self.owner = owner
        self.epoch = epoch
        self.verb = verb
        self.begin = begin
        self.end = end
        self.order = order
        self.scope = scope
        self.reach = 0 if order in WEAK else SCOPES[scope]
        self.site = site
        self.time = time

    @property
    def granules(self) -> range:
        """In which its bytes lie: one, but for bulk copies and the CPU."""
        return range(self.begin >> GRANULE_BITS, (self.end - 1 >> GRANULE_BITS) + 1)

    def observations(self) -> Iterator[Signalled]:
        """Who comes behind it in PTX's observation order: readers of its value, or of what atomics have made of that.

        A store is before all that one of them is before in base causality order: what their signals tell of.
        """
        store: Access | None = self
        while store is not None:
            yield from store.observed_by
            store = store.successor

    @property
    def noun(self) -> str:
        if self.is_atomic:
            return "atomic"
        return f"bulk {self.verb}" if self.order == "bulk" else self.verb

    @property
    def how(self) -> str:
        return f"{self.order}.{self.scope}" if self.reach else self.order


def stream_clock(number: int) -> int:
    """Of the number-th stream, from 1."""
    return number << STREAM_BITS


def stream_of(clock: int) -> int:
    """The clock of the stream in which a warp, a thread or a copy engine runs."""
    return abs(clock) >> STREAM_BITS << STREAM_BITS


def latest(numbers: Numbers, clock: int) -> int:
    """The latest signal by a clock that is known."""
    return max(numbers.get(clock, 0), numbers.get(stream_of(clock), 0), numbers.get(ALL_CLOCKS, 0))


def without_parts(numbers: Numbers) -> Numbers:
    """The same without the numbers that those of streams say as well."""
    return {
        clock: number
        for clock, number in numbers.items()
        if (stream := stream_of(clock)) in (0, clock) or number > numbers.get(stream, 0)
    }


class Overwritten:
    """Stores to a granule over which a strong store has stored: who comes behind that one need not know of them.

    by: how far they reach and where that is -> the stores, the last one last
    ranges: the bytes of those that are or were there: most granules have few, and then there is nothing to look for
    """

    __slots__ = ("by", "limit", "ranges")

    def __init__(self) -> None:
        self.by: dict[tuple[int, int], list[Access]] = {}
        self.ranges: set[tuple[int, int]] = set()
        self.limit = MANY_STORES

    def add(self, store: Access) -> None:
        stores = self.by.setdefault(where(store.owner, store.reach), [])
        stores.append(store)
        self.ranges.add((store.begin, store.end))
        if len(stores) >= self.limit:
            last = {(id(one.owner), one.begin, one.end): one for one in stores[: -MANY_STORES // 2]}
            stores[: -MANY_STORES // 2] = last.values()
            self.limit = max(MANY_STORES, 2 * len(stores))

    def may_meet(self, access: Access) -> Iterator[Access]:
        """Those that an access may not meet unordered."""
        begin, end = access.begin, access.end
        is_mixed = any(one < end and begin < other and (one, other) != (begin, end) for one, other in self.ranges)
        for (reach, place), stores in self.by.items():
            if reach == 0 or access.reach < reach or place != where(access.owner, reach)[1]:
                yield from stores
            elif is_mixed:
                yield from (store for store in stores if is_partial(store, access))

    def keep(self, store: Access, granule: int) -> bool:
        """Forget those whose bytes a weak store takes, which knows of them. Whether some are left."""
        for key, stores in list(self.by.items()):
            self.by[key] = [old for old in stores if _is_left(old, store, granule)]
        return any(self.by.values())


def where(owner: Owner, reach: int) -> tuple[int, int]:
    """Those for whom it is the same may meet if both reach so far."""
    return reach, (0, owner.block, owner.rank, 0)[reach]


def remember_store(allocation: Allocation, store: Access, is_new: Callable[[Access], bool]) -> None:
    """Make a store the last one to its bytes. is_new: whether who stores cannot know of an access

    Who races with what is there before races with a weak store, too. With a strong one it may do what it may not do
    with others: so those stay, and loads that its thread does not know of, or whose scope is smaller.
    """
    alone = [store]  # of all granules that have no other, since no list is changed once it is there
    first, last = store.begin >> GRANULE_BITS, store.end - 1 >> GRANULE_BITS
    for granule in range(first, last + 1) if first < last else (first,):
        stores = allocation.last_stores.get(granule)
        loads = allocation.last_loads.pop(granule, None)
        if not store.reach and granule in allocation.overwritten:
            if not allocation.overwritten[granule].keep(store, granule):
                del allocation.overwritten[granule]
        if not stores and not loads:
            allocation.last_stores[granule] = alone
            continue
        stores, loads = stores or [], loads or {}
        left, remaining, is_read = [], {}, False
        for old in stores:
            if _is_left(old, store, granule):
                left.append(old)
            elif store.reach:
                allocation.overwritten.setdefault(granule, Overwritten()).add(old)
        for key, load in loads.items():
            is_left = _is_left(load, store, granule)
            is_read |= not is_left
            if is_left or (store.reach and (not is_covered(load, store) or is_new(load))):
                remaining[key] = load
        if len(left) < len(stores) and not is_read:
            old = next(old for old in stores if old not in left)
            store.before = old, *old.before[: MAX_BEFORE - 1]
            old.before = ()
        allocation.last_stores[granule] = [*left, store] if left else alone
        if remaining:
            allocation.last_loads[granule] = remaining


def last_to(stores: Iterable[Access], begin: int, end: int) -> Access | None:
    """Of the last stores to a granule, the one whose value these bytes are; None if they are of another size."""
    last = None
    for store in stores:
        if store.begin < end and begin < store.end:
            last = store
    return last if last is not None and (last.begin, last.end) == (begin, end) else None


def is_partial(one: Access, other: Access) -> bool:
    """Whether two accesses that overlap do so in part: then they race if nothing orders them, however strong they are.

    Source: PTX ISA, "Morally strong operations" (they overlap completely), "Limitations on Mixed-size Data-Races"
    """
    return one.begin != other.begin or one.end != other.end


def is_covered(earlier: Access, later: Access) -> bool:
    """Whether all that races with a load also races with a later access, by a thread that knows of the load."""
    if later.reach == 0:
        return later.begin <= earlier.begin and earlier.end <= later.end
    is_as_weak = later.reach <= earlier.reach and later.owner.rank == earlier.owner.rank
    return is_as_weak and not is_partial(earlier, later)


def _is_left(old: Access, store: Access, granule: int) -> bool:
    """Whether an access to some bytes of a granule is to others, too, than a store to it."""
    return (old.begin < store.begin and granule << GRANULE_BITS < store.begin) or (
        store.end < old.end and store.end < (granule + 1) << GRANULE_BITS
    )


def join(knowledge: Iterable[Knowledge]) -> Knowledge:
    """What those who meet know together."""
    together = NOTHING
    for one in {id(one): one for one in knowledge}.values():
        together = join_two(together, one)
    return together


def join_two(a: Knowledge, b: Knowledge) -> Knowledge:
    """The same of two; the object of one of them if the other adds nothing."""
    if a is b or a is NOTHING:
        return b
    if b is NOTHING:
        return a
    a_stores, a_engine, a_loads, a_shared, a_read = a
    b_stores, b_engine, b_loads, b_shared, b_read = b
    stores, engine, loads = later(a_stores, b_stores), later(a_engine, b_engine), later(a_loads, b_loads)
    shared, read = later(a_shared, b_shared), later(a_read, b_read)
    if stores is a_stores and engine is a_engine and loads is a_loads and shared is a_shared and read is a_read:
        return a
    if stores is b_stores and engine is b_engine and loads is b_loads and shared is b_shared and read is b_read:
        return b
    return Knowledge(stores, engine, loads, shared, read)


def with_signals(knowledge: Knowledge, signals: Numbers) -> Knowledge:
    """The knowledge, and what these signals tell, but the copy engine does not know that."""
    return knowledge._replace(stores={**knowledge.stores, **signals}, loads={**knowledge.loads, **signals})


def later(a: Numbers, b: Numbers) -> Numbers:
    """The later number of each clock, without those that are known of all clocks."""
    if not a or a is b:
        return b
    if not b:
        return a
    known = a.get(ALL_CLOCKS, 0)
    new = {clock: number for clock, number in b.items() if a.get(clock, known) < number}
    if not new:
        return a
    known = new.get(ALL_CLOCKS, 0)
    return {**{clock: number for clock, number in a.items() if number > known}, **new} if known else {**a, **new}
