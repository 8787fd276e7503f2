"""Streams, launches and events: what the host gives the device to do, in order per stream.

A launch creates all threads of all blocks that find a free SM; the scheduler lets them run in any order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from threading import Lock
from typing import Any

from .block import WARP_SIZE, Block
from .memory import AddressSpace, Allocation, Describe
from .names import title_of
from .sms import Sms
from .warp import Warp

MAX_BLOCK = 1024
_queued = count()


class Order:
    """What is before what among the launches of a rank. Nothing is checked here; see `models.host`.

    It is called at each step of a stream. queued: what `queued` has returned when the host queued it.
    """

    def queued(self, stream: Any) -> Any:
        """What the host knows that queues something now."""

    def start(self, launch: Any, queued: Any) -> None:
        """A launch starts."""

    def start_block(self, block: Any) -> None:
        """A block of a launch starts; its threads are not there yet."""

    def end(self, launch: Any) -> None:
        """A launch is done."""

    def is_done(self, mark: Any) -> bool:
        """Whether a stream has come to a mark, if the host asks."""
        mark.stream.world.cpu.has_looked = True
        return mark.done

    def holds(self, stream: Any, mark: Any, queued: Any) -> bool:
        """Whether a stream, which is about to come to a mark, is to wait before it; then `advance` is called again."""
        return False

    def record(self, mark: Any, queued: Any) -> None:
        """A stream has come to a mark."""

    def wait(self, stream: Any, mark: Any, queued: Any) -> None:
        """A stream has waited for a mark, which is done."""

    def seen(self, mark: Any) -> None:
        """The host has seen that a mark is done."""

    def run_over(self) -> None:
        """All launches are done, and all hosts know it."""


class Mark:
    """A point in a stream; `done` once all work before it is. number: of its event's records, from 1"""

    def __init__(self, stream: Stream, before: Mark | None = None):
        """before: what the event stood for until now"""
        self.stream = stream
        self.before = before
        self.number = 1
        if before is not None:
            self.number = before.number + 1
            before.before = None
        self.done = False
        stream.num_marks += 1
        self.place = stream.num_marks  # among all of its stream
        self.behind: Launch | None = stream.latest  # the last launch before it
        self.point: Any = None  # what is before it; see `checked`
        self.waiters: list[Stream] = []


class Event:
    """Stands for the point of a stream where it was recorded last. A wait is for the record of that moment."""

    def __init__(self, stream: Stream):
        self.mark = Mark(stream)

    @property
    def stream(self) -> Stream:
        return self.mark.stream

    @property
    def done(self) -> bool:
        return self.stream.world.order.is_done(self.mark)

    def tell_host(self) -> None:
        """The host has seen that it is done."""
        self.stream.world.order.seen(self.mark)


