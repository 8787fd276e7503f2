"""Parts of a program that do not meet: the choices of each are tried alone, so schedules of parts add, not multiply.

A block is a *unit*, and all hosts are one. Two units are of one part if they touch something in common, and none of the
two knows, when it begins, of all that the other one does there. In a run of a part all others make the steps of the
first run, each behind those on which it has depended there. That is enough, since no run of another part could change
what this one does, if

    - two parts of several schedules touch nothing in common; or all of the one comes before any launch of the other one
    - behind the launches of a part memory holds what it has held there in all other runs of it, or nobody reads it
    - nobody else touches a word between two launches of a part that store to it
    - behind each of its blocks the same launches are known to be over in all of its runs, and the same of hosts
    - a part to which hosts belong has one schedule: what a host has been told is nowhere to be looked at

All of that is looked at in each run, in what parts have touched in any of them. If two turn out to meet, they become
one. If a part leaves other results, or another one does not go on as it did, then all schedules are run together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from .every_noted import CPU, Noted, Unit, unit_of
from .every_step import Access, Step, Who

Tree = Any  # that of `every`
BEFORE, BEHIND, BESIDE = "<", ">", ""
TURNED = {BEFORE: BEHIND, BEHIND: BEFORE, BESIDE: BESIDE}


def turned(orders: set[str]) -> set[str]:
    return {TURNED[order] for order in orders}


class Parts:
    """The parts of a program, and of which one the runs under way are.

    part_of: the part of each unit, by the least of its units
    seen: how many schedules parts had that have been seen whole, and runs that were given up
    left: of number parts those that are to come; focus: the units of the one under way, None in the first run
    steps: of the first run, by who made them: the access, and the steps on which it depended: whose, and which of his
    is_broken: whether they have turned out not to do
    """

    def __init__(self) -> None:
        self.part_of: dict[Unit, Unit] = {}
        self.with_choices: set[Unit] = set()
        self.seen: dict[frozenset[Unit], tuple[int, int]] = {}
        self.left: list[Unit] = []
        self.number = 1
        self.focus: frozenset[Unit] | None = None
        self.steps: dict[Who, list[tuple[Access, list[tuple[Who, int]]]]] = {}
        self.touched: dict[Unit, tuple[set[Any], set[Any]]] = {}
        self.several: set[Unit] = set()
        self.unread: dict[frozenset[Unit], set[Any]] = {}
        self.orders: dict[tuple[Unit, Unit], set[str]] = {}
        self.met_by_hosts: set[Unit] = set()
        self.results: list[dict[Any, bytes]] = []
        self.known_behind: dict[Unit, tuple[Any, ...]] = {}
        self.sides: dict[tuple[Unit, Unit], dict[Any, set[str]]] = {}
        self.is_broken = self.has_changed = self.is_new = False
        self.begin()

    # --- a run ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.is_new = False
        self.noted = Noted(self.focus or frozenset())

    def is_of(self, who: Who) -> bool:
        """Whether the choices of a thread are to be tried now."""
        return self.focus is None or unit_of(who) in self.focus

    def offered(self, tree: Tree, waiting: dict[Who, Access]) -> dict[Who, Access]:
        """Who of those that wait is to be chosen from: one of another part, as soon as it can go on; else the part."""
        if self.focus is None or self.is_broken:
            return waiting
        made = Counter(step.who for step in tree.steps)
        depth = len(tree.steps)
        failed = tree.choices[depth].failed if depth < len(tree.choices) else ()
        mine = {}
        for who, access in waiting.items():
            if self.is_of(who):
                mine[who] = access
                continue
            own = self.steps.get(who, [])
            if made[who] >= len(own) or own[made[who]][0] != access or who in failed:
                self.is_broken = True
                return waiting
            if all(made[other] > number or self.is_of(other) for other, number in own[made[who]][1]):
                return {who: access}
        self.is_broken |= not mine
        return mine or waiting

    def end_launch(self, launch: Any) -> None:
        """A launch is over: what the part has stored so far; behind its last launch that is all."""
        of_launch = launch.rank, launch.name, launch.number
        if any(unit[:3] == of_launch for unit in self.noted.focus):
            self.noted.hold()

    # --- once it is over ------------------------------------------------------------------------------------------

    def run_over(self, tree: Tree) -> None:
        """A run has come to its end, and all of its steps are known."""
        if self.focus is None:
            self.learn_steps(tree)
        elif Counter(step.who for step in tree.steps if not self.is_of(step.who)) != {
            who: len(own) for who, own in self.steps.items() if not self.is_of(who)
        }:
            self.is_broken = True
        noted = self.noted
        self.is_broken |= noted.is_unclear or (self.focus is not None and noted.touched.keys() != self.touched.keys())
        if self.is_broken or not (self.leave_same() and self.know_same()):
            self.is_broken = True
            return
        for unit, touched in noted.touched.items():
            loads, stores = self.touched.setdefault(unit, (set(), set()))
            loads.update(touched.loads, touched.changed)
            stores.update(touched.stores)
        units = sorted(noted.touched)
        met = [self.find_order(one, two) for n, one in enumerate(units) for two in units[n + 1 :]]
        self.met_by_hosts |= noted.met_by_hosts()
        waits = {word for step in tree.steps if step.is_wait for word in step.access.words}
        for unit, one in noted.touched.items():
            if any((name, word) in waits for made, word in one.stores for name in noted.names[made]):
                self.met_by_hosts.add(unit)
        self.join_those_that_meet(tree, [pair for pair in met if pair is not None])

    def leave_same(self) -> bool:
        """Whether the part leaves in memory what it has left in its first run, but where nobody may read it."""
        if self.focus is None:
            return True
        noted, held = self.noted, self.noted.held
        stored = set[Any]().union(*map(noted.stored_by, noted.focus))
        self.results.append(held)
        first = self.results[0]
        differing = {word for word in first.keys() | held.keys() if first.get(word) != held.get(word)}
        self.unread.setdefault(noted.focus, set()).update(differing)
        is_one = len(self.results) == 1 or CPU not in noted.focus
        return is_one and stored == held.keys() and not any(map(noted.is_viewed, differing))

    def know_same(self) -> bool:
        """Whether behind each unit of the part the same is known as in the first run: chains lead through it so."""
        known = self.noted.known_behind()
        if self.focus is None:
            self.known_behind = known
        return all(known.get(unit) == self.known_behind.get(unit) for unit in self.focus or ())

    def are_unread(self) -> bool:
        """Whether nobody has read, behind a part, what that may leave different."""
        for part, words in self.unread.items():
            for unit, (loads, _) in self.touched.items():
                if unit not in part and not self.is_before(unit, part) and not loads.isdisjoint(words):
                    return False
        return True

    def is_before(self, unit: Unit, part: frozenset[Unit]) -> bool:
        """Whether a unit is over before a part begins."""
        orders = [self.orders.get((unit, one)) if unit < one else self.orders.get((one, unit)) for one in part - {CPU}]
        wanted = [{BEFORE} if unit < one else {BEHIND} for one in part - {CPU}]
        return orders == wanted

    def find_order(self, one: Unit, two: Unit) -> tuple[Unit, Unit] | None:
        """Learn in which order two units are. Returns them if they have something in common that nothing orders."""
        noted = self.noted
        place, other = noted.places[one], noted.places[two]
        order = BEFORE if place.is_before(other) else BEHIND if other.is_before(place) else BESIDE
        self.orders.setdefault((one, two), set()).add(order)
        if order != BESIDE:
            return None
        is_met, sides = False, self.sides.setdefault((one, two), {})
        for word in noted.touched[one].common(noted.touched[two]):
            is_before = noted.touched[one].is_known(word, other.start)
            side = BEFORE if is_before else BEHIND if noted.touched[two].is_known(word, place.start) else BESIDE
            sides.setdefault(word, set()).add(side)
            is_met |= side == BESIDE
        return (one, two) if is_met else None

    def learn_steps(self, tree: Tree) -> None:
        """Of the first run: what each thread does, and behind which steps of others."""
        numbers = []
        for step in tree.steps:
            own = self.steps.setdefault(step.who, [])
            numbers.append((step.who, len(own)))
            own.append((step.access, [numbers[at] for at in sorted(step.direct)]))
            if step.who[1] and not is_of_block(step.who):
                self.is_broken = True

    def join_those_that_meet(self, tree: Tree, met: list[tuple[Unit, Unit]]) -> None:
        """Find the parts, in all that is known of them."""
        before = dict(self.part_of), self.parts_with_choices
        for unit in (*self.touched, *(unit_of(who) for who in self.steps), CPU):
            self.part_of.setdefault(unit, unit)
        for unit in self.met_by_hosts:
            self.join(unit, CPU)
        for one, two in tree.races.found:
            self.join(unit_of(tree.steps[one].who), unit_of(tree.steps[two].who))
            self.with_choices.add(unit_of(tree.steps[one].who))
        if any(unit_of(who) == CPU for who in self.steps):
            self.with_choices.add(CPU)
        for one, two in met:
            self.join(one, two)
        while self.join_those_between():
            pass
        self.has_changed = self.focus is not None and (self.part_of, self.parts_with_choices) != before

    def join_those_between(self) -> bool:
        """Join a part with those who may touch a word between two of its launches that store to it. Were there any?"""
        storing: dict[Any, dict[Unit, list[Unit]]] = {}
        touching: dict[Any, list[Unit]] = {}
        for unit, (loads, stores) in self.touched.items():
            for word in stores:
                storing.setdefault(word, {}).setdefault(self.part_of[unit], []).append(unit)
            for word in loads | stores:
                touching.setdefault(word, []).append(unit)
        found = []
        for word, parts in storing.items():
            for part, units in parts.items():
                if len({unit[:3] for unit in units}) == 1:
                    continue
                for one in touching[word]:
                    sides = set[str]().union(*(self.sides_of(one, two, word) for two in units))
                    if self.part_of[one] != part and len(sides) > 1:
                        found.append(self.join(part, one))
                if self.noted.is_for_hosts(word) and any(
                    self.sides_of(one, two, word) != {BESIDE}
                    for n, one in enumerate(units)
                    for two in units[n + 1 :]
                    if one[:3] != two[:3]
                ):
                    found.append(self.join(part, CPU))
        return any(found)

    def sides_of(self, one: Unit, two: Unit, word: Any) -> set[str]:
        """Whether a unit touches a word before another one, or behind it, as far as that is known at their starts."""
        if one > two:
            return turned(self.sides_of(two, one, word))
        orders = self.orders.get((one, two), set())
        sides = self.sides.get((one, two), {}).get(word, {BEFORE, BEHIND})
        return orders - {BESIDE} | sides if BESIDE in orders else orders

    def join(self, one: Unit, two: Unit) -> bool:
        """Make the parts of two units one. Whether they were two."""
        a, b = self.part_of[one], self.part_of[two]
        for unit, part in self.part_of.items():
            if part in (a, b):
                self.part_of[unit] = min(a, b)
        return a != b

    def join_several(self) -> bool:
        """Join parts of several schedules, none wholly before or beside the other. Whether there are any."""
        found = []
        orders: dict[tuple[Unit, Unit], set[str]] = {}
        for (one, two), order in self.orders.items():
            if one in self.several and two in self.several:
                a, b = self.part_of[one], self.part_of[two]
                key = (a, b) if a < b else (b, a)
                orders.setdefault(key, set()).update(order if a < b else turned(order))
                if BESIDE in order and self.may_meet(one, two):
                    found.append(self.join(one, two))
        return any([*found, *(self.join(a, b) for (a, b), order in orders.items() if len(order) > 1 and a != b)])

    def may_meet(self, one: Unit, two: Unit) -> bool:
        """Whether they have touched something in common, in any runs."""
        (loads, stores), (others, stored) = self.touched[one], self.touched[two]
        return not (stores.isdisjoint(stored) and stores.isdisjoint(others) and stored.isdisjoint(loads))

    # --- from one part to the next --------------------------------------------------------------------------------

    def set_out(self) -> bool:
        """Begin with the parts that have not been seen whole. False if there are not two parts."""
        parts = self.parts_with_choices
        self.left = [part for part in parts if self.units_of(part) not in self.seen]
        self.number = len(parts)
        self.has_changed = False
        return self.number > 1 and not self.is_broken and self.go_on()

    def units_of(self, part: Unit) -> frozenset[Unit]:
        return frozenset(unit for unit, of in self.part_of.items() if of == part)

    def counts(self) -> tuple[int, int]:
        """How many schedules the parts have that have been seen, besides the first run; and runs that were given up."""
        counts = [self.seen[units] for part in self.parts_with_choices if (units := self.units_of(part)) in self.seen]
        return sum(schedules - 1 for schedules, _ in counts), sum(redundant for _, redundant in counts)

    @property
    def parts_with_choices(self) -> list[Unit]:
        return sorted({self.part_of[unit] for unit in self.with_choices})

    def go_on(self) -> bool:
        """Begin with the next part. False if there is none."""
        if not self.left:
            return False
        self.focus = self.units_of(self.left.pop(0))
        self.results = []
        self.is_new = True
        return True

    def is_race_of(self, one: Step, two: Step) -> bool:
        """Whether the order of two steps is a choice of the part. If it is one of two parts, these are not known."""
        mine = self.is_of(one.who), self.is_of(two.who)
        self.is_broken |= mine[0] != mine[1]
        return all(mine)


def is_of_block(who: Who) -> bool:
    """Whether it is a thread, or a copy of one: no event, and no SM that somebody asks for."""
    return who[1] != "event" and who[3] >= 0


class InParts:
    """The part of a tree of runs that goes from one part of the program to the next.

    parts: None if all schedules are run together
    parts_after: how many schedules are run together, before parts are tried, if these have choices of two parts;
        0: parts are tried in any case; None: all are run together
    noted: what units touch in the run under way; None if nobody wants to know
    together: where all schedules together had come when the parts were begun with: choices, failures, and the counts
    """

    choices: list[Any]
    failures: dict[Any, Any]
    schedules: int
    redundant: int
    parts: Parts | None
    parts_after: int | None
    noted: Noted | None
    together: tuple[list[Any], dict[Any, Any], int, int]
    is_whole: bool
    go_on: Callable[[], bool]

    def begin_in_parts(self) -> None:
        """A run begins."""
        if self.parts_after is not None and self.schedules + self.redundant == 0 and self.parts is None:
            self.parts = Parts()
        if self.parts is not None:
            self.parts.begin()
        self.noted = self.parts.noted if self.parts is not None and (self.is_first or self.is_in_part) else None

    @property
    def is_first(self) -> bool:
        """Whether the parts are not known yet: the run under way tells them."""
        return self.parts is not None and not self.parts.part_of

    @property
    def is_in_part(self) -> bool:
        return self.parts is not None and self.parts.focus is not None

    def is_of_part(self, who: Who) -> bool:
        """Whether the choices of a thread are to be tried now."""
        return self.parts is None or self.parts.is_of(who)

    def is_race(self, one: Step, two: Step) -> bool:
        """Whether the order of two steps is to be tried now."""
        return self.parts is None or self.parts.is_race_of(one, two)

    def those_of_part(self, first: dict[Who, int]) -> dict[Who, int]:
        """Of those who can begin what is to come, the ones that may be chosen."""
        mine = {who: begin for who, begin in first.items() if self.is_of_part(who)}
        if self.parts is not None and first and not mine:
            self.parts.is_broken = True
        return mine

    def end_in_parts(self, is_redundant: bool) -> bool:
        """A run is over, and all that comes of it. Whether the next one begins from the beginning."""
        parts = self.parts
        if parts is None or self.parts_after is None:
            return False
        if not is_redundant and self.noted is not None:
            parts.run_over(self)
        if not self.is_in_part:
            if self.schedules < self.parts_after or not (self.parts_after == 0 or self.multiply(parts)):
                return False
            together = list(self.choices), dict(self.failures), self.schedules, self.redundant
            if not parts.set_out():
                return False
            self.together = together
            self.start_part()
        elif parts.is_broken or (parts.has_changed and not parts.set_out()):
            self.run_together()
        elif parts.is_new:
            self.start_part()
        else:
            return False
        return True

    def multiply(self, parts: Parts) -> bool:
        """Whether choices of two parts have been tried with each other."""
        tried = (choice.chosen for choice in self.choices if len(choice.done) > 1 and choice.chosen is not None)
        return len({parts.part_of[unit_of(who)] for who in tried if unit_of(who) in parts.part_of}) > 1

    def start_part(self) -> None:
        """Begin from the beginning, with the part that is to come."""
        assert self.parts is not None
        self.schedules, self.redundant = self.parts.counts()
        self.choices.clear()
        self.failures.clear()

    def run_together(self) -> None:
        """The parts will not do: go on without them, where the schedules before them have ended."""
        self.parts = self.parts_after = None
        self.choices[:], self.failures, self.schedules, self.redundant = self.together
        self.is_whole = not self.go_on()

    @property
    def share_of_parts(self) -> tuple[float, float]:
        """How much of the tree comes before the part under way, and how much that part is, about."""
        if self.parts is None or not self.is_in_part:
            return 0.0, 1.0
        number = self.parts.number
        return 1 - (len(self.parts.left) + 1) / number, 1 / number

    def go_on_in_parts(self) -> bool:
        """All runs of a part are over. Whether others are to come: of parts, of joined ones, or of all together."""
        parts = self.parts
        if parts is None or parts.focus is None:
            return False
        number = len(parts.results)
        parts.seen[parts.focus] = number, self.redundant - parts.counts()[1]
        if number > 1:
            parts.several |= parts.focus
        if parts.go_on():
            self.start_part()
        elif not parts.are_unread():
            self.run_together()
        elif not parts.join_several():
            return False
        elif parts.set_out():
            self.start_part()
        else:
            self.run_together()
        return not self.is_whole
