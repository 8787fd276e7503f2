"""What the PTX memory consistency model allows: all candidate executions of a small program, less those that an axiom
forbids.

An execution says which write each read reads from, and in which order the writes to each cell come. That order is
partial: two writes that race are unrelated, unless a third one stands between them. The words are those of the PTX ISA.
fence.sc and proxies are left out: no program here has them. That stores do not depend on loads here makes "no thin air"
hold by itself.

Source: PTX ISA 8.5, Memory Consistency Model (8.7 Morally strong operations to 8.10 Axioms); Lustig, Sahasrabuddhe,
Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS 2019), with the model `ptx.als` of
github.com/NVlabs/ptxmemorymodel
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations, permutations, product
from typing import NamedTuple

from nbep.lab.litmus.programs import ACQUIRING, REACH, RELEASING, Program, Step

Pairs = frozenset[tuple["Event", "Event"]]
Outcome = frozenset[tuple[str, int]]  # of registers, and of cells at the end


class Event(NamedTuple):
    """One operation: the number-th of a thread. The first writes are those of thread -1, one for each cell."""

    thread: int
    number: int
    step: Step


class Verdict(NamedTuple):
    """All outcomes that are allowed, and whether an execution that is has a data-race."""

    outcomes: frozenset[Outcome]
    has_race: bool

    def allows(self, program: Program) -> bool:
        """Whether the program's weak outcome is among them."""
        return any(program.is_weak(outcome) for outcome in self.outcomes)


class Reading:
    """What each read reads from, and what is in causality order then."""

    def __init__(self, program: Program, events: list[Event], first: dict[str, Event], sources: dict[Event, Event]):
        self.places = program.places
        self.events = events
        self.reads_from = sources
        self.writes = {cell: [write, *writes_to(events, cell)] for cell, write in first.items()}
        self.causality = self._causality()

    def values(self) -> dict[Event, int] | None:
        """What each write writes; None if atomics read from each other in a circle."""
        values: dict[Event, int] = {}

        def value(event: Event, seen: tuple[Event, ...]) -> int | None:
            if event in seen:
                return None
            if event.step.what == "add":
                before = value(self.reads_from[event], (*seen, event))
                return None if before is None else before + event.step.value
            return event.step.value

        for writes in self.writes.values():
            for event in writes:
                found = value(event, ())
                if found is None:
                    return None
                values[event] = found
        return values

    def distance(self, a: Event, b: Event) -> int:
        (rank, block), (other, other_block) = self.places[a.thread], self.places[b.thread]
        return 3 if rank != other else 2 if block != other_block else 1

    def is_morally_strong(self, a: Event, b: Event) -> bool:
        if a.step.cell and b.step.cell and a.step.cell != b.step.cell:
            return False
        if -1 in (a.thread, b.thread):  # the first write is ordered before everything: see _causality
            return False
        if a.thread == b.thread:
            return True
        reach = min(REACH[a.step.scope], REACH[b.step.scope])
        return a.step.is_strong and b.step.is_strong and reach >= self.distance(a, b)

    def _observation(self) -> set[tuple[Event, Event]]:
        direct = {(write, read) for read, write in self.reads_from.items() if self.is_morally_strong(write, read)}
        while True:
            more = {(a, d) for a, b in direct for c, d in direct if b == c and b.step.modifies} - direct
            if not more:
                return direct
            direct |= more

    def _patterns(self) -> tuple[list[tuple[Event, Event]], list[tuple[Event, Event]]]:
        """(first operation, write) of the release patterns; (read, last operation) of the acquire patterns."""
        releases, acquires = [], []
        for a in self.events:
            step = a.step
            if step.writes and step.order in RELEASING:
                releases.append((a, a))
            if step.reads and step.order in ACQUIRING:
                acquires.append((a, a))
        for a, b in combinations(self.events, 2):
            if a.thread != b.thread:
                continue
            same_cell = a.step.cell == b.step.cell
            if a.step.order in RELEASING and b.step.writes and b.step.is_strong:
                if a.step.what == "fence" or (a.step.writes and same_cell):
                    releases.append((a, b))
            if b.step.order in ACQUIRING and a.step.reads and a.step.is_strong:
                if b.step.what == "fence" or (b.step.reads and same_cell):
                    acquires.append((a, b))
        return releases, acquires

    def base_causality(self) -> dict[Event, set[Event]]:
        """What comes behind each operation by program order, releases that are acquired, and barriers."""
        observation = self._observation()
        events = self.events
        base = {(a, b) for a, b in combinations(events, 2) if a.thread == b.thread}
        releases, acquires = self._patterns()
        for (first, write), (read, last) in product(releases, acquires):
            if (write, read) in observation and self.is_morally_strong(first, last):
                base.add((first, last))
        bars = [event for event in events if event.step.what == "bar"]
        number = {bar: sum(other.thread == bar.thread and other < bar for other in bars) for bar in bars}
        for a, b in product(bars, bars):
            if number[a] == number[b] and a.thread != b.thread and self.distance(a, b) == 1:
                base.add((a, b))
        return closure(base)

    def _causality(self) -> set[tuple[Event, Event]]:
        observation, events, after = self._observation(), self.events, self.base_causality()
        causality = {(a, b) for a, others in after.items() for b in others}
        causality |= {(a, c) for a, b in observation for c in after.get(b, ())}
        first_writes = [writes[0] for writes in self.writes.values()]
        return causality | {(write, event) for write in first_writes for event in events}

    def has_race(self) -> bool:
        """Whether two conflicting operations are neither morally strong nor related in causality order."""
        return any(
            a.step.cell == b.step.cell != ""
            and (a.step.writes or b.step.writes)
            and not self.is_morally_strong(a, b)
            and not {(a, b), (b, a)} & self.causality
            for a, b in combinations(self.events, 2)
        )

    def coherences(self) -> Iterator[Pairs]:
        """The orders that relate writes which are morally strong or in causality order, and no more than that takes."""
        orders: list[set[Pairs]] = []
        for writes in self.writes.values():
            found = set()
            for order in permutations(writes):
                if not any((b, a) in self.causality for a, b in combinations(order, 2)):
                    related = {
                        pair
                        for pair in combinations(order, 2)
                        if self.is_morally_strong(*pair) or pair in self.causality
                    }
                    found.add(frozenset((a, b) for a, after in closure(related).items() for b in after))
            orders.append(found)
        for chosen in product(*orders):
            yield frozenset().union(*chosen)


