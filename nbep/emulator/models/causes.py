"""What a thread knows of others' stores under `delayed`, to the letter of PTX: for `--all --weak`.

`versions` knows moments: who acquires a release knows all that anybody could see by then. That is cheap, and shows a
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

Source: PTX ISA 8.5, Memory Consistency Model, 8.8 Release and Acquire Patterns, 8.9.5 Causality order
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..machine.block import Block
from ..machine.cpu import Cpu
from ..machine.memory import WORD_BYTES, Allocation
from ..machine.order import Order
from ..machine.orders import ACQUIRES, RELEASES, SCOPES
from ..machine.warp import Warp
from .delayed import DelayedThread
from .versions import GRANULE, Version

if TYPE_CHECKING:
    from greenlet import greenlet

Known = frozenset[Any]  # stores, and kernels: all of their stores
NOTHING: Known = frozenset()


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
    """A store. launch: of its thread; tells: who acquires it; observed: what an atomic has read, and what that had"""

    __slots__ = ("launch", "observed", "tells")

    def __init__(self, thread: Any, begin: int, nbytes: int, order: str, scope: str):
        super().__init__(thread, begin, nbytes, order, scope, 0)
        self.launch: Any = thread.block.launch
        self.observed: Known = NOTHING
        self.tells: Released = {}

    def pass_on(self, said: Any) -> None:
        observed, tells = said
        self.observed |= observed
        self.tells = joined(self.tells, tells)


class CausalThread(DelayedThread):
    """A thread that knows the stores which come before its next access.

    known: those
    by_fences, released: what its fences have released, and its releases, by cell
    tellings: what the strong stores that it has read have released, by cell; a new dict each time: polls are taken back
    """

    __slots__ = ("by_fences", "known", "latest", "tellings", "released")

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        self.known: Known = block.launch.known
        self.by_fences: Released = {}
        self.released: dict[Any, Released] = {}
        self.tellings: dict[Any, Released] = {}
        self.latest: CausalVersion | None = None

    # --- what it knows --------------------------------------------------------------------------------------------

    def knows(self, version: Any) -> bool:
        return version in self.known or version.launch in self.known

    def choose(self, allocation: Allocation, granule: int, versions: list[Version]) -> int:
        least = count = len(versions)
        while least and not self.knows(versions[least - 1]):
            least -= 1
        return count if least == count else self.pick_version(versions, least)

    def pick_version(self, versions: list[Version], least: int) -> int:
        """How many of the versions a load takes, of those that it may miss."""
        raise NotImplementedError

    def acquire(self, tells: Released, reach: int) -> None:
        for releaser, known in tells.items():
            if min(releaser.reach, reach) >= self.distance(releaser):
                self.known |= known

    def distance(self, other: Releaser) -> int:
        return 1 if other.block == self.block.serial else 2 if other.rank == self.rank else 3

    # --- what it tells --------------------------------------------------------------------------------------------

    def new_version(self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str) -> Version:
        version = self.latest = CausalVersion(self, offset, nbytes, order, scope)
        self.known |= {version}
        if version.reach:
            version.tells = self.released_to((allocation, offset))
        return version

    def released_to(self, cell: Any) -> Released:
        return joined(self.by_fences, self.released.get(cell, {}))

    def release(self, cell: Any, order: str, scope: str) -> None:
        if order in RELEASES:
            here = Releaser(self.rank, self.block.serial, SCOPES[scope])
            self.released[cell] = joined(self.released.get(cell, {}), {here: self.known})

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        cell = self.segments.get(address >> 32), address & 0xFFFFFFFF
        self.release(cell, order, scope)
        super().store(address, kind, value, order, scope)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        cell = self.segments.get(address >> 32), address & 0xFFFFFFFF
        self.release(cell, order, scope)
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        if order in RELEASES and self.latest is not None:  # it tells what it has acquired itself, too
            self.release(cell, order, scope)
            self.latest.pass_on((NOTHING, self.released_to(cell)))
        return old

    def fence(self, order: str, scope: str) -> None:
        super().fence(order, scope)
        if order in RELEASES:
            self.acquire(joined(*self.tellings.values()), SCOPES[scope])
            here = Releaser(self.rank, self.block.serial, SCOPES[scope])
            self.by_fences = joined(self.by_fences, {here: self.known})

    def hear(
        self, allocation: Allocation, versions: list[Version], offset: int, nbytes: int, order: str, scope: str
    ) -> Any:
        """What it has read, if that and the store reach each other; what an atomic passes on of it."""
        reach, cell = SCOPES[scope], (allocation, offset)
        observed, tells = read_from(versions, self, offset, nbytes, reach)
        self.known |= observed
        self.tellings = {**self.tellings, cell: joined(self.tellings.get(cell, {}), tells)}
        if order in ACQUIRES:
            self.acquire(self.tellings[cell], reach)
        return observed, tells

    # --- shared memory, and those whom it meets -------------------------------------------------------------------

    def tell_shared(self, address: int, order: str, modifies: bool) -> None:
        releases: dict[int, Any] = self.block.shared_releases
        cell = self.shared, address
        if order == "weak":
            releases.pop(address, None)
            return
        self.release(cell, order, "cta")
        releases[address] = joined(self.released_to(cell), releases.get(address, {}) if modifies else {})

    def hear_shared(self, address: int, order: str) -> None:
        cell = self.shared, address
        tells: Any = self.block.shared_releases.get(address, {})
        self.tellings = {**self.tellings, cell: joined(self.tellings.get(cell, {}), tells)}
        if order in ACQUIRES:
            self.acquire(self.tellings[cell], SCOPES["cta"])

    def with_own(self, known: Any, heard: int = 0) -> Any:
        return self.known | (known or NOTHING)

    def learn(self, floor: Any, block_floor: int) -> None:
        self.known |= floor

    def leave(self) -> None:
        launch = self.block.launch
        launch.learned |= {one for one in self.known if getattr(one, "launch", None) is not launch}
        super().leave()


def read_from(versions: list[Version], reader: Any, offset: int, nbytes: int, reach: int) -> tuple[Known, Released]:
    """What a strong access has read, if that and the store reach each other; and what it may acquire."""
    for version in reversed(versions):
        if version.overlaps(offset, offset + nbytes):
            assert isinstance(version, CausalVersion)
            if min(version.reach, reach) >= version.distance(reader):
                return version.observed | {version}, version.tells
            break
    return NOTHING, {}


class CausalHost(Cpu):
    """The CPU of all ranks, as a thread of its own: what it has waited for or polled it knows, and its words tell."""

    rank, thread_idx = -1, 0
    launch = None

    def __init__(self, world: Any):
        self.world = world
        self.serial: int = world.count_block()
        self.known: Known = NOTHING
        self.version: CausalVersion | None = None  # the word that it writes now

    @property
    def block(self) -> CausalHost:
        """It stands for its own block."""
        return self

    def wait(self, known: Known) -> None:
        self.known |= known

    def read(self, allocation: Allocation, offset: int, nbytes: int, polls: bool) -> None:
        if polls:
            versions = allocation.versions.get(offset // GRANULE, [])
            observed, tells = read_from(versions, self, offset, nbytes, SCOPES["sys"])
            released = (known for releaser, known in tells.items() if releaser.reach == SCOPES["sys"])
            self.known = self.known.union(observed, *released)

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        if nbytes <= WORD_BYTES:
            version = self.version = CausalVersion(self, offset, nbytes, "release", "sys")
            self.known |= {version}
            version.tells = {Releaser(self.rank, self.serial, SCOPES["sys"]): self.known}
            version.keep(allocation)

    def has_written(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        super().has_written(allocation, offset, nbytes)
        version, self.version = self.version, None
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
        return self.world.cpu.known

    def point(self, stream: Any, queued: Known) -> Known:
        self.points[stream] = self.points.get(stream, NOTHING) | queued
        return self.points[stream]

    def start(self, launch: Any, queued: Known) -> None:
        launch.known = launch.learned = self.point(launch.stream, queued)

    def end(self, launch: Any) -> None:
        self.points[launch.stream] = launch.learned | {launch}

    def record(self, mark: Any, queued: Known) -> None:
        mark.point = self.point(mark.stream, queued)

    def wait(self, stream: Any, mark: Any, queued: Known) -> None:
        self.points[stream] = self.point(stream, queued) | mark.point

    def seen(self, mark: Any) -> None:
        self.world.cpu.wait(mark.point)
