"""What a thread knows of others' stores under `delayed`, to the letter of PTX: for `--all --weak`.

`pending` knows moments: who acquires a release knows all that anybody could see by then. That is cheap, and shows a
bit less than PTX allows. Here a thread knows the very stores that come before its next access in *causality order*,
and a load may miss any other one:

    its own stores, and those that its strong loads have read, if the scopes of both reach each other
    what a release passes on: all that its thread knew. Threads get it that acquire the released value, or one
    that an atomic has made of it, if both scopes reach each other
    what those know whom it has met at a barrier
    the stores of kernels that come before its own one, and what these knew: in its stream, by events, and by what its
    host had waited for or polled when it queued it

A fence tells with every strong store behind it, a release with the later ones to its own cell. Likewise a fence
acquires for every strong load before it, an acquire for those of its own cell.

Of loads a thread knows which are over, for the check of `late_races`. That goes on with all that orders, and also with
every strong store and load that reach each other, relaxed ones too: a load is over before its thread stores anything
behind it, and here it never is later than that.

Source: PTX ISA 8.5, Memory Consistency Model, 8.8 Release and Acquire Patterns, 8.9.5 Causality order
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..machine.access import writes
from ..machine.block import Block
from ..machine.cpu import Cpu
from ..machine.memory import WORD_BYTES, Allocation
from ..machine.orders import ACQUIRES, RELEASES, SCOPES
from ..machine.stream import Order
from ..machine.warp import Warp
from .delayed import DelayedThread
from .pending import GRANULE, MAX_VERSIONS, Version

if TYPE_CHECKING:
    from greenlet import greenlet


class Known(NamedTuple):
    """What comes before something. Never changed once made.

    stores: those, and kernels: all of their accesses
    loads: of each thread, the last of its *spans* that is known: its loads up to the time when it told of them
    """

    stores: frozenset[Any] = frozenset()
    loads: Mapping[Any, int] = MappingProxyType({})

    def __or__(self, other: Known) -> Known:
        return Known(self.stores | other.stores, later(self.loads, other.loads))

    def with_store(self, store: Any) -> Known:
        return Known(self.stores | {store}, self.loads)

    @property
    def of_loads(self) -> Known:
        """The same without the stores."""
        return Known(loads=self.loads)


NOTHING = Known()


def later(a: Mapping[Any, int], b: Mapping[Any, int]) -> Mapping[Any, int]:
    """The later span of each thread."""
    if not b or a is b:
        return a
    return {**a, **{who: span for who, span in b.items() if a.get(who, 0) < span}} if a else b


class Releaser(NamedTuple):
    """Where a release was made, and how far it reaches."""

    rank: int
    block: int
    reach: int


Released = dict[Releaser, Known]  # never changed once made


def joined(*parts: Released) -> Released:
    """What several tell."""
    found: Released = {}
    for part in parts:
        for releaser, known in part.items():
            found[releaser] = found.get(releaser, NOTHING) | known
    return found


class CausalVersion(Version):
    """A store.

    launch: of its thread; tells: who acquires it; observed: what an atomic has read, and what that had
    forgotten: of the oldest store to its 16 bytes that is kept, those before it, the last one to each cell
    """

    __slots__ = ("forgotten", "launch", "observed", "tells")

    def __init__(self, thread: Any, begin: int, nbytes: int, order: str, scope: str):
        super().__init__(thread, begin, nbytes, order, scope, 0)
        self.launch: Any = thread.block.launch
        self.observed: frozenset[Any] = frozenset()
        self.tells: Released = {}
        self.forgotten: dict[tuple[int, int], CausalVersion] = {}

    def arrive(self, allocation: Allocation, moment: int) -> None:
        versions: Any = allocation.versions.get(self.begin // GRANULE, ())
        if len(versions) == MAX_VERSIONS:
            oldest, then, *_ = versions
            cell = oldest.begin, oldest.end
            others = {where: one for where, one in oldest.forgotten.items() if where != cell}
            then.forgotten = {**others, cell: oldest}
        super().arrive(allocation, moment)

    def pass_on(self, said: Any) -> None:
        observed, tells = said
        self.observed |= observed
        self.tells = joined(self.tells, tells)


class CausalThread(DelayedThread):
    """A thread that knows the stores which come before its next access.

    known: those; version: its last store
    span: of its loads now; observed: the stores that its last access has read, and that it did not know before
    read: the store whose value that was, if it is strong
    by_fences, released: what its fences have released, and its releases, by cell
    tellings: what the strong stores that it has read have released, by cell; a new dict each time: polls are taken back
    """

    __slots__ = ("by_fences", "known", "observed", "read", "tellings", "released", "span", "version")

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        self.known: Known = block.launch.known
        self.by_fences: Released = {}
        self.released: dict[Any, Released] = {}
        self.tellings: dict[Any, Released] = {}
        self.version: CausalVersion | None = None
        self.observed: frozenset[Any] = frozenset()
        self.read: CausalVersion | None = None
        self.span = 1

    # --- what it knows --------------------------------------------------------------------------------------------

    def begin_access(self) -> None:
        self.observed, self.read = frozenset(), None

    def knows(self, version: Any) -> bool:
        return version in self.known.stores or version.launch in self.known.stores

    def choose(self, allocation: Allocation, granule: int, versions: list[Version]) -> int:
        least = count = len(versions)
        while least and not self.knows(versions[least - 1]):
            least -= 1
        return count if least == count else self.pick_version(versions, least)

    def pick_version(self, versions: list[Version], least: int) -> int:
        """How many of the versions a load takes, of those that it may miss."""
        raise NotImplementedError

    def acquire(self, tells: Released, reach: int, *, all_of_it: bool = True) -> None:
        """What is told as far as it reaches. all_of_it: else of loads alone"""
        for releaser, known in tells.items():
            if min(releaser.reach, reach) >= self.distance(releaser):
                self.known |= known if all_of_it else known.of_loads

    def distance(self, other: Releaser) -> int:
        return 1 if other.block == self.block.serial else 2 if other.rank == self.rank else 3

    # --- what it tells --------------------------------------------------------------------------------------------

    def told(self) -> Known:
        """What comes before whatever it does next, its own loads included, as it tells that now."""
        self.span += 1
        return Known(self.known.stores, {**self.known.loads, self: self.span - 1})

    def new_version(self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str) -> Version:
        version = self.version = CausalVersion(self, offset, nbytes, order, scope)
        self.known = self.known.with_store(version)
        if version.reach:
            cell = allocation, offset
            self.release(cell, order, scope)  # the store comes before whatever acquires it
            loads = {Releaser(self.rank, self.block.serial, version.reach): self.told().of_loads}
            version.tells = joined(self.released_to(cell), loads)
        return version

    def released_to(self, cell: Any) -> Released:
        return joined(self.by_fences, self.released.get(cell, {}))

    def release(self, cell: Any, order: str, scope: str) -> None:
        if order in RELEASES:
            here = Releaser(self.rank, self.block.serial, SCOPES[scope])
            self.released[cell] = joined(self.released.get(cell, {}), {here: self.told()})

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        if order in RELEASES and self.version is not None and writes(op, old, compare):
            cell = self.segments.get(address >> 32), address & 0xFFFFFFFF
            self.release(cell, order, scope)  # it tells what it has acquired itself, too
            self.version.pass_on((frozenset(), self.released_to(cell)))
        return old

    def fence(self, order: str, scope: str) -> None:
        super().fence(order, scope)
        if order in RELEASES:
            self.acquire(joined(*self.tellings.values()), SCOPES[scope])
            here = Releaser(self.rank, self.block.serial, SCOPES[scope])
            self.by_fences = joined(self.by_fences, {here: self.told()})

    def hear(
        self, allocation: Allocation, versions: list[Version], offset: int, nbytes: int, order: str, scope: str
    ) -> Any:
        """What it has read, if that and the store reach each other; what an atomic passes on of it."""
        reach, cell = SCOPES[scope], (allocation.identity, offset)
        self.read = version_in(allocation, versions, offset, nbytes)
        observed, tells = read_from(self.read, self, offset, nbytes, reach)
        self.meet_tellings(cell, tells, order, reach)
        self.observe(observed)
        return observed, tells

    def hear_late(self, allocation: Allocation, versions: list[Version], offset: int, nbytes: int, scope: str) -> Any:
        """What loads it tells of may be under way when what comes behind the atomic is."""
        loads = self.known.loads
        said = super().hear_late(allocation, versions, offset, nbytes, scope)
        self.known = Known(self.known.stores, loads)
        return said

    def meet_tellings(self, cell: Any, tells: Released, order: str, reach: int) -> None:
        """What it has read in a cell tells this, now or if it acquires later."""
        self.tellings = {**self.tellings, cell: joined(self.tellings.get(cell, {}), tells)}
        self.acquire(self.tellings[cell], reach, all_of_it=order in ACQUIRES)

    def observe(self, stores: frozenset[Any]) -> None:
        """It has read them: they come before its next access, but not before this one."""
        self.observed = stores - self.known.stores
        self.known = Known(self.known.stores | stores, self.known.loads)

    # --- shared memory, and those whom it meets -------------------------------------------------------------------

    def tell_shared(self, address: int, nbytes: int, order: str, modifies: bool) -> None:
        """The last store to a cell of shared memory: what it tells is there for who reads it."""
        releases: dict[int, Any] = self.block.shared_releases
        before = releases.get(address)
        version: Any = self.new_version(self.shared, address, nbytes, order, "cta")
        if modifies:
            version.pass_on(read_from(before, self, address, nbytes, version.reach))
        releases[address] = version

    def hear_shared(self, address: int, nbytes: int, order: str) -> None:
        releases: dict[int, Any] = self.block.shared_releases
        self.read = releases.get(address)
        observed, tells = read_from(self.read, self, address, nbytes, SCOPES["cta"])
        self.meet_tellings((self.shared, address), tells, order, SCOPES["cta"])
        self.observe(observed)

    def with_own(self, known: Any, heard: int = 0) -> Any:
        return self.told() | (known or NOTHING)

    def learn(self, floor: Any, block_floor: int) -> None:
        self.known |= floor

    def hear_phase(self, mbarrier: Any) -> None:
        """It knows what those knew who arrived in that phase, and what the copies of it have done."""
        self.known |= mbarrier.phase_knowledge or NOTHING

    def leave(self) -> None:
        launch = self.block.launch
        stores = frozenset(one for one in self.known.stores if getattr(one, "launch", None) is not launch)
        launch.learned |= Known(stores, self.known.loads)
        super().leave()


def version_in(allocation: Allocation, versions: list[Version], offset: int, nbytes: int) -> CausalVersion | None:
    """The last store to some bytes, of these or of those that are kept no more."""
    kept: Any = allocation.versions.get(offset // GRANULE)
    older = kept[0].forgotten.values() if kept else ()
    for version in (*reversed(versions), *reversed(older)):
        if version.overlaps(offset, offset + nbytes):
            assert isinstance(version, CausalVersion)
            return version
    return None


def read_from(
    version: CausalVersion | None, reader: Any, offset: int, nbytes: int, reach: int
) -> tuple[frozenset[Any], Released]:
    """What a strong access has read, if that and the store reach each other; and what it may acquire.

    Nothing if the store has other bytes: the two are not morally strong then.
    """
    if version is not None and min(version.reach, reach) >= version.distance(reader):
        if (version.begin, version.end) == (offset, offset + nbytes):
            return version.observed | {version}, version.tells
    return frozenset(), {}


class Mind:
    """A host as a thread: what it has waited for or polled it knows, and its words tell. It stands for its own block.

    version: its last store; word: that, as long as it writes one that threads may poll; span: as of a thread
    """

    rank, thread_idx = -1, 0
    launch = None

    def __init__(self, world: Any, known: Known):
        self.serial: int = world.count_block()
        self.known = known
        self.span = 1
        self.version: CausalVersion | None = None
        self.word: CausalVersion | None = None

    @property
    def block(self) -> Mind:
        return self

    def told(self) -> Known:
        """What comes before whatever it queues or stores next."""
        self.span += 1
        return Known(self.known.stores, {**self.known.loads, self: self.span - 1})


class CausalHost(Cpu):
    """The hosts, each of which knows for itself. See `host`: one that waits for others knows then what all know.

    minds: by rank; None: the caller of the world, from whom hosts begin
    """

    def __init__(self, world: Any):
        self.world = world
        self.minds: dict[int | None, Mind] = {None: Mind(world, NOTHING)}

    @property
    def mind(self) -> Mind:
        """That of the host that runs now."""
        return self.mind_of(self.world.host_rank)

    def mind_of(self, rank: int | None) -> Mind:
        if rank not in self.minds:
            self.minds[rank] = Mind(self.world, self.minds[None].told())
        return self.minds[rank]

    def wait(self, known: Known) -> None:
        self.mind.known |= known

    def tells(self) -> Known:
        return self.mind.told()

    def hears(self, told: Iterable[Known]) -> None:
        for known in told:
            self.mind.known |= known

    def meets(self) -> None:
        self.meet_all([self.world.host_rank])

    def meet_all(self, ranks: list[Any]) -> None:
        """Hosts have waited for others, before any of them goes on."""
        if ranks:
            together = NOTHING
            for mind in self.minds.values():
                together |= mind.told()
            for rank in ranks:
                self.mind_of(rank).known |= together

    def read(self, allocation: Allocation, offset: int, nbytes: int, polls: bool) -> None:
        super().read(allocation, offset, nbytes, polls)
        if polls:
            mind = self.mind
            versions = allocation.versions.get(offset // GRANULE, [])
            version = version_in(allocation, versions, offset, nbytes)
            observed, tells = read_from(version, mind, offset, nbytes, SCOPES["sys"])
            for releaser, known in tells.items():
                if releaser.reach == SCOPES["sys"]:
                    mind.known |= known
            mind.known |= Known(observed)

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        mind, is_word = self.mind, nbytes <= WORD_BYTES
        version = mind.version = CausalVersion(mind, offset, nbytes, "release" if is_word else "weak", "sys")
        mind.known = mind.known.with_store(version)
        if is_word:
            mind.word = version
            version.tells = {Releaser(mind.rank, mind.serial, SCOPES["sys"]): mind.told()}
            version.keep(allocation)

    def has_written(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        super().has_written(allocation, offset, nbytes)
        mind = self.mind
        version, mind.word = mind.word, None
        if version is not None:
            self.world.moment += 1
            version.arrive(allocation, self.world.moment)


class CausalOrder(Order):
    """What kernels know when they start.

    points: of each stream, what comes before whatever stands there next
    """

    def __init__(self, world: Any):
        self.world = world
        self.points: dict[Any, Known] = {}

    def queued(self, stream: Any) -> Known:
        return self.world.cpu.mind.told()

    def point(self, stream: Any, queued: Known) -> Known:
        self.points[stream] = self.points.get(stream, NOTHING) | queued
        return self.points[stream]

    def start(self, launch: Any, queued: Known) -> None:
        launch.known = launch.learned = self.point(launch.stream, queued)

    def end(self, launch: Any) -> None:
        self.points[launch.stream] = launch.learned.with_store(launch)

    def record(self, mark: Any, queued: Known) -> None:
        mark.point = self.point(mark.stream, queued)

    def wait(self, stream: Any, mark: Any, queued: Known) -> None:
        self.points[stream] = self.point(stream, queued) | mark.point

    def seen(self, mark: Any) -> None:
        self.world.cpu.wait(mark.point)
