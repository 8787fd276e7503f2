"""A run whose threads are compiled: `World`, with its state in tables.

Hosts, streams and launches are Python, as they are elsewhere. The lists of the scheduler are tables, of which Python
sees stand-ins; what Python changes in memory, it says to the tables before compiled code goes on.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..machine.access import describe_thread
from ..machine.arrays import History
from ..machine.block import WARP_SIZE
from ..machine.cpu import Cpu
from ..machine.errors import EmulatorError
from ..machine.memory import Allocation
from ..schedule.scheduler import Host, running_host
from ..world import World
from . import Stopped, state
from .build import Library
from .stand_ins import Operations, SharedRandom, Waiting
from .state import AT, OF_BLOCKS, PICK, Tables, address_of
from .switch import Action, Stacks, overflows_caught

NUMBERS = 1 << 22  # of a rank's segments
ROUND = 16
COPY_ENGINE = (9, 0)  # the compute capability for which kernels are compiled


free_stacks: list[Stacks] = []  # of runs that are over
one_thread = threading.RLock()  # compiled functions find the tables of one run; inside of it there may be another one


class Code(Protocol):
    """The compiled functions of a run."""

    def machine(self) -> Library:
        """Those of the machine."""
        ...

    def entry(self, function: Callable) -> int:
        """Where a kernel begins, for threads that find its arguments by themselves."""
        ...


class Segments(dict):
    """An address space's segments, which are rows of a table, too."""

    def __init__(self, world: CompiledWorld):
        super().__init__()
        self.world = world
        self.rows = world.tables.zeros(4 * NUMBERS).view(np.int32)

    def __setitem__(self, number: int, allocation: Allocation) -> None:
        super().__setitem__(number, allocation)
        self.rows[number & NUMBERS - 1] = self.world.enter(allocation)

    def __delitem__(self, number: int) -> None:
        super().__delitem__(number)
        self.rows[number & NUMBERS - 1] = 0


class HostMemory(Cpu):
    """The CPU as a writer: whoever polls what it has written may look again."""

    def __init__(self, world: CompiledWorld):
        self._world = world

    def has_written(self, allocation: Any, offset: int, nbytes: int) -> None:
        group = self._world.groups.get(id(allocation.watchers))
        if group is not None:
            self._world.call("let_look_again", group[0])


class CompiledBlock:
    """A block of compiled threads. number: of its first warp"""

    def __init__(self, world: CompiledWorld, number: int, num_warps: int, memory: int, launch: Any):
        self.world, self.number, self.num_warps, self.memory, self.launch = world, number, num_warps, memory, launch
        self.threads: list[Any] = []
        self.clocks: list[tuple[int, int]] = []  # of its warps; see `checked_world`

    def release(self) -> None:
        """Its launch is done."""
        self.world.take_back(self)


def field(name: str) -> Any:
    """A number of the run, as an attribute of the world."""

    at = AT[name]

    def get(world: CompiledWorld) -> int:
        return world.tables.words[at]

    def put(world: CompiledWorld, value: int) -> None:
        world.tables.words[at] = value

    return property(get, put)


