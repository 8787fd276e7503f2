"""A run whose threads are compiled and checked: hosts and streams, as `models.host` sees them.

What a host knows lies in vectors of its own; what stands in streams has copies of them. Both are changed by NumPy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import finalize

import numpy as np

from ..machine.arrays import History
from ..machine.block import WARP_SIZE
from ..machine.memory import Allocation
from ..machine.stream import Order
from ..models.knowledge import CPU
from . import Stopped, state
from .state import MOST_CLOCKS, MOST_THREADS, address_of
from .world import ROUND, CompiledBlock, CompiledWorld, HostMemory, field, rounded

READS, POLLS, LOOKS = range(3)  # as `signals` has them
ALL_RANKS = -2


class Known(NamedTuple):
    """Of stores and of loads: the number of the latest signal that is known, by clock."""

    stores: np.ndarray
    loads: np.ndarray

    def copy(self) -> Known:
        return Known(self.stores.copy(), self.loads.copy())

    def add(self, other: Known) -> Known:
        for mine, theirs in zip(self, other, strict=True):
            np.maximum(mine, theirs, out=mine)
        return self


class CheckedMemory(HostMemory):
    """The hosts as readers and writers whose accesses are checked; see `models.host.CheckedHost`."""

    def __init__(self, world: CheckedWorld):
        super().__init__(world)
        self._world: CheckedWorld = world
        self._numbers: dict[int | None, int] = {}

    def number(self) -> int:
        """Of the mind of the host that runs now."""
        rank = self._world.host_rank
        if rank not in self._numbers:
            self._numbers[rank] = self._world.new_host(len(self._numbers))
        return self._numbers[rank]

    def known(self, who: int) -> Known:
        rows = self._world.tables.knowledge[self._world.tables.minds["known"][who]]
        return Known(self._world.vector(rows["stores"]), self._world.vector(rows["loads"]))

    def tells(self) -> Known:
        return self.known(self.number()).copy()

    def hears(self, told: Iterable[Known]) -> None:
        mine = self.known(self.number())
        for one in told:
            mine.add(one)

    def meets(self) -> None:
        self.hears([self.known(who) for who in self._numbers.values()])

    def wait(self, known: Known) -> None:
        self.hears([known])

    def read(self, allocation: Any, offset: int, nbytes: int, polls: bool) -> None:
        self.has_looked = True
        self._ask("host_load", allocation, offset, nbytes, POLLS if polls else READS)

    def looks(self, allocation: Any, offset: int, nbytes: int) -> None:
        self._ask("host_load", allocation, offset, nbytes, LOOKS)

    def write(self, allocation: Any, offset: int, nbytes: int) -> None:
        self._ask("host_store", allocation, offset, nbytes)

    def frees(self, allocation: Any) -> None:
        self._give_up(allocation, ALL_RANKS)

    def unmaps(self, allocation: Any, rank: int) -> None:
        self._give_up(allocation, rank)

    def _give_up(self, allocation: Any, rank: int) -> None:
        if not self._world.has_failed:
            self._ask("remains", allocation, allocation.nbytes, rank)

    def _ask(self, name: str, allocation: Any, *arguments: int) -> None:
        world = self._world
        if world.failure is not None or world.is_over or not allocation.nbytes:
            return
        if world.ask(name, self.number(), world.notes_at(allocation), *arguments):
            world.stop_host(state.RACE)


class CheckedOrder(Order):
    """What a kernel knows when it starts; see `models.host.CheckedOrder`."""

    def __init__(self, world: CheckedWorld):
        self.world = world
        self.points: dict[Any, Known] = {}
        self.clocks: dict[Any, int] = {}
        self.learned: dict[Any, Known] = {}

    def clock_of(self, stream: Any) -> int:
        if stream not in self.clocks:
            self.clocks[stream] = self.world.new_clock()
        return self.clocks[stream]

    def queued(self, stream: Any) -> Known:
        cpu = self.world.cpu
        known, own = cpu.tells(), self.world.slot_of(cpu.number())
        known.stores[own] = known.loads[own] = self.world.signals
        return known

    def point(self, stream: Any, queued: Known) -> Known:
        self.points[stream] = queued.copy().add(self.points[stream]) if stream in self.points else queued
        return self.points[stream]

    def start(self, launch: Any, queued: Known) -> None:
        point = self.point(launch.stream, queued)
        self.world.start_launch(launch, point.stores, np.maximum(point.loads, point.stores))

    def end(self, launch: Any) -> None:
        point, clock = self.learned.pop(launch), self.clock_of(launch.stream)
        point.stores[clock] = point.loads[clock] = self.world.signals
        self.points[launch.stream] = point

    def record(self, mark: Any, queued: Known) -> None:
        mark.point = self.point(mark.stream, queued)

    def wait(self, stream: Any, mark: Any, queued: Known) -> None:
        self.points[stream] = self.point(stream, queued).copy().add(mark.point)

    def seen(self, mark: Any) -> None:
        self.world.cpu.wait(mark.point)


class CheckedWorld(CompiledWorld):
    """See `World`; for the model "checked" alone."""

    signals, has_failed = field("signals"), field("has_failed")
    model = "checked"
    host_class = CheckedMemory
    num_sides = 4  # with the notes of `races`
    cpu: Any

    def __init__(self, num_ranks: int, seed: int = 0, **options: Any):
        self._notes: dict[int, tuple[np.ndarray, dict, Allocation | None]] = {}  # by the id of what all mappings share
        self._dead: list[int] = []
        self._num_owners = 0
        self._retired: deque[int] = deque()  # clocks of launches that are over
        self._left: deque[tuple[int, int]] = deque()  # clocks, with their owners, of blocks that have left
        self.is_strict = False  # clocks are used again: what was done under them before may look unordered
        self._num_live = 0
        super().__init__(num_ranks, seed, **options)
        self.tables.run["num_clocks"] = 1
        self.order: Any = CheckedOrder(self)

    # --- what the tables say of hosts, clocks and knowledge -----------------------------------------------------

    def ask(self, name: str, *arguments: int) -> int:
        """The result of a compiled function."""
        made = self.call(name, *map(int, arguments))
        if self.tables.run["event"] == state.STOPPED and self.failure is None:
            self.stop_host(int(self.tables.run["fault"]))
        return made

    def stop_host(self, reason: int) -> None:
        """A host has met what stops the run."""
        self.tables.run["fault"] = reason
        stopped = Stopped(f"a host: {state.REASONS[reason]}", reason not in state.NO_FAILURES)
        self._end_with(stopped)

    def vector(self, number: int) -> np.ndarray:
        begin = int(number) * MOST_CLOCKS
        return self.tables.numbers[begin : begin + MOST_CLOCKS]

    def new_vector(self, numbers: np.ndarray) -> int:
        number = self.ask("copy_vector", 0)
        self.vector(number)[:] = numbers
        return number

    def new_clock(self) -> int:
        """One that is free; one of a launch that is over, once there are many of those; else one of a block that is."""
        new = int(self.tables.run["num_clocks"])
        if self._retired and (len(self._retired) > 2 * self._num_live + 64 or new >= MOST_CLOCKS):
            self.is_strict = True
            return self._retired.popleft()
        while new >= MOST_CLOCKS and self._left:
            clock, owner = self._left.popleft()
            if self.tables.clocks[clock] == owner:
                self.is_strict = True
                return clock
        if new >= MOST_CLOCKS:
            self._give_up("more warps run at once than the engine has clocks")
        self.tables.run["num_clocks"] = new + 1
        return new

    def new_owner(self, clock: int, stream: int, rank: int, block: int) -> int:
        self._num_owners += 1
        if self._num_owners >= state.MOST_OWNERS:
            self._give_up("more warps have run than the engine counts")
        self.tables.owners[self._num_owners] = clock, stream, rank, block
        self.tables.clocks[clock] = self._num_owners
        return self._num_owners

    def new_host(self, number: int) -> int:
        clock, who = self.new_clock(), MOST_THREADS + number
        mind = self.tables.minds[who]
        mind["owner"] = self.new_owner(clock, clock, CPU, self.count_block())
        nothing = self.vector(0)
        mind["known"] = self.ask("new_knowledge", self.new_vector(nothing), 0, self.new_vector(nothing), 0, 0)
        return who

    def slot_of(self, who: int) -> int:
        return int(self.tables.owners["slot"][self.tables.minds["owner"][who]])

    # --- launches -----------------------------------------------------------------------------------------------

    def start_launch(self, launch: Any, stores: np.ndarray, loads: np.ndarray) -> None:
        """Say what all threads of a launch know. The start of a kernel is a proxy fence as well."""
        one, other = self.new_vector(stores), self.new_vector(loads)
        self.tables.vectors["uses"][one], self.tables.vectors["uses"][other] = 3, 2
        known = self.ask("new_knowledge", one, one, other, one, other)
        self.tables.knowledge["uses"][known] += 1
        here = self.tables.launches[self._launch_row(launch)]
        here["known"] = here["learned"] = known
        launch.clocks = []

    def start_block(self, launch: Any) -> None:
        super().start_block(launch)
        tables, block = self.tables, launch.blocks[-1]
        known, stream = self.tables.launches["known"][self._launches[launch]], self.order.clock_of(launch.stream)
        count, first, number = launch.block, block.number * WARP_SIZE, self.count_block()
        minds = tables.minds[first : first + count]
        minds[:] = 0
        minds["lane"] = np.arange(count) % WARP_SIZE
        minds["known"] = known
        tables.knowledge["uses"][known] += count
        has_copies = launch.smem_bytes and not launch.by_ptx
        for i in range(block.num_warps):
            lanes = minds[i * WARP_SIZE : (i + 1) * WARP_SIZE]
            for name in ("owner", "engine")[: 2 if has_copies else 1]:
                clock = self.new_clock()
                owner = self.new_owner(clock, stream, launch.rank, number)
                self._num_live += 1
                lanes[name] = owner
                launch.clocks.append((clock, owner))
                block.clocks.append((clock, owner))

    def take_back(self, block: CompiledBlock) -> None:
        if self._blocks.get(block.number) is block:
            notes = self.tables.blocks["notes"][block.number]
            self.call("forget", int(notes), rounded(block.launch.smem_bytes))
            self._left += block.clocks
        super().take_back(block)

    def _launch_done(self, launch: Any) -> None:
        number = self._launches[launch]
        here = self.tables.launches[number]
        self.call("end_copies", number)
        learned = self.tables.knowledge[here["learned"]]
        self.order.learned[launch] = Known(self.vector(learned["stores"]), self.vector(learned["loads"])).copy()
        self.call("drop", int(here["learned"]))
        self.call("drop", int(here["known"]))
        self._num_live -= len(launch.clocks)
        self._retired += [clock for clock, owner in launch.clocks if self.tables.clocks[clock] == owner]
        super()._launch_done(launch)

    # --- memory -------------------------------------------------------------------------------------------------

    def notes_at(self, allocation: Allocation) -> int:
        """Where it is noted who has accessed an allocation: 16 bytes for 16, the same for all mappings of its bytes."""
        key = id(allocation.last_stores)
        if key not in self._notes:
            is_array = isinstance(allocation.identity, History)
            if is_array:
                finalize(allocation.identity, self._dead.append, key)
            notes = state.new_zeros((len(allocation.memory) // ROUND + 2) * ROUND)
            self._notes[key] = notes, allocation.last_stores, None if is_array else allocation
        return address_of(self._notes[key][0])

    def _look_around_memory(self) -> None:
        for row, allocation in self._rows.values():
            if allocation.is_hidden and row not in self._unwritten:
                self._look_at(row, allocation)
        super()._look_around_memory()
        self._dead += [key for key, (_, _, owner) in self._notes.items() if owner is not None and owner.freed]
        for key in self._dead:
            notes = self._notes.pop(key)[0]
            self.call("forget", address_of(notes), len(notes) & -ROUND)
        self._dead.clear()
