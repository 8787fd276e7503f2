"""Hosts, streams and SMs under the strategy `every`: which of what they do is a choice, and what comes before what.

a host polls a word, or stores one      an access of the tree, as those of threads
a host asks whether an event is done    the same: from the next run on, a stream that comes to that event is one, too
a host waits                            it goes on where its predicate holds: a load of all words that this reads. A
                                        wait that reads none, as one for an event or for other hosts, ends at once
a kernel starts, a stream waits         at once, behind what comes before it; but where SMs can run short, who asks
                                        for them and who gives one back are accesses to the SMs of the rank
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..machine.access import wake_watchers
from ..machine.cpu import Cpu
from ..machine.memory import WORD_BYTES, Allocation
from ..machine.sms import Sms
from ..machine.stream import Order
from ..models.causes import CausalOrder
from ..models.host import CheckedHost, CheckedOrder
from ..models.knowledge import GRANULE_BITS
from ..models.knowledge import join as together
from ..models.late_races import RacingHost
from ..models.pending import GRANULE
from .every_parts import HOST
from .every_seen import Cell, Entry
from .every_step import (
    Access,
    Clock,
    Step,
    Underway,
    Waiting,
    Who,
    Words,
    granules_of,
    join,
    joined,
    load_of,
    name_of,
    store_of,
    words_of,
)
from .scheduler import Host, running_host

KIND_OF = {4: "s32", 8: "s64"}  # words of the host, by their bytes


def who_is(host: Host) -> Who:
    return (host.rank, "", 0, 0, 0)


class HostChoices(Cpu):
    """The hosts of a run of a tree, under each memory model.

    clocks: the last steps that come before the next one of a host, by rank
    leaving: hosts that wait and that may go on, each before what it has to read for that
    stored: the store that it makes now
    noted: the words that a predicate has read, while one is asked; is_dry: to find out alone
    """

    world: Any

    def __init__(self, world: Any):
        super().__init__(world)  # type: ignore[call-arg]
        self.clocks: dict[int, Clock] = {}
        self.leaving: dict[Who, Underway] = {}
        self.noted: set[tuple[Any, int]] | None = None
        self.is_dry = False
        self.stored: Step | None = None

    # --- accesses -------------------------------------------------------------------------------------------------

    def read(self, allocation: Allocation, offset: int, nbytes: int, polls: bool) -> None:
        words = self.words_of(allocation, offset, nbytes)
        host = running_host()
        if (parts := self.world.strategy.tree.parts) is not None:
            parts.reads[HOST] |= words
        if self.noted is not None:
            self.noted |= words if polls else set()
        elif polls and host is not None and not self.world.strategy.tree.skips(who_is(host), words):
            self.stand(host, load_of(words))
            allocation.check_there()
            self.step(host, load_of(words))
        if not self.is_dry:
            super().read(allocation, offset, nbytes, polls)
        elif polls:
            self.looks(allocation, offset, nbytes)

    def write(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        host = running_host()
        if host is not None and nbytes <= WORD_BYTES:
            words = self.words_of(allocation, offset, nbytes)
            self.stand(host, store_of(words))
            allocation.check_there()
            self.stored = self.step(host, store_of(words), self.cell_of(allocation, offset, nbytes, words))
        super().write(allocation, offset, nbytes)

    def words_of(self, allocation: Allocation, offset: int, nbytes: int) -> Words:
        return words_of(name_of(allocation), offset, nbytes)

    def cell_of(self, allocation: Allocation, offset: int, nbytes: int, words: Words) -> Cell | None:
        """What a store is to be noted in."""
        return None

    def note_stored(self, step: Step, at: int, allocation: Allocation, offset: int, nbytes: int) -> None:
        """A host has stored a word, at the step of this number."""

    def has_written(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        super().has_written(allocation, offset, nbytes)
        step, self.stored = self.stored, None
        if step is not None:
            self.note_stored(step, self.clocks[step.who[0]][step.who], allocation, offset, nbytes)
        for granule in range(offset >> 3, (offset + nbytes + 7) >> 3):
            wake_watchers(allocation, granule)

    def stand(self, host: Host, access: Access) -> None:
        """Wait until it is this host's turn."""
        turn = Underway(who_is(host), access, self.clock_of(host), lambda _: self.go_on(host))
        self.world.runnable.append(turn)
        self.world.hub.switch()

    def go_on(self, host: Host) -> None:
        self.world.current = host
        host.switch()

    def step(self, host: Host, access: Access, cell: Cell | None = None, *, is_wait: bool = False) -> Step:
        step = Step(who_is(host), access, self.clock_of(host), cell)
        step.is_wait = is_wait
        self.clocks[host.rank] = {step.who: self.world.strategy.tree.step(step)}
        return step

    def clock_of(self, host: Host) -> Clock:
        return self.clocks.setdefault(host.rank, {})

    # --- waits ----------------------------------------------------------------------------------------------------

    def wait_of(self, predicate: Callable[[], bool]) -> Callable[[], bool]:
        """The predicate, which is no choice where it is asked: when a host goes on is one."""

        def ask() -> bool:
            if self.noted is not None:
                return predicate()
            self.noted = set()
            try:
                return predicate()
            finally:
                self.noted = None

        return ask

    def let_go(self) -> bool:
        """Let those hosts go on whose waits are over, and read no words. Whether there is one.

        Of the others: who may go on, and who may not.
        """
        world = self.world
        tree = world.strategy.tree
        self.leaving = {}
        tree.hosts = {}
        has_gone = False
        meeting = []
        for host in list(world.waiting_hosts):
            is_over, words = self.ask(host)
            who = who_is(host)
            if not is_over:
                if words:
                    tree.hosts[who] = Waiting(words, self.clock_of(host))
            elif words:
                self.leaving[who] = Underway(who, load_of(words), self.clock_of(host), partial(self.leave, host))
            else:
                has_gone = True
                if not self.has_looked:
                    meeting.append(host.rank)
                world.waiting_hosts.remove(host)
                world.runnable.append(host)
                world.has_changed = True
        self.meet_all(meeting)
        return has_gone

    def meet_all(self, ranks: list[int]) -> None:
        """Hosts have waited for others, before any of them goes on."""

    def ask(self, host: Host) -> tuple[bool, Words]:
        """Whether a host's wait is over, and what it reads to find out. Nothing is told to it."""
        assert host.predicate is not None
        self.noted, self.is_dry, self.has_looked = set(), True, False
        try:
            is_over = host.predicate()
            return is_over, frozenset(self.noted)
        finally:
            self.noted, self.is_dry = None, False

    def leave(self, host: Host, turn: Underway) -> None:
        self.world.waiting_hosts.remove(host)
        self.world.has_changed = True
        self.step(host, turn.pending, is_wait=True)
        self.go_on(host)