class Execution:
    """One candidate: what is read, and a coherence order."""

    def __init__(self, reading: Reading, coherence: Pairs):
        self.reading = reading
        self.reads_from = reading.reads_from
        self.coherence = coherence
        self.later: dict[Event, set[Event]] = {}
        for a, b in coherence:
            self.later.setdefault(a, set()).add(b)

    def is_allowed(self) -> bool:
        """Coherence itself, 8.10.1, holds by `coherences`."""
        return self._is_atomic() and self._is_sequential_per_cell() and self._is_causal()

    def overwrites(self, read: Event) -> set[Event]:
        """The writes that come behind the one that a read reads from, but for its own."""
        return self.later.get(self.reads_from[read], set()) - {read}

    def _is_atomic(self) -> bool:
        """8.10.3: Between what an atomic reads and what it writes comes no write that is morally strong to it."""
        return not any(
            event.step.modifies and (other, event) in self.coherence and self.reading.is_morally_strong(event, other)
            for event in self.reads_from
            for other in self.overwrites(event)
        )

    def _is_sequential_per_cell(self) -> bool:
        """8.10.5"""
        communication = {(write, read) for read, write in self.reads_from.items()} | self.coherence
        communication |= {(read, other) for read in self.reads_from for other in self.overwrites(read)}
        edges = {(a, b) for a, b in communication if self.reading.is_morally_strong(a, b)}
        for a, b in combinations(self.reading.events, 2):
            if a.thread == b.thread and a.step.cell and a.step.cell == b.step.cell:
                edges.add((a, b))
        return not has_cycle(edges)

    def _is_causal(self) -> bool:
        """8.10.6"""
        causality = self.reading.causality
        return not any(
            (read, write) in causality or any((other, read) in causality for other in self.overwrites(read))
            for read, write in self.reads_from.items()
        )

    def outcomes(self, values: dict[Event, int]) -> Iterator[Outcome]:
        """Registers, and of each cell a value that no other write comes behind: writes that race may leave either."""
        registers = {read.step.register: values[write] for read, write in self.reads_from.items() if read.step.register}
        last = [
            {values[write] for write in writes if write not in self.later} for writes in self.reading.writes.values()
        ]
        for chosen in product(*last):
            yield frozenset({**registers, **dict(zip(self.reading.writes, chosen, strict=True))}.items())


def writes_to(events: list[Event], cell: str) -> list[Event]:
    return [event for event in events if event.step.writes and event.step.cell == cell]


def closure(pairs: Iterable[tuple[Event, Event]]) -> dict[Event, set[Event]]:
    """What comes behind each event, directly or not."""
    after: dict[Event, set[Event]] = {}
    for a, b in pairs:
        after.setdefault(a, set()).add(b)
    for middle in list(after):
        for others in after.values():
            if middle in others:
                others |= after[middle]
    return after


def has_cycle(edges: set[tuple[Event, Event]]) -> bool:
    after: dict[Event, set[Event]] = {}
    for a, b in edges:
        after.setdefault(a, set()).add(b)
        after.setdefault(b, set())
    while True:
        last = [event for event, others in after.items() if not others]
        if not last:
            return bool(after)
        for event in last:
            del after[event]
        for others in after.values():
            others.difference_update(last)


def readings(program: Program) -> Iterator[Reading]:
    """All that reads could read, whether allowed or not. A compare-and-swap may be a read alone."""
    ways = [
        [step, step._replace(what="fails")][: 1 + (step.what == "cas")] for thread in program.steps for step in thread
    ]
    numbers = [(i, j) for i, thread in enumerate(program.steps) for j in range(len(thread))]
    first = {cell: Event(-1, 0, Step("st", "weak", "sys", "", cell, 0)) for cell in program.cells}
    for steps in product(*ways):
        events = [Event(*number, step) for number, step in zip(numbers, steps, strict=True)]
        reads = [event for event in events if event.step.reads]
        sources = [[w for w in (first[r.step.cell], *writes_to(events, r.step.cell)) if w != r] for r in reads]
        for chosen in product(*sources):
            yield Reading(program, events, first, dict(zip(reads, chosen, strict=True)))


@cache
def _allowed(program: tuple) -> Verdict:
    shape, threads, where = program
    outcomes = set()
    has_race = False
    for reading in readings(Program(shape, threads, where, {})):
        values = reading.values()
        if values is None:
            continue
        if not all(read.step.may_read(values[write]) for read, write in reading.reads_from.items()):
            continue
        executions = [one for one in (Execution(reading, order) for order in reading.coherences()) if one.is_allowed()]
        outcomes |= {outcome for execution in executions for outcome in execution.outcomes(values)}
        has_race |= bool(executions) and reading.has_race()
    return Verdict(frozenset(outcomes), has_race)


def allowed(program: Program) -> Verdict:
    """What PTX says of a program."""
    return _allowed((program.shape, program.threads, program.where))
