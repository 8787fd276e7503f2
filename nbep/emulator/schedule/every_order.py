"""Which steps of a run come before which: for the tree of all schedules, once the run is over.

Two steps that meet in a byte depend on each other if one of them stores, but not if they commute:

    add, add     nobody asks for the old values, or only for what is the same in whatever order the adds come that
                 commute; at an mbarrier, arrivals of threads and copies in one phase
    load, store  the load gets the same answers before and after the store, and its thread hears the same or more; and
                 the store comes behind all others that have been made to the cell, however independent steps are put

The last condition makes it the same for all orders of independent steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from .every_seen import Cell, Entry, agree, shared_reach
from .every_step import Clock, Step, Who, join

MOST_SUMS = 1000  # that are looked at; where adds have more, their order counts


def comes_before(steps: list[Step], at: int, later: int) -> bool:
    return steps[later].clock.get(steps[at].who, -1) >= at


class Races:
    """Steps of a run, one after the other: sets their clocks.

    found: pairs that depend on each other, and that nothing else orders; linked: of whom
    """

    def __init__(self, steps: list[Step]):
        self.steps = steps
        self.found: list[tuple[int, int]] = []
        self.linked: set[tuple[Who, Who]] = set()
        self.loads: dict[Cell, list[int]] = {}  # those that later stores may depend on
        self.words: dict[Any, list[int]] = {}  # all steps
        self.without_cell: dict[Any, list[int]] = {}  # those of cells that others meet with another size, and of hosts
        self.before_meeting: dict[int, Clock] = {}  # what comes before steps, by `after`, which those who met share
        self.end = 0

    def go_to(self, end: int) -> None:
        """Up to this step."""
        for number in range(self.end, end):
            self.add(number)
        self.end = max(self.end, end)

    def add(self, i: int) -> None:
        steps = self.steps
        step = steps[i]
        step.is_cut = False
        if id(step.after) not in self.before_meeting:
            self.before_meeting[id(step.after)] = clock_before(steps, step)
        clock = dict(self.before_meeting[id(step.after)])
        known = dict(clock)
        if step.cell is None or step.cell.is_mixed:
            before = set(plain(steps, step, self.words))
            for word in step.access.words:
                self.without_cell.setdefault(word, []).append(i)
        elif step.access.is_store:
            phase = step.cell.entries[step.entry].phase if step.commutes else None
            before = set(stores_before(steps, step.cell, step.entry - 1, phase))
            for at in before:
                join(clock, steps[at].clock)
            before.update(loads_before(steps, i, self.loads, clock))
            before.update(plain(steps, step, self.without_cell))
        else:
            before = self.before_load(step)
            self.loads.setdefault(step.cell, []).append(i)
        before -= step.behind
        if step.refused and step.cell is not None and not step.cell.is_mixed:
            self.found += [(at, i) for at in where_it_succeeds(steps, step, last_needed(steps, step), known)]
        else:
            self.found += [(at, i) for at in immediate(steps, before, known, step.who)]
        for word in step.access.words:
            self.words.setdefault(word, []).append(i)
        for at in before | step.behind:
            if known.get(steps[at].who, -1) < at:
                self.linked.add((steps[at].who, step.who))
            join(clock, steps[at].clock)
        clock[step.who] = i
        step.clock = clock

    def before_load(self, load: Step) -> set[int]:
        assert load.cell is not None
        last = last_needed(self.steps, load)
        return {*stores_before(self.steps, load.cell, last), *plain(self.steps, load, self.without_cell)}

    def of_failed(self, at: int, looks: list[Step]) -> Iterator[tuple[int, Step, int]]:
        """Of a turn that has failed behind so many steps: a store, and the look that is to come before it in another
        run, as the which of its turn.
        """
        steps = self.steps
        clock = clock_before(steps, looks[0])
        for number, look in enumerate(looks, 1):
            look.clock = dict(clock)
            if look.cell is None or look.cell.is_mixed or look.reading is None:  # all that was stored there may matter
                before = {one for one in range(at) if steps[one].access.meets(look.access)}
                found = [one for one in before if clock.get(steps[one].who, -1) < one]
            else:
                before = {one for one in self.before_load(look) if one < at}
                is_only = len(looks) == 1
                found = list(
                    where_it_succeeds(steps, look, look.reading.index, clock)
                    if is_only
                    else immediate(steps, before, clock, look.who)
                )
            yield from ((store, look, number) for store in found)
            for one in before:
                join(clock, steps[one].clock)


def settle_unsure(steps: list[Step]) -> None:
    """Adds that have asked for less than the old value, in a run that is over: which of them are exact nevertheless.

    Of adds that commute, one after the other, none is if they may come in any order: what was there before tells as
    much, and gives the same answers with and without each of the others.
    """
    for cell in {step.cell for step in steps if step.asks_of_old}:
        assert cell is not None
        group: list[Step] = []
        cut = 0
        for at, entry in enumerate([*cell.entries, cell.entries[0]]):
            step = None if entry.step is None else steps[entry.step]
            if step is not None and step.commutes:
                group.append(step)
                continue
            asking = [one for one in group if one.asks_of_old]
            if asking and not may_begin(cell, cut, group, asking):
                for one in asking:
                    assert one.reading is not None
                    one.reading.is_exact = True
            group, cut = [], at


def may_begin(cell: Cell, cut: int, group: list[Step], asking: list[Step]) -> bool:
    """Whether some adds that commute would all get the same answers behind an entry, in whatever order they come."""
    least = shared_reach(entry.message for entry in cell.entries[cut : cut + len(group) + 1])
    for one in asking:
        reading = one.reading
        assert reading is not None
        if cell.is_mixed or reading.position > cut or reading.reach < least:
            return False
        others = (other.number or 0 for other in group if other is not one)
        values = sums(cell, cell.entries[cut].value, others, MOST_SUMS)
        if len(values) > MOST_SUMS or not all(agree(reading.asked, value) for value in values):
            return False
    return True


def clock_before(steps: list[Step], step: Step) -> Clock:
    """What comes before a step in its thread, and in those that it has met."""
    clock: Clock = {}
    for at in step.after.values():
        join(clock, steps[at].clock)
    return clock


def plain(steps: list[Step], step: Step, words: dict[tuple, list[int]]) -> Iterator[int]:
    for word in step.access.words:
        yield from (at for at in words.get(word, ()) if steps[at].access.meets(step.access))


def stores_before(steps: list[Step], cell: Cell, entry: int, phase: int | None = None) -> Iterator[int]:
    """The stores up to an entry on which one that reads it depends, or one that comes behind it.

    phase: of one that commutes with others of that phase
    """
    found: int | None = None
    for one in reversed(cell.entries[: entry + 1]):
        if one.step is None:
            continue
        if not steps[one.step].commutes:
            yield one.step
            return
        if one.phase == phase:
            continue
        if found not in (None, one.phase):  # that phase is before this one
            return
        found = one.phase
        yield one.step


def is_last_of_all(steps: list[Step], cell: Cell, entry: int, clock: Clock) -> bool:
    """Whether a store comes behind all others up to there. clock: what comes before it"""
    at = cell.entries[entry].step
    if at is None:
        return False
    if not steps[at].commutes:
        return True
    others = stores_before(steps, cell, entry - 1)
    return all(clock.get(steps[other].who, -1) >= other for other in others)


def last_needed(steps: list[Step], load: Step) -> int:
    """The entry that a load must come behind."""
    reading, cell = load.reading, load.cell
    assert reading is not None
    assert cell is not None
    at = reading.index
    while at > reading.position and not reading.is_exact:
        number = cell.entries[at].step
        if number is None or not is_last_of_all(steps, cell, at, steps[number].clock):
            break
        at -= 1
    return at


def loads_before(steps: list[Step], number: int, loads: dict[Cell, list[int]], clock: Clock) -> Iterator[int]:
    """The loads that must come before a store. clock: what else does"""
    store = steps[number]
    cell = store.cell
    assert cell is not None
    free = unordered(steps, cell, store.entry, clock)
    left = []
    for at in loads.get(cell, ()):
        load = steps[at]
        reading = load.reading
        assert reading is not None
        is_before = clock.get(load.who, -1) >= at
        if not is_before and not load.is_cut:
            load.is_cut = not commutes_behind(steps, at, store, free)
        if is_before or load.is_cut:
            yield at
        if store.commutes or not (is_before or load.is_cut):
            left.append(at)
    loads[cell] = left


def unordered(steps: list[Step], cell: Cell, entry: int, clock: Clock) -> list[int]:
    """The stores up to an entry that do not come before it, and with which it commutes. clock: what comes before it"""
    at = cell.entries[entry].step
    if at is None or not steps[at].commutes:
        return []
    return [other for other in stores_before(steps, cell, entry - 1) if clock.get(steps[other].who, -1) < other]


def commutes_behind(steps: list[Step], at: int, store: Step, free: list[int]) -> bool:
    """Whether it makes no difference whether a load comes before a store or behind it, wherever they meet.

    free: the stores whose order with this one is not known. All of them must come behind the load; then it cannot meet
    them before this one.
    """
    load, cell = steps[at], store.cell
    reading = load.reading
    assert reading is not None
    assert cell is not None
    entry, before = cell.entries[store.entry], cell.entries[store.entry - 1]
    if reading.is_exact or entry.least > reading.reach or (before.is_wall and store.entry - 1 > reading.index):
        return False
    if not free:
        return agree(reading.asked, entry.value)
    if cell.has_phases or any(steps[other].clock.get(load.who, -1) < at for other in free):
        return False
    between = cell.entries[reading.index + 1 : store.entry]
    if any(one.least > reading.reach or one.is_wall for one in between):
        return False
    return agree(reading.asked, cell.wrap(entry.value - sum(steps[other].number or 0 for other in free)))


def immediate(steps: list[Step], before: set[int], known: Clock, who: Who) -> Iterator[int]:
    """Those of the steps before one that nothing between orders before it."""
    for at in before:
        of = steps[at].who
        if of == who or known.get(of, -1) >= at:
            continue
        if not any(other != at and comes_before(steps, at, other) for other in before):
            yield at


def where_it_succeeds(steps: list[Step], poll: Step, last: int, known: Clock) -> Iterator[int]:
    """The stores before which a poll is to come in another run, because it might not fail there.

    last: the number of the last entry that it comes behind
    """
    assert poll.cell is not None
    if poll.cell.has_phases:
        yield from where_phase_is_over(steps, poll, last, known)
        return
    entries = poll.cell.entries
    has_one = False
    while True:
        adds, first = commuting_since(steps, entries, last)
        new = [at for at in adds if known.get(steps[at].who, -1) < at]
        for at in new:
            others = (-(steps[other].number or 0) for other in new if other != at)
            if not poll.fails(sums(poll.cell, entries[last].value - (steps[at].number or 0), others)):
                has_one = True
                yield at
        stored = entries[first].step if first >= 0 else None
        if has_one or stored is None or known.get(steps[stored].who, -1) >= stored:
            return
        last = first - 1
        before, _ = commuting_since(steps, entries, last)
        numbers = (-(steps[one].number or 0) for one in before if known.get(steps[one].who, -1) < one)
        if not poll.fails(sums(poll.cell, entries[last].value, numbers)):
            if not poll.fails({entries[last].value}):
                yield stored
                return  # else it has to come before some of the adds, too


def where_phase_is_over(steps: list[Step], poll: Step, last: int, known: Clock) -> Iterator[int]:
    """The same of a poll of an mbarrier: the arrivals of the latest phase in which it might not fail."""
    assert poll.cell is not None
    entries = poll.cell.entries
    while last >= 0 and entries[last].step is not None:
        phase, arrivals = entries[last].phase, []
        while last >= 0 and entries[last].step is not None and entries[last].phase == phase:
            arrivals.append(entries[last].step)
            last -= 1
        new = [at for at in arrivals if at is not None and known.get(steps[at].who, -1) < at]
        if not new:
            return
        if not poll.fails({phase}):
            yield from new
            return


def commuting_since(steps: list[Step], entries: list[Entry], last: int) -> tuple[list[int], int]:
    """The adds that commute, up to an entry, and the number of the entry before them; -1 if there is none."""
    adds: list[int] = []
    while last >= 0:
        at = entries[last].step
        if at is None or not steps[at].commutes:
            return adds, last
        adds.append(at)
        last -= 1
    return adds, -1


def sums(cell: Cell, value: int, numbers: Iterable[int], most: float = math.inf) -> set[int]:
    """What a cell may hold if some of these are added, whichever they are. most: give up where there are more"""
    values = {cell.wrap(value)}
    for number in numbers:
        if len(values) <= most:
            values |= {cell.wrap(one + number) for one in values}
    return values