class EveryHost(HostChoices, CheckedHost):
    """The hosts of a run of a tree that looks for races."""

    def meet_all(self, ranks: list[int]) -> None:
        if ranks:
            self.known |= dict.fromkeys(ranks, together(self.known.values()))

    def cell_of(self, allocation: Allocation, offset: int, nbytes: int, words: Words) -> Cell:
        cell = self.world.strategy.cells.of(allocation, offset, nbytes, words)
        if nbytes in KIND_OF:
            cell.look(allocation.read(offset, KIND_OF[nbytes]))
        else:
            cell.is_mixed = True
        return cell

    def note_stored(self, step: Step, at: int, allocation: Allocation, offset: int, nbytes: int) -> None:
        if step.cell is not None and nbytes in KIND_OF:
            step.number = allocation.read(offset, KIND_OF[nbytes])
            stores = allocation.last_stores.get(offset >> GRANULE_BITS, ())
            here = tuple(store for store in stores if store.begin == offset)
            entry = Entry(step.number, allocation.messages.get(offset), here)
            entry.step, entry.who = at, step.who
            step.entry = step.cell.add(entry)


class Queued(NamedTuple):
    """What comes before something that a host has queued: for the memory model, and for the tree."""

    known: Any
    clock: Clock


class OrderChoices(Order):
    """What comes before a kernel, an event and a host's next step.

    clocks: by stream, of all that it has done; begins: by launch, what comes before its threads, which share it;
    running: who runs in a launch; marks: by what stands in a stream
    come: events that a host has asked for, and that a stream may pass now; held: those at which one waits
    """

    world: Any

    def __init__(self, world: Any):
        super().__init__(world)  # type: ignore[call-arg]
        self.clocks: dict[Any, Clock] = {}
        self.begins: dict[Any, Clock] = {}
        self.running: dict[Any, list[Any]] = {}
        self.marks: dict[Any, Clock] = {}
        self.come: set[Any] = set()
        self.held: set[Any] = set()
        self.seen_by: set[tuple[int, Any]] = set()

    def queued(self, stream: Any) -> Any:
        host = running_host()
        return Queued(super().queued(stream), {} if host is None else dict(self.world.cpu.clock_of(host)))

    def clock_at(self, stream: Any, queued: Queued) -> Clock:
        clock = self.clocks.setdefault(stream, {})
        join(clock, queued.clock)
        return clock

    def start(self, launch: Any, queued: Any) -> None:
        self.begins[launch] = dict(self.clock_at(launch.stream, queued))
        self.running[launch] = []
        super().start(launch, queued.known)

    def begin(self, thread: Any) -> Clock:
        """A thread is there: what comes before its first step."""
        launch = thread.block.launch
        self.add(launch, thread)
        if (parts := self.world.strategy.tree.parts) is not None:
            parts.serials[thread.block.serial] = (launch.rank, launch.name, launch.number, thread.block.index)
        return joined(self.begins[launch], getattr(launch.stream.sms, "clock", {}))

    def add(self, launch: Any, one: Any) -> None:
        """Something that must be over before the launch is."""
        self.running[launch].append(one)

    def end(self, launch: Any) -> None:
        super().end(launch)
        begin, running = self.begins.pop(launch), self.running.pop(launch)
        if (parts := self.world.strategy.tree.parts) is not None:
            parts.launch_over(launch, begin, running)
        clocks = [one.clock for one in running]
        for clock in {id(clock): clock for clock in clocks}.values():  # many have met, and share one
            join(self.clocks[launch.stream], clock)

    def record(self, mark: Any, queued: Any) -> None:
        self.marks[mark] = dict(self.clock_at(mark.stream, queued))
        super().record(mark, queued.known)

    def wait(self, stream: Any, mark: Any, queued: Any) -> None:
        join(self.clock_at(stream, queued), self.marks[mark])
        super().wait(stream, mark, queued.known)

    def seen(self, mark: Any) -> None:
        if self.world.cpu.is_dry:
            return
        host = running_host()
        if host is not None:
            self.seen_by.add((host.rank, mark))
            join(self.world.cpu.clock_of(host), self.marks[mark])
        super().seen(mark)

    # --- events that a host asks for ------------------------------------------------------------------------------

    def name_of(self, mark: Any) -> tuple:
        rank = mark.stream.rank
        number = [stream for stream in self.world.streams if stream.rank == rank].index(mark.stream)
        return ("event", rank, number, mark.place)

    def is_done(self, mark: Any) -> bool:
        host, cpu = running_host(), self.world.cpu
        if host is not None and cpu.noted is None and (host.rank, mark) not in self.seen_by:
            name, tree = self.name_of(mark), self.world.strategy.tree
            if name not in tree.looked_at:
                tree.looked_at.add(name)
                tree.is_stale = True
            access = load_of(frozenset({(name, 0)}))
            cpu.stand(host, access)
            cpu.step(host, access)
        return bool(super().is_done(mark))

    def holds(self, stream: Any, mark: Any, queued: Any) -> bool:
        name, tree = self.name_of(mark), self.world.strategy.tree
        if name not in tree.looked_at or mark in self.come:
            return False
        if mark not in self.held:
            self.held.add(mark)

            def come(turn: Underway) -> None:
                self.come.add(mark)
                step = Step(turn.who, turn.pending, turn.clock, None)
                self.clocks[stream] = {turn.who: tree.step(step)}
                stream.advance()

            who = (stream.rank, "event", name[2], mark.place, 0)
            access = store_of(frozenset({(name, 0)}))
            self.world.runnable.append(Underway(who, access, dict(self.clock_at(stream, queued)), come))
        return True