class CompiledWorld(World):
    """See `World`; for the model "sc" alone. num_sides: how much is noted of shared memory, with that itself

    Behind what is noted for all models, at the `notes` of a block, lies what is noted for another one.
    """

    model = "sc"
    host_class: type[HostMemory] = HostMemory
    num_sides = 3
    calls, steps, parks = field("calls"), field("steps"), field("parks")
    has_changed, _granted, _skipped_ns = field("has_changed"), field("granted"), field("skipped")

    def __init__(self, num_ranks: int, seed: int = 0, *, code: Code, **options: Any):
        try:
            self.tables = Tables(self.model)
            self.stacks = free_stacks.pop() if free_stacks else Stacks()
        except OSError as error:
            raise Stopped(f"the system gives no memory for tables and stacks: {error}") from error
        self._code, self._machine = code, code.machine()
        super().__init__(num_ranks, seed, **options)
        tables, run = self.tables, self.tables.run
        self.random = self.strategy.draws = SharedRandom(tables, self._machine, self.random.getstate())
        tables.quanta[:] = self._quanta
        run["operation_rate"] = self.strategy.operation_rate
        run["willing"] = 1 - self.strategy.slow_reluctance
        run["stage"] = PICK
        self.runnable: Any = Waiting(tables, tables.runnable, "num_runnable", self._number_of)
        self.slow: Any = Waiting(tables, tables.slow, "num_slow", self._number_of)
        self.operations: Any = Operations(tables)
        self.cpu = self.host_class(self)
        self._proceed = self._machine.function("nbep_proceed", ctypes.c_int64, ctypes.c_int64)
        self._host_numbers: dict[Host, int] = {}
        self._numbered: list[Host] = []
        self.groups: dict[int, tuple[int, Any]] = {}  # by the id of what holds the watchers of an allocation
        self._rows: dict[int, tuple[int, Allocation]] = {}  # by the id of an allocation: its row
        self._unwritten: dict[int, tuple[Allocation, Any]] = {}  # row -> allocations with a shadow
        self._constants: dict[int, tuple[np.ndarray, Any]] = {}  # by the id of what holds them: who reads as constant
        self._num_rows = 0
        self._free_warps: dict[int, list[int]] = {}  # number of warps -> first warps of blocks that have ended
        self._next_warp = 1
        self._free_memory: dict[int, list[int]] = {}
        self._blocks: dict[int, CompiledBlock] = {}
        self._launches: dict[Any, int] = {}
        self._launch_of: dict[int, Any] = {}
        self._num_launches = 0
        for context in self.ranks.values():
            self._watch_space(context)

    # --- Python's side of memory --------------------------------------------------------------------------------

    def _watch_space(self, context: Any) -> None:
        context.space.cpu = self.cpu
        context.space.segments = Segments(self)

    def add_nic(self, rank: int) -> Any:
        known = set(self.ranks)
        context = super().add_nic(rank)
        if context.rank not in known:
            self._watch_space(context)
        return context

    def enter(self, allocation: Allocation) -> int:
        """The row of an allocation."""
        known = self._rows.get(id(allocation))
        if known is not None and known[1] is allocation:
            return known[0]
        self._num_rows += 1
        if self._num_rows >= state.MOST_SEGMENTS:
            self._give_up("more memory was mapped than the engine counts")
        row = self._num_rows
        self._rows[id(allocation)] = row, allocation
        group = self.groups.setdefault(id(allocation.watchers), (len(self.groups) + 1, allocation.watchers))
        here = self.tables.segments[row]
        here["memory"], here["size"] = _address(allocation.memory), len(allocation.memory)
        here["lowest"], here["end"] = allocation.lowest, allocation.nbytes
        here["group"] = group[0]
        here["is_writable"], here["on_host"] = allocation.writable, allocation.on_host
        here["notes"] = self.notes_at(allocation)
        self._look_at(row, allocation)
        if isinstance(allocation.identity, History):  # a mapping that is written makes others change
            for other in allocation.identity.mapped:
                if other is not allocation and id(other) in self._rows:
                    self._look_at(self._rows[id(other)][0], other)
        return row

    def notes_at(self, allocation: Allocation) -> int:
        """Where another model notes what was done to the bytes of an allocation."""
        return 0

    def _look_at(self, row: int, allocation: Allocation) -> None:
        """Say what may have changed of an allocation."""
        here = self.tables.segments[row]
        shadow = allocation.shadow
        here["shadow"] = 0 if shadow is None else _address(shadow)
        if shadow is not None:
            self._unwritten[row] = allocation, shadow
        if allocation.may_change and allocation.nbytes and not here["constant"]:
            here["constant"] = self._constant_of(allocation)

    def _constant_of(self, allocation: Allocation) -> int:
        key = id(allocation.nc_reads)
        if key not in self._constants:
            size = (len(allocation.memory) // ROUND + 3) * 8
            self._constants[key] = state.new_zeros(size), allocation.nc_reads
        return address_of(self._constants[key][0]) + 8

    def _look_around_memory(self) -> None:
        """Python has run: which memory is freed, and which has been written as a whole?"""
        segments = self.tables.segments
        for row, (allocation, shadow) in list(self._unwritten.items()):
            if allocation.shadow is not shadow:
                del self._unwritten[row]
                segments["shadow"][row] = 0
                if not allocation.freed:
                    self._look_at(row, allocation)
        for key, (row, allocation) in list(self._rows.items()):
            if allocation.freed:
                segments["is_freed"][row] = 1
                segments["end"][row] = segments["constant"][row] = 0  # a peer's mapping: any access is out of bounds
                del self._rows[key]
                if not (isinstance(allocation.identity, History) and allocation.identity.mapped):
                    self._forget(allocation)

    def _forget(self, allocation: Allocation) -> None:
        """An allocation is freed, and no other mapping of its bytes is left."""
        self._constants.pop(id(allocation.nc_reads), None)

    # --- blocks -------------------------------------------------------------------------------------------------

    def start_block(self, launch: Any) -> None:
        """Create the threads of a launch's next block."""
        if self.compute_capability < COPY_ENGINE:
            raise Stopped("kernels for cards without a copy engine are interpreted")
        tables = self.tables
        number = self._launch_row(launch)
        num_warps = -(-launch.block // WARP_SIZE)
        if not self._blocks:
            self._free_warps.clear()
            self._next_warp = 1
        free = self._free_warps.setdefault(num_warps, [])
        if free:
            warp = free.pop()
        else:
            warp, self._next_warp = self._next_warp, self._next_warp + num_warps
            if self._next_warp * WARP_SIZE > self.stacks.number:
                raise Stopped(f"more than {self.stacks.number} threads run at once")
            if not self.stacks.open(self._next_warp * WARP_SIZE):
                raise Stopped("the system gives no more stacks")
        size = rounded(launch.smem_bytes)
        pool = self._free_memory.setdefault(size, [])
        memory = pool.pop() if pool else address_of(tables.zeros(self.num_sides * size + 64))
        ctypes.memset(memory, 0, self.num_sides * size)
        block = CompiledBlock(self, warp, num_warps, memory, launch)
        first, count, rank = warp * WARP_SIZE, launch.block, launch.rank
        index = len(launch.blocks)
        launch.blocks.append(block)
        self._blocks[warp] = block
        rows = tables.threads[first : first + count]
        rows[:] = 0
        rows["fault_deadline"] = state.NO_DEADLINE
        rows["segments"] = address_of(launch.space.segments.rows)
        rows["space"] = launch.space.rank + 1
        rows["shared"], rows["side"], rows["shared_bytes"] = memory, memory + size, launch.smem_bytes
        rows["rank"], rows["block"], rows["launch"] = rank, warp, number
        rows["thread_idx"] = np.arange(count)
        rows["lane"] = rows["thread_idx"] % WARP_SIZE
        rows["warp"] = warp + rows["thread_idx"] // WARP_SIZE
        rows["block_idx"], rows["grid_dim"], rows["block_dim"] = index, launch.grid, count
        here = tables.blocks[warp]
        here["shared"], here["side"], here["notes"] = memory, memory + size, memory + 3 * size
        here["launch"], here["live"] = number, count
        here["num_threads"], here["first"], here["proxy_fences"], here["copies"] = count, first, 0, 0
        here["mbarriers"], here["group"], here["by_ptx"] = 0, OF_BLOCKS + warp, launch.by_ptx
        tables.barriers["arrived"][warp * state.NUM_BARRIERS : (warp + 1) * state.NUM_BARRIERS] = 0
        for i in range(num_warps):
            lanes = min(WARP_SIZE, count - i * WARP_SIZE)
            tables.warps[warp + i] = (0, 0, lanes, first + i * WARP_SIZE, 0, 0, 0)
            begin = i * WARP_SIZE
            rows["is_slow"][begin : begin + lanes] = self.strategy.reluctance(rank, index) != 0
        entry = self._machine.addresses["nbep_live"]
        rows["pointer"] = self.stacks.prepare(first, count, entry)
        waiting = int(tables.run["num_runnable"])
        tables.runnable[waiting : waiting + count] = np.arange(first, first + count)
        tables.run["num_runnable"] = waiting + count

    def _launch_row(self, launch: Any) -> int:
        number = self._launches.get(launch)
        if number is None:
            number = self._num_launches = self._num_launches + 1
            if number >= state.MOST_LAUNCHES:
                raise Stopped("more kernels were launched than the engine counts")
            self._launches[launch] = number
            self._launch_of[number] = launch
            leaves = [leaf for one in launch.args for leaf in (one if isinstance(one, tuple) else (one,))]
            leaves = [
                int(np.float32(leaf).view(np.uint32)) if isinstance(leaf, float | np.floating) else int(leaf)
                for leaf in leaves
            ]
            arguments = np.array(leaves or [0], np.int64)
            launch.leaves = arguments
            here = self.tables.launches[number]
            here["arguments"], here["entry"] = address_of(arguments), self._code.entry(launch.function)
            here["live"], here["copies"], here["is_done"] = launch.grid, 0, 0
        return number

    def take_back(self, block: CompiledBlock) -> None:
        """A block has ended, and all of its copies are there: others may use its threads and its memory."""
        if self._blocks.get(block.number) is not block:
            return
        del self._blocks[block.number]
        mbarriers, pool = self.tables.mbarriers, self.tables.pools[state.NUMBERS["mbarriers"]]
        i = int(self.tables.blocks[block.number]["mbarriers"])
        while i:
            after = int(mbarriers["next"][i])
            mbarriers["next"][i], pool["free"] = pool["free"], i
            i = after
        self._free_warps[block.num_warps].append(block.number)
        self._free_memory[rounded(block.launch.smem_bytes)].append(block.memory)

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        if not one_thread.acquire(blocking=False):
            raise Stopped("another thread of this process runs compiled kernels")
        try:
            return super().run(functions)
        finally:
            one_thread.release()
            self.end()

    def end(self) -> None:
        """The run is over: others may have its stacks."""
        free_stacks.append(self.stacks)
        self.tables.end()

    def _number_of(self, host: Host) -> int:
        number = self._host_numbers.get(host)
        if number is None:
            self._numbered.append(host)
            number = self._host_numbers[host] = -len(self._numbered)
            self.tables.hosts[-number - 1] = host.reluctance != 0
        return number

    def call(self, name: str, *arguments: int) -> int:
        """The result, if there is one, of a compiled function that Python needs now and then."""
        self.tables.use()
        return self._machine.function(f"nbep_{name}", *[ctypes.c_int64] * (len(arguments) + 1))(*arguments)

    def _loop(self, finished: Callable[[], bool], describe: Any) -> None:
        run, proceed = self.tables.run, self._proceed
        before = Action()
        run["stacks"], run["old_action"] = self.stacks.begin, ctypes.addressof(before)
        self.tables.use()
        with overflows_caught(self._machine.addresses["nbep_on_fault"], before):
            while not finished():
                event = proceed(1)
                while event != state.TICK:
                    self._handle(event)
                    event = proceed(0)
                self._look_around(finished, describe)

    def _handle(self, event: int) -> None:
        """What Python has to do before compiled code goes on."""
        run = self.tables.run
        if event == state.HOST:
            host = self._numbered[-int(run["current"]) - 1]
            self.current = host
            host.left = int(run["left"])
            host.switch()
            run["left"] = host.left
            self.current = None
        elif event == state.OPERATION:
            self.operations.take(int(run["event_arg"]))()
        elif event == state.BLOCK_LEFT:
            block = self._blocks[int(run["event_arg"])]
            launch = block.launch
            row = self.tables.launches[self._launches[launch]]
            row["live"] -= 1
            launch.copies = int(row["copies"])
            is_last = launch.live == 1 and not launch.copies
            if not self.tables.blocks["copies"][block.number]:
                self.take_back(block)
            if is_last:
                self._launch_done(launch)
            launch.block_left()
        elif event == state.COPIES_DONE:
            launch = self._launch_of[int(run["event_arg"])]
            launch.copies = 0
            self._launch_done(launch)
            launch.check_done()
        else:
            reason = int(run["fault"])
            raise Stopped(self._finding(reason), reason not in state.NO_FAILURES)
        self._look_around_memory()
        self.tables.use()

    def _finding(self, reason: int) -> str:
        """What has stopped the run, and which thread met it."""
        row = self.tables.threads[int(self.tables.run["fault_thread"])]
        launch = self._launch_of.get(int(row["launch"]))
        if launch is None:
            return state.REASONS[reason]
        who = describe_thread(launch.rank, launch.name, launch.number, int(row["block_idx"]), int(row["thread_idx"]))
        return f"{who}: {state.REASONS[reason]}"

    def host_wait(
        self, predicate: Callable[[], bool], describe: Any, timeout_ns: int | None = None, told: Any = None
    ) -> bool:
        if not super().host_wait(predicate, describe, timeout_ns, told):
            self._give_up("a host's wait times out")
        return True

    def _give_up(self, reason: str) -> None:
        """Stop the run, whoever has met what it cannot do: a host's code does not get to catch it."""
        self._end_with(Stopped(reason))

    def show_threads(self) -> None:
        if running_host() is None:
            raise EmulatorError('compiled kernels leave no threads to look at: engine="python" does')
        self._give_up("a host asks for threads")

    def _end_with(self, stopped: Stopped) -> None:
        if running_host() is None:
            raise stopped
        self.hub.throw(stopped)

    def _launch_done(self, launch: Any) -> None:
        number = self._launches.pop(launch)
        self.tables.launches["is_done"][number] = 1
        del self._launch_of[number]

    def _operate(self, how: str = "operate") -> None:
        run = self.tables.run
        run["event"] = 0
        self.call(how)
        event, run["event"] = int(run["event"]), 0
        if event:
            self._handle(event)

    def _waiting(self) -> np.ndarray:
        """The threads that wait for cells, in the order in which they came."""
        threads = self.tables.threads[: self._next_warp * WARP_SIZE]
        found = np.flatnonzero(threads["polling"])
        return found[np.argsort(threads["sequence"][found], kind="stable")]

    def _look_again(self) -> bool:
        threads = self.tables.threads
        again = [i for i in self._waiting() if not threads["has_looked_again"][i]]
        for i in again:
            threads["has_looked_again"][i] = 1
            self.call("unwatch", int(i))
        return bool(again)

    def _expire(self) -> bool:
        threads = self.tables.threads
        waiting = self._waiting()
        deadlines = [int(d) for d in threads["deadline"][waiting]] + [host.deadline for host in self.waiting_hosts]
        earliest = min([*deadlines, self._deadline])
        due = [i for i in waiting if threads["deadline"][i] <= earliest]
        if self.on_deadlock == "raise":
            due = [i for i in due if threads["may_time_out"][i] and threads["num_time_outs"][i] < 1000]
            if not due or earliest - self.host_now > 10**14:
                return False
        elif earliest == state.NEVER:
            return False
        self._skipped_ns = max(self._skipped_ns, earliest - self.calls + 1)
        for i in due:
            threads["num_time_outs"][i] += 1
            threads["expired"][i] = 1
            self.call("unwatch", int(i))
        return True

    def _find_endless_loops(self, describe: Any) -> None:
        raise Stopped("all that run poll and poll, and nothing changes")

    def _deadlock(self, describe: Any) -> Exception:
        return Stopped("nothing can go on any more", must_fail=True)  # type: ignore[return-value]


def rounded(nbytes: int) -> int:
    return -(-nbytes // ROUND) * ROUND


def _address(memory: Any) -> int:
    return address_of(np.frombuffer(memory, np.uint8)) if len(memory) else 0