class Launch:
    """One kernel on one rank: `done` when all threads have returned, after which `callbacks` are called in order."""

    def __init__(self, stream: Stream, function: Callable, args: tuple, grid: int, block: int, smem: int, name: str):
        self.stream = stream
        self.world = stream.world
        self.rank = stream.rank
        self.space: AddressSpace = stream.space
        self.function: Any = function
        self.args = args
        self.grid = grid
        self.block = block
        self.smem_bytes = smem
        self.name = name
        self.number = stream.world.count_launch(stream.rank, name)  # of this kernel on this rank, counted from 1
        self.is_service = stream.is_service
        self.describe_shared: Describe | None = None  # what names the bytes of its blocks' shared memory
        self.starts_together = False  # all of its blocks or none, as with a cooperative launch
        self.by_ptx = False  # how threads meet: see `Block`
        self.share = 1  # of the SMs that a block takes
        self.blocks: list[Block] = []
        self.live = grid
        self.copies = 0  # bulk copies under way
        self.stores: dict[Any, None] = {}  # stores on their way; see `delayed`
        # For `checked`: what all its threads know when it starts, what they know together when they leave, and where it
        # is in its stream.
        self.known: Any = None
        self.learned: Any = None
        self.queued_as = next(_queued)
        self.place: Any = None
        self.done = False
        self.callbacks = Callbacks()

    @property
    def title(self) -> str:
        """How reports name it."""
        return title_of(self.name, self.number)

    def start(self, queued: Any) -> None:
        """Start the blocks for which there are SMs; their threads are runnable from now on."""
        world = self.world
        world.order.start(self, queued)
        self.stream.sms.start(self)
        world.launches[self] = None
        if world.hooks is not None:
            world.hooks.on_launch(self)

    def start_block(self) -> None:
        """Create the threads of the next block."""
        self.world.start_block(self)

    def create_block(self) -> None:
        """The same, of threads that Python interprets."""
        world = self.world
        thread_class = world.thread_class
        hub = world.hub
        shared = Allocation.scratch(self.rank, "shared memory", self.smem_bytes, self.describe_shared)
        block = Block(self, len(self.blocks), shared)
        self.blocks.append(block)
        world.order.start_block(block)
        for first in range(0, self.block, WARP_SIZE):
            warp = Warp(first // WARP_SIZE, world.strategy.reluctance(self.rank, block.index))
            block.warps.append(warp)
            warp.lanes = [thread_class(block, i, warp, hub) for i in range(first, min(first + WARP_SIZE, self.block))]
            block.threads += warp.lanes
        world.runnable += block.threads

    def block_left(self) -> None:
        """A block has no threads any more."""
        self.live -= 1
        self.stream.sms.block_left(self)
        self.check_done()

    def check_done(self) -> None:
        """Finish when the last thread has left, and the last bulk copy and the last store have arrived."""
        if self.live or self.copies or self.stores:
            return
        self.done = True
        del self.world.launches[self]
        for block in self.blocks:
            block.release()
        self.blocks = []
        self.function = None
        self.args = ()
        self.callbacks.run()
        self.world.order.end(self)
        self.stream.launch_done()


class Callbacks:
    """What to do when a launch is done; what is appended later is done at once."""

    def __init__(self) -> None:
        self._functions: list[Callable[[], Any]] | None = []
        self._lock = Lock()  # under MPI kernels run in another thread than the host

    def append(self, function: Callable[[], Any]) -> None:
        with self._lock:
            if self._functions is not None:
                self._functions.append(function)
                return
        function()

    def run(self) -> None:
        with self._lock:
            functions, self._functions = self._functions or [], None
        for function in functions:
            function()


class Stream:
    """A queue of launches, event records and event waits, executed in order."""

    def __init__(self, world: Any, rank: int, space: AddressSpace, sms: Sms, name: str, is_service: bool = False):
        self.world = world
        self.sms = sms
        self.rank = rank
        self.space = space
        self.name = name
        self.is_service = is_service  # its kernels serve others, and end when those have no more work
        self.queue: deque[tuple[str, Any, Any]] = deque()  # what to do, with what, and what the host knew then
        self.running: Launch | None = None
        self.latest: Launch | None = None  # the last one that was queued
        self.num_marks = 0  # so far

    def launch(
        self,
        function: Callable,
        args: tuple,
        grid: int,
        block: int,
        smem_bytes: int = 0,
        name: str = "",
        *,
        describe_shared: Describe | None = None,
        starts_together: bool = False,
    ) -> Launch:
        """Queue `function(*args)` for `grid` blocks of `block` threads.

        Args:
            describe_shared: names what is in their shared memory
            starts_together: none of the blocks starts before there are SMs for all, as with a cooperative launch
        """
        if grid < 1 or not 1 <= block <= MAX_BLOCK:
            raise ValueError(f"grid: {grid}, block: {block}; allowed: grid >= 1, block 1 .. {MAX_BLOCK}")
        name = name or getattr(function, "__name__", "kernel")
        if starts_together and grid > self.sms.number:
            raise ValueError(
                f"{name}, grid: {grid}; at most {self.sms.number} blocks fit on the SMs of the rank at once"
            )
        launch = Launch(self, function, args, grid, block, smem_bytes, name)
        launch.describe_shared = describe_shared
        launch.starts_together = starts_together
        self.latest = launch
        self._enqueue("launch", launch)
        return launch

    def record(self, event: Event | None = None) -> Event:
        """An event that is done when all work queued so far is. event: one to record again"""
        if event is None:
            event = Event(self)
        else:
            event.mark = Mark(self, event.mark)
        self._enqueue("record", event.mark)
        return event

    def wait(self, event: Event) -> None:
        """Later work of this stream starts after `event`, as it was recorded last."""
        self._enqueue("wait", event.mark)

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""
        event = self.record()
        self.world.host_wait(lambda: event.done, self.describe)
        event.tell_host()

    def _enqueue(self, what: str, item: Launch | Mark) -> None:
        self.queue.append((what, item, self.world.order.queued(self)))
        self.world.submit(self.advance)

    def advance(self) -> None:
        """Execute what is at the head of the queue, up to the next running launch or pending event."""
        while self.queue and self.running is None:
            what, item, queued = self.queue[0]
            if what == "wait" and not item.done:
                if self not in item.waiters:
                    item.waiters.append(self)
                return
            if what == "record" and self.world.order.holds(self, item, queued):
                return
            self.queue.popleft()
            if what == "launch":
                self.running = item
                item.start(queued)
            elif what == "wait":
                self.world.order.wait(self, item, queued)
            else:
                item.done = True
                item.behind = None
                self.world.order.record(item, queued)
                for stream in item.waiters:
                    self.world.submit(stream.advance)

    @property
    def is_busy(self) -> bool:
        return self.running is not None or bool(self.queue)

    def launch_done(self) -> None:
        if self.latest is self.running:
            self.latest = None
        self.running = None
        self.world.submit(self.advance)

    def describe(self) -> str:
        """What the stream does, for the deadlock report."""
        if self.running is not None:
            return f"stream `{self.name}`: kernel `{self.running.name}` runs, {len(self.queue)} more queued"
        if self.queue and self.queue[0][0] == "wait":
            return f"stream `{self.name}`: waits for an event of stream `{self.queue[0][1].stream.name}`"
        return f"stream `{self.name}`: idle"