class EveryOrder(OrderChoices, CheckedOrder):
    """The order of launches in a run of a tree that looks for races."""


class WeakHost(HostChoices, RacingHost):
    """The hosts: what they store is there at once."""

    meet_all = RacingHost.meet_all

    @property
    def finds_races(self) -> bool:
        world = self.world
        return world.strategy.tree.finds_races and not (world.has_failed or world.is_over)

    def words_of(self, allocation: Allocation, offset: int, nbytes: int) -> Words:
        return frozenset(granules_of(allocation, offset, nbytes))

    def note_stored(self, step: Step, at: int, allocation: Allocation, offset: int, nbytes: int) -> None:
        self.world.strategy.late.visible[allocation.versions[offset // GRANULE][-1]] = at


class WeakOrder(OrderChoices, CausalOrder):
    """The order of launches."""


class EverySms(Sms):
    """SMs that can run short: who asks for them, and who gives one back, comes in an order that is a choice.

    clock: the last of these steps
    """

    def __init__(self, world: Any, rank: int, number: int):
        super().__init__(number)
        self.world = world
        self.words: Words = frozenset({(("SMs", rank), 0)})
        self.clock: Clock = {}
        self.left: set[Any] = set()  # blocks that have given theirs back, or are about to

    def stand(self, launch: Any, block: int, clock: Clock, happen: Callable[[], None]) -> None:
        def come(turn: Underway) -> None:
            step = Step(turn.who, turn.pending, turn.clock, None)
            turn.clock = self.clock = {turn.who: self.world.strategy.tree.step(step)}
            happen()

        who = (launch.rank, launch.name, launch.number, block, 0)
        self.world.runnable.append(Underway(who, store_of(self.words), clock, come))

    def start(self, launch: Any) -> None:
        def come() -> None:
            self.waiting.append(launch)
            self.fill()

        self.stand(launch, -1, dict(self.world.order.clocks[launch.stream]), come)

    def block_left(self, launch: Any) -> None:
        block = next(block for block in launch.blocks if not block.live and block not in self.left)
        self.left.add(block)
        clock: Clock = {}
        for thread in block.threads:
            join(clock, thread.clock)

        def leave() -> None:
            self.held -= 1
            self.fill()

        self.stand(launch, -2 - block.index, clock, leave)
