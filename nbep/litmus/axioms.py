"""What the PTX memory consistency model allows: all candidate executions of a small program, less those that an axiom
forbids.

An execution says which write each read reads from, and in which order the writes to each cell come. The words are those
of the PTX ISA. fence.sc and proxies are left out: no program here has them. That stores do not depend on loads here
makes "no thin air" hold by itself.

Source: PTX ISA 8.5, Memory Consistency Model (8.7 Morally strong operations to 8.10 Axioms); Lustig, Sahasrabuddhe,
Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency Model" (ASPLOS 2019)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import combinations, permutations, product
from typing import NamedTuple

from nbep.litmus.programs import ACQUIRING, REACH, RELEASING, Program, Step

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


class Execution:
    """One candidate: `reads_from` by read, `coherence` by cell, from the first write on."""

    def __init__(
        self, program: Program, events: list[Event], reads_from: dict[Event, Event], coherence: dict[str, list[Event]]
    ):
        self.places = program.places
        self.events = events
        self.reads_from = reads_from
        self.position = {event: i for order in coherence.values() for i, event in enumerate(order)}
        self.coherence = coherence
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

        for order in self.coherence.values():
            for event in order:
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

    def _causality(self) -> set[tuple[Event, Event]]:
        observation = self._observation()
        events = self.events
        base = {(a, b) for a, b in combinations(events, 2) if a.thread == b.thread}
        releases, acquires = self._patterns()
        for (first, write), (read, last) in product(releases, acquires):
            if (write, read) in observation and self.is_morally_strong(first, last):
                base.add((first, last))
        for a, b in product(events, events):
            if a.step.what == b.step.what == "bar" and a.thread != b.thread and self.distance(a, b) == 1:
                base.add((a, b))
        after: dict[Event, set[Event]] = {event: {b for a, b in base if a == event} for event in events}
        for middle in events:
            for event in events:
                if middle in after[event]:
                    after[event] |= after[middle]
        causality = {(a, b) for a in events for b in after[a]}
        causality |= {(a, c) for a, b in observation for c in after.get(b, ())}
        first_writes = [order[0] for order in self.coherence.values()]
        return causality | {(write, event) for write in first_writes for event in events}

    def is_allowed(self) -> bool:
        return self._is_coherent() and self._is_atomic() and self._is_sequential_per_cell() and self._is_causal()

    def _is_coherent(self) -> bool:
        position = self.position
        return not any(
            a in position and b in position and a.step.cell == b.step.cell and position[a] >= position[b]
            for a, b in self.causality
        )

    def _is_atomic(self) -> bool:
        """Between what an atomic reads and what it writes comes no write that is morally strong to it."""
        for event, write in self.reads_from.items():
            if event.step.modifies:
                between = self.coherence[event.step.cell][self.position[write] + 1 : self.position[event]]
                if self.position[write] > self.position[event] or any(
                    self.is_morally_strong(event, other) for other in between
                ):
                    return False
        return True

    def _communication(self) -> set[tuple[Event, Event]]:
        edges = {(write, read) for read, write in self.reads_from.items()}
        for order in self.coherence.values():
            edges |= set(combinations(order, 2))
        for read, write in self.reads_from.items():
            later = self.coherence[read.step.cell][self.position[write] + 1 :]
            edges |= {(read, other) for other in later if other != read}
        return edges

    def _is_sequential_per_cell(self) -> bool:
        edges = {(a, b) for a, b in self._communication() if self.is_morally_strong(a, b)}
        for a, b in combinations(self.events, 2):
            if a.thread == b.thread and a.step.cell and a.step.cell == b.step.cell:
                edges.add((a, b))
        return not has_cycle(edges)

    def _is_causal(self) -> bool:
        for read, write in self.reads_from.items():
            if (read, write) in self.causality:
                return False
            later = self.coherence[read.step.cell][self.position[write] + 1 :]
            if any((other, read) in self.causality for other in later if other != read):
                return False
        return True

    def has_race(self) -> bool:
        """Whether two conflicting operations are neither morally strong nor related in causality order."""
        return any(
            a.step.cell == b.step.cell != ""
            and (a.step.writes or b.step.writes)
            and not self.is_morally_strong(a, b)
            and not {(a, b), (b, a)} & self.causality
            for a, b in combinations(self.events, 2)
        )

    def outcome(self, values: dict[Event, int]) -> Outcome:
        registers = {read.step.register: values[write] for read, write in self.reads_from.items() if read.step.register}
        return frozenset({**registers, **{cell: values[order[-1]] for cell, order in self.coherence.items()}}.items())


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


def candidates(program: Program) -> Iterator[Execution]:
    """All executions that each read and each cell could have, whether allowed or not."""
    events = [Event(i, j, step) for i, thread in enumerate(program.steps) for j, step in enumerate(thread)]
    first = {cell: Event(-1, 0, Step("st", "weak", "sys", "", cell, 0)) for cell in program.cells}
    writes = {cell: [event for event in events if event.step.writes and event.step.cell == cell] for cell in first}
    reads = [event for event in events if event.step.reads]
    sources = [[w for w in (first[r.step.cell], *writes[r.step.cell]) if w != r] for r in reads]
    orders = [[[first[cell], *order] for order in permutations(of_cell)] for cell, of_cell in writes.items()]
    for chosen in product(*sources):
        for order in product(*orders):
            yield Execution(
                program, events, dict(zip(reads, chosen, strict=True)), dict(zip(writes, order, strict=True))
            )


@cache
def _allowed(program: tuple) -> Verdict:
    shape, threads, where = program
    outcomes = set()
    has_race = False
    for execution in candidates(Program(shape, threads, where, {})):
        values = execution.values()
        if values is None or not execution.is_allowed():
            continue
        if any(r.step.what == "wait" and values[w] < r.step.value for r, w in execution.reads_from.items()):
            continue
        outcomes.add(execution.outcome(values))
        has_race |= execution.has_race()
    return Verdict(frozenset(outcomes), has_race)


def allowed(program: Program) -> Verdict:
    """What PTX says of a program."""
    return _allowed((program.shape, program.threads, program.where))
