"""All ranks of a run, their address spaces and streams, and the scheduler that drives them: what reports look at."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from .machine.cpu import Cpu
from .machine.memory import AddressSpace
from .machine.names import NIC_NUMBERS
from .machine.sms import UNLIMITED, Sms
from .machine.stream import Order, Stream
from .machine.thread import Thread
from .models.checked import CheckedThread
from .models.delayed import DelayedThread
from .models.history import History
from .models.host import CheckedHost, CheckedOrder
from .schedule.every import Every
from .schedule.every_copies import EveryCopyThread
from .schedule.every_hosts import EveryHost, EveryOrder, EverySms, WeakHost, WeakOrder
from .schedule.scheduler import Describe, Scheduler, running_host
from .schedule.strategies import Strategy
from .schedule.weak_thread import WeakCopyThread
from .tracing import SILENT, hooks, traced

ReadReport = Callable[[Thread, FrameType], Any]
Calls = Callable[[], list[tuple[int, str]]]
Told = Callable[[], Iterable[Any]]
MEMORY_MODELS: dict[str, type[Thread]] = {"sc": Thread, "delayed": DelayedThread, "checked": CheckedThread}


class RankContext:
    """One rank: its number, its address space, its SMs and its streams."""

    def __init__(self, world: Run, rank: int, num_sms: int = UNLIMITED):
        self.world = world
        self.rank = rank
        is_choice = isinstance(world.strategy, Every) and num_sms != UNLIMITED
        self.sms: Sms = EverySms(world, rank, num_sms) if is_choice else Sms(num_sms)
        self.space = AddressSpace(rank, world.cpu)

    def create_stream(self, name: str, is_service: bool = False) -> Stream:
        stream = Stream(self.world, self.rank, self.space, self.sms, name, is_service)
        self.world.streams.append(stream)
        return stream


class Run(Scheduler):
    """An emulated machine that has no words for what goes wrong: see `World`, which is made of it.

    Args:
        num_ranks: ranks, each with an address space of its own
        seed: chooses the interleaving
        memory_model: "sc": a store is visible to all at once; "delayed", "checked": see the modules of these names
        on_deadlock: "raise", or "expire" to let waits time out that report a fault then
        strategy: how the interleaving is chosen: see `schedule.strategies`
        on_failure: is called with the first error, while all threads still stand where they were
        local_rank: None: all ranks live in this process; r: only rank r does: see `ProcessWorld`
        num_sms: blocks that a rank holds at once, an SM each; more of them wait. None: as many as there are
        compute_capability: of the card whose paths kernels take; see `nbep.device.cards`
        tracer: object with any of the methods that `tracing` names
    """

    spans_processes = False  # whether other processes store to memory of its ranks
    thread_classes = MEMORY_MODELS

    def __init__(
        self,
        num_ranks: int,
        seed: int = 0,
        *,
        memory_model: str = "sc",
        on_deadlock: str = "raise",
        local_rank: int | None = None,
        tracer: Any = None,
        num_sms: int | None = None,
        compute_capability: tuple[int, int] = (9, 0),
        strategy: str | Strategy = "uniform",
        on_failure: Callable[[BaseException], object] | None = None,
    ):
        super().__init__(seed, on_deadlock, strategy, on_failure)
        if num_ranks < 1:
            raise ValueError(f"num_ranks: {num_ranks}; allowed: at least 1")
        if not isinstance(memory_model, str) or memory_model not in MEMORY_MODELS:
            raise ValueError(f"memory_model: {memory_model!r}; allowed: {', '.join(map(repr, MEMORY_MODELS))}")
        if memory_model == "checked" and local_rank is not None:
            raise ValueError("memory_model: 'checked' knows nothing of other processes; it takes all ranks in one")
        self.num_ranks = num_ranks
        self.memory_model = memory_model
        self.tracer = tracer
        self.hooks = None if tracer is None else hooks(tracer)
        self.compute_capability = compute_capability
        self.num_blocks = 0
        self.is_over = False  # run() has ended
        self.asking: int | None = None  # the rank of the host whose wait is looked at
        self.num_launches: Counter[tuple[int, str]] = Counter()
        self.signals = 0  # so far; see `checked`
        self.observed: tuple[Any, set[Any]] = (None, set())  # by the thread that asked last; see `has_observed`
        self.history = History()  # see `checked`
        self.has_failed = False  # whether a wait has ever timed out, or a fault was reported; see `checked`
        self.networks: dict[int, Callable[[int], list[str]]] = {}  # rank -> what to say of its network to a peer
        self.call_logs: list[Calls] = []  # how many collective calls each rank's host has made, and the last one
        self.read_report: ReadReport | None = None  # what a frame of a thread tells the host; see `reports.expected`
        is_checked = memory_model == "checked"
        self.cpu: Cpu = CheckedHost(self) if is_checked else Cpu()
        self.order: Order = CheckedOrder(self) if is_checked else Order()
        thread_class = self.thread_classes[memory_model]
        if isinstance(self.strategy, Every):
            if memory_model != self.strategy.memory_model:
                needed = repr(self.strategy.memory_model)
                raise ValueError(f"memory_model: got {memory_model!r} with such a tree of schedules; must be {needed}")
            if self.strategy.tree.is_weak:
                thread_class, self.cpu, self.order = WeakCopyThread, WeakHost(self), WeakOrder(self)
            else:
                thread_class, self.cpu, self.order = EveryCopyThread, EveryHost(self), EveryOrder(self)
        self.thread_class = thread_class if tracer is None else traced(thread_class)
        local = range(num_ranks) if local_rank is None else [local_rank]
        if num_sms is not None and (not isinstance(num_sms, int) or num_sms < 1):
            raise ValueError(f"num_sms: {num_sms!r}; allowed: at least 1, or None")
        self.ranks = {rank: RankContext(self, rank, num_sms or UNLIMITED) for rank in local}
        self.moment = 0  # how often stores have become visible; see `delayed`
        self.early = random.Random(f"early loads {seed}")  # likewise
        self.early_rate = 0.5 ** self.early.randint(1, 4)
        self.gpu_stores: dict[int, dict[Any, None]] = {rank: {} for rank in local}  # see `delayed`
        self.spaces = {rank: context.space for rank, context in self.ranks.items()}

    @property
    def host_rank(self) -> int | None:
        """The rank of the host that runs now, or whose wait is looked at; None if that is the caller of the world."""
        if self.asking is not None:
            return self.asking
        host = running_host()
        return None if host is None else host.rank

    def host_wait(
        self, predicate: Callable[[], bool], describe: Describe, timeout_ns: int | None = None, told: Told | None = None
    ) -> bool:
        """The same. told: for a meeting of hosts: what those have told whom it was for, each by `cpu.tells`"""
        rank = self.host_rank

        def ask() -> bool:
            self.cpu.has_looked, self.asking = told is not None, rank
            try:
                return predicate()
            finally:
                self.asking = None

        came = super().host_wait(ask, describe, timeout_ns)
        if came and told is not None:
            self.cpu.hears(told())
        elif came and not self.cpu.has_looked and not self.strategy.chooses_hosts:
            self.cpu.meets()
        return came

    def add_nic(self, rank: int) -> RankContext:
        """A NIC of a rank: streams and an address space of its own. A rank may have several, one after the other."""
        number = NIC_NUMBERS + rank
        context = self.ranks.get(number)
        if context is None:
            context = self.ranks[number] = RankContext(self, number)
            self.spaces[number] = context.space
            self.gpu_stores[number] = {}
        return context

    def start_block(self, launch: Any) -> None:
        """Create the threads of the next block of a launch."""
        launch.create_block()

    def stop(self, error: BaseException) -> None:
        if self.hooks is not None:
            self.hooks.on_failure(error)
            self.hooks = SILENT

    def count_block(self) -> int:
        """The number of a new block, which no other block of the run has."""
        self.num_blocks += 1
        return self.num_blocks

    def count_launch(self, rank: int, kernel: str) -> int:
        """The number of a new launch among those of its kernel on its rank, from 1."""
        self.num_launches[rank, kernel] += 1
        return self.num_launches[rank, kernel]

    @property
    def counters(self) -> dict[str, int]:
        """What the run has cost so far."""
        return {"primitive_calls": self.calls, "switches": self.steps, "parks": self.parks}
