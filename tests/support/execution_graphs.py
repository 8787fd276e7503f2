"""A second oracle: all execution graphs of a program of `oracle`, by interleaving or by PTX's axioms.

A graph says what each read reads from and in which order the writes to each cell come. It grows by one event at a time,
in one order only: of the threads whose next event can be there, the first one goes on. A read can be there once its
write is. So no graph comes twice, and none is missed whose reads all come behind their writes.

Of a wait only the turn that ends it is in the graph, and one that fails where such a look may be in a race.

Source: PTX ISA 8.5, 8.7 to 8.10, less fence.sc and proxies. Michalis Kokologiannakis and others, "Truly Stateless,
Optimal Dynamic Partial Order Reduction" (POPL 2022), for graphs that grow
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import NamedTuple

from oracle import ACQUIRING, ATOMIC, REACH, READING, RELEASING, TURNS, WRITING, Op, Oracle, Program, Verdict, after
from oracle_state import bits

HANG = "hang"


class Event(NamedTuple):
    """A step of a thread that has been made. source: the event that it reads from, -1: none; value: that it writes"""

    thread: int
    op: Op
    source: int | None
    value: int | None

    @property
    def reads(self) -> bool:
        return self.source is not None

    @property
    def writes(self) -> bool:
        return self.value is not None

    @property
    def is_strong(self) -> bool:
        return self.op.order != "weak"


class Thread(NamedTuple):
    """at: its next step; last: its last event; answers; is_amid: it has begun a turn; has_failed: one look has"""

    at: int = 0
    last: int = -1
    answers: tuple = ()
    is_amid: bool = False
    has_failed: bool = False


class Graph(NamedTuple):
    events: tuple[Event, ...]
    orders: dict[int, tuple[int, ...]]  # of the writes to each cell
    threads: tuple[Thread, ...]


class Graphs:
    """All graphs of a program whose hosts do nothing but launch, each kernel in a stream of its own.

    model: "sc": those of interleavings; "ptx": those that PTX allows, less loads that read what depends on them;
    "at once": of these, those in which a release of scope sys, or an atomic, has no later place than its time
    """

    def __init__(self, program: Program, model: str):
        oracle = Oracle(program)
        self.steps, self.place = oracle.threads[: oracle.first_host], oracle.place
        self.told, self.model = oracle.told, model
        self.num_bytes, self.num_hosts = program.num_bytes, len(program.hosts)
        everything = [(i, op) for i, steps in enumerate(self.steps) for op in steps]
        self.may_race = {
            (i, op)
            for i, op in everything
            if op.what in TURNS
            and any(j != i and not self.are_strong(i, op, j, other) for j, other in everything if other.what in WRITING)
        }

    def verdict(self) -> Verdict:
        faults, outcomes = set[str](), set[tuple]()
        left = [Graph((), {}, tuple(self.skip(i, Thread()) for i in range(len(self.steps))))]
        while left:
            graph = left.pop()
            left += self.grown(graph)
            waiting = [i for i, thread in enumerate(graph.threads) if thread.at < len(self.steps[i])]
            if all(self.fails(graph, i) for i in waiting):
                if self.has_race(graph):
                    faults.add("race")
                if waiting:
                    faults.add(HANG)
                else:
                    outcomes.add(self.outcome(graph))
        return Verdict(faults, outcomes)

    def outcome(self, graph: Graph) -> tuple:
        memory = bytearray(self.num_bytes)
        for cell, order in graph.orders.items():
            memory[cell : cell + 4] = graph.events[order[-1]].value.to_bytes(4, "little", signed=True)
        return tuple(memory), (*(thread.answers for thread in graph.threads), *[()] * self.num_hosts)

    # --- threads --------------------------------------------------------------------------------------------------

    def skip(self, i: int, thread: Thread) -> Thread:
        """What is done only if an answer was true."""
        steps, answers = self.steps[i], thread.answers
        at = thread.at
        while at < len(steps) and (given := steps[at].given) >= 0 and not (given < len(answers) and answers[given]):
            at += 1
        return thread._replace(at=at)

    def fails(self, graph: Graph, i: int) -> bool:
        """Whether a thread is about to wait, in vain as the cells are."""
        thread, steps = graph.threads[i], self.steps[i]
        if thread.is_amid or steps[thread.at].what not in TURNS:
            return False
        to: int | None = thread.at
        for at in range(thread.at, thread.at + (2 if steps[thread.at].what in ("either", "both") else 1)):
            if to == at:
                to = after(steps[at], at, self.value(graph, graph.orders.get(steps[at].cell, (-1,))[-1]))
        return to is None

    def value(self, graph: Graph, write: int) -> int:
        return 0 if write < 0 else graph.events[write].value or 0

    # --- one event more -------------------------------------------------------------------------------------------

    def grown(self, graph: Graph) -> Iterator[Graph]:
        count = len(graph.events)
        for i, thread in enumerate(graph.threads):
            if thread.at == len(self.steps[i]):
                continue
            op = self.steps[i][thread.at]
            behind = next((k + 1 for k in reversed(range(count)) if graph.events[k].thread >= i), 0) - 1
            if op.what not in READING:
                yield from self.with_event(graph, i, op, None)
                return  # it could be there at once: nobody goes before it
            for write in (-1, *graph.orders.get(op.cell, ())):
                if max(write, thread.last) >= behind:
                    yield from self.with_event(graph, i, op, write)

    def with_event(self, graph: Graph, i: int, op: Op, source: int | None) -> Iterator[Graph]:
        thread, me = graph.threads[i], len(graph.events)
        old = None if source is None else self.value(graph, source)
        value = written(op, old)
        to: int | None = thread.at + 1
        if op.what in TURNS:
            to = after(op, thread.at, old)
            if to is None and ((i, op) not in self.may_race or thread.has_failed):
                return
        is_amid = op.what in ("either", "both") and to == thread.at + 1
        tells = op.what in ("ld", *ATOMIC) and op.asks != "none"
        new = Thread(
            thread.at - (op.what == "again") if to is None else to,
            me,
            (*thread.answers, self.told(op, old)) if tells else thread.answers,
            is_amid,
            to is None or (is_amid and thread.has_failed),
        )
        threads = (*graph.threads[:i], self.skip(i, new), *graph.threads[i + 1 :])
        order = graph.orders.get(op.cell, ())
        places = [0] if value is None else range(len(order) + 1)
        if value is not None and source is not None:
            places = [0 if source < 0 else order.index(source) + 1]
        for place in places:
            orders = graph.orders
            if value is not None:
                orders = {**orders, op.cell: (*order[:place], me, *order[place:])}
            new_graph = Graph((*graph.events, Event(i, op, source, value)), orders, threads)
            if self.is_allowed(new_graph):
                yield new_graph

    # --- which graphs there are -----------------------------------------------------------------------------------

    def is_allowed(self, graph: Graph) -> bool:
        if not all(self.is_atomic(graph, order) for order in graph.orders.values()):
            return False
        if self.model != "sc":
            return Causes(self, graph).are_allowed() and (self.model == "ptx" or self.is_in_time(graph))
        return self.is_in_time(graph)

    def is_in_time(self, graph: Graph) -> bool:
        """Whether all have a time when they are made, and late stores one when they arrive: before a release behind."""
        edges = [0] * 2 * len(graph.events)
        last: dict[int, int] = {}
        arrived = [2 * a + self.may_be_late(event) for a, event in enumerate(graph.events)]
        for a, event in enumerate(graph.events):
            edges[2 * a] |= (arrived[a] > 2 * a) << arrived[a]
            if self.publishes(event):
                for b, other in enumerate(graph.events[:a]):
                    edges[arrived[b]] |= (other.thread == event.thread) << 2 * a
            if event.thread in last:
                edges[last[event.thread]] |= 1 << 2 * a
            last[event.thread] = 2 * a
            if event.source is not None and event.source >= 0 and graph.events[event.source].thread != event.thread:
                edges[arrived[event.source]] |= 1 << 2 * a
            if event.source is not None and self.model == "sc":
                for b in later_writes(graph, a):
                    edges[2 * a] |= 1 << arrived[b]
        for order in graph.orders.values():
            for a, b in pairwise(order):
                edges[arrived[a]] |= 1 << arrived[b]
        return not any(after >> a & 1 for a, after in enumerate(closure(edges)))

    def publishes(self, event: Event) -> bool:
        return event.op.order in RELEASING and event.op.scope == "sys" and (event.writes or event.op.what == "fence")

    def may_be_late(self, event: Event) -> bool:
        return self.model != "sc" and event.writes and not (event.reads or self.publishes(event))

    def is_atomic(self, graph: Graph, order: tuple[int, ...]) -> bool:
        """No write comes between what an atomic reads and what it writes."""
        return all(not graph.events[b].reads or graph.events[b].source == a for a, b in pairwise((-1, *order)))

    def are_strong(self, i: int, one: Op, j: int, other: Op) -> bool:
        """Whether two operations that may meet are morally strong."""
        if one.what != "fence" != other.what and one.cell != other.cell:
            return False
        if i == j:
            return True
        (rank, block, _), (other_rank, other_block, _) = self.place[i], self.place[j]
        distance = 3 if rank != other_rank else 2 if block != other_block else 1
        is_strong = "weak" not in (one.order, other.order)
        return is_strong and min(REACH[one.scope], REACH[other.scope]) >= distance

    def has_race(self, graph: Graph) -> bool:
        return Causes(self, graph).have_race()


class Causes:
    """The orders of PTX on the events of a graph: of each a set of those behind it, as an int with a bit for each."""

    def __init__(self, graphs: Graphs, graph: Graph):
        self.graph, self.events = graph, graph.events
        events, count = graph.events, len(graph.events)
        pairs = {
            (a, b): graphs.are_strong(events[a].thread, events[a].op, events[b].thread, events[b].op)
            for a, b in combinations(range(count), 2)
        }
        self.strong = {**pairs, **{(b, a): one for (a, b), one in pairs.items()}}
        self.observed = self._observation()
        edges = [0] * count
        for a, b in combinations(range(count), 2):
            edges[a] |= (events[a].thread == events[b].thread) << b
        for a, b in self._synchronizations():
            edges[a] |= 1 << b
        self.base = closure(edges)
        self.causality = list(self.base)
        for a, b in self.observed:
            self.causality[a] |= self.base[b]
            edges[a] |= 1 << b
        self.over = closure(edges)  # also by what strong stores and loads alone order
        self.coherence = self._coherence()

    def _observation(self) -> set[tuple[int, int]]:
        """8.9.2"""
        found = {
            (event.source, a)
            for a, event in enumerate(self.events)
            if event.reads and event.source >= 0 and self.both_strong(event.source, a)
        }
        while True:
            more = {(a, d) for a, b in found if self.events[b].writes for c, d in found if b == c} - found
            if not more:
                return found
            found |= more

    def both_strong(self, a: int, b: int) -> bool:
        """Whether they are morally strong, and neither is weak."""
        return self.strong[a, b] and self.events[a].is_strong and self.events[b].is_strong

    def _synchronizations(self) -> Iterator[tuple[int, int]]:
        """8.8, 8.9.4: from the first operation of a release pattern to the last one of an acquire pattern"""
        events, releases, acquires = self.events, [], []
        for a, event in enumerate(events):
            if event.writes and event.op.order in RELEASING:
                releases.append((a, a))
            if event.reads and event.op.order in ACQUIRING:
                acquires.append((a, a))
            for b in range(a + 1, len(events)):
                other = events[b]
                if event.thread != other.thread:
                    continue
                is_same = event.op.cell == other.op.cell
                if other.writes and other.is_strong and event.op.order in RELEASING:
                    if event.op.what == "fence" or (event.writes and is_same):
                        releases.append((a, b))
                if event.reads and event.is_strong and other.op.order in ACQUIRING:
                    if other.op.what == "fence" or (other.reads and is_same):
                        acquires.append((a, b))
        for first, write in releases:
            for read, last in acquires:
                if (write, read) in self.observed and events[first].thread != events[last].thread:
                    if self.strong[first, last]:
                        yield first, last

    def _coherence(self) -> list[int]:
        """8.9.6: what the order of the writes to a cell relates, by morally strong ones and by causality"""
        edges = [0] * len(self.events)
        for order in self.graph.orders.values():
            for a, b in combinations(order, 2):
                edges[a] |= (self.strong[a, b] or self.causality[a] >> b & 1) << b
        return closure(edges)

    def are_allowed(self) -> bool:
        """8.10.1, 5 and 6"""
        edges = [0] * len(self.events)
        for order in self.graph.orders.values():
            for a, b in combinations(order, 2):
                if self.causality[b] >> a & 1:
                    return False
        for a, b in combinations(range(len(self.events)), 2):
            one, other = self.events[a], self.events[b]
            if (
                one.thread == other.thread
                and one.op.cell == other.op.cell
                and "fence" not in (one.op.what, other.op.what)
            ):
                edges[a] |= 1 << b
        for a, event in enumerate(self.events):
            for b in bits(self.coherence[a]):
                edges[a] |= self.strong[a, b] << b
            if not event.reads:
                continue
            later = sum(1 << b for b in self.graph.orders.get(event.op.cell, ()))
            if event.source >= 0:
                if self.causality[a] >> event.source & 1:
                    return False
                edges[event.source] |= self.strong[event.source, a] << a
                later = self.coherence[event.source]
            for b in bits(later & ~(1 << a)):
                if self.causality[b] >> a & 1 or (event.writes and self.strong[a, b] and self.coherence[b] >> a & 1):
                    return False
                edges[a] |= self.strong[a, b] << b
        return not any(after >> a & 1 for a, after in enumerate(closure(edges)))

    def have_race(self) -> bool:
        """Whether two operations conflict in no order. A load is over before its thread stores anything behind it."""
        for a, b in combinations(range(len(self.events)), 2):
            one, other = self.events[a], self.events[b]
            if one.thread == other.thread or "fence" in (one.op.what, other.op.what) or one.op.cell != other.op.cell:
                continue
            if not (one.writes or other.writes) or self.strong[a, b]:
                continue
            if self.causality[a] >> b & 1 or self.causality[b] >> a & 1:
                continue
            if (one.writes or not self.over[a] >> b & 1) and (other.writes or not self.over[b] >> a & 1):
                return True
        return False


def later_writes(graph: Graph, read: int) -> tuple[int, ...]:
    """Those behind what a read reads from, its own left out."""
    event = graph.events[read]
    order = graph.orders.get(event.op.cell, ())
    later = order if event.source < 0 else order[order.index(event.source) + 1 :]
    return tuple(b for b in later if b != read)


def written(op: Op, old: int | None) -> int | None:
    """What a step writes; None if it writes nothing, as a compare-and-swap that fails."""
    match op.what:
        case "add":
            return old + op.value
        case "cas" | "lock":
            return op.value if old == op.other else None
        case "st" | "exch":
            return op.value
    return None


def closure(edges: list[int]) -> list[int]:
    """What can be reached from each, in a step or more."""
    found = []
    for reached in edges:
        left = reached
        while left:
            one = left & -left
            more = edges[one.bit_length() - 1] & ~reached
            reached |= more
            left = left & ~one | more
        found.append(reached)
    return found


__all__ = ["Graphs", "HANG"]
