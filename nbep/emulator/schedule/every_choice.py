"""Where a run of `every` chose who goes on, and what is known of those who could; and which runs are to come, once one
is over: for each race one in which the later step comes first.
"""

from __future__ import annotations

from typing import Any

from ..models.knowledge import Message
from .every_order import clock_before, comes_before
from .every_seen import NEVER, Question, agree, answer, shared_reach
from .every_step import Access, Step, Who, Words, join, load_of


class Tried:
    """What is known of an access from the runs in which it was made here.

    commutes: no thread has asked for more of its old value than adds may
    asked: what was asked of what it has read; is_exact: more than questions
    """

    def __init__(self, access: Access):
        self.access = access
        self.commutes = True
        self.asked: set[Question] = set()
        self.is_exact = False
        self.is_mixed = True
        self.message: Message | None = None
        self.reach = 0
        self.who: Who | None = None
        self.is_add = False
        self.number: int | None = None
        self.least = NEVER
        self.arrival = (0, 0)
        self.lacks: tuple[int, int] | None = None

    def learn(self, step: Step) -> None:
        """A run is over."""
        self.commutes &= step.commutes
        reading, cell = step.reading, step.cell
        self.is_mixed = cell is None or cell.is_mixed
        if reading is None:
            self.is_exact = True
        else:
            self.asked.update(reading.asked)
            self.is_exact |= reading.is_exact
            self.reach = reading.reach
        self.who, self.is_add, self.number, self.arrival = step.who, step.is_add, step.number, step.arrival
        if cell is not None and self.access.is_store:
            stored = cell.entries[step.entry]
            self.lacks = stored.lacks
            self.least = stored.least if stored.is_alone else NEVER
            self.message = stored.message

    def commutes_with(self, step: Step) -> bool:
        """Whether it makes no difference that a step comes first, by what that has asked. If in doubt, it does."""
        if not self.access.meets(step.access):
            return True
        cell, reading = step.cell, step.reading
        if cell is None or self.is_mixed or cell.is_mixed or self.access.words != step.access.words:
            return False
        if self.access.is_store and step.access.is_store:
            arrivals = self.arrival, step.arrival
            if self.lacks in arrivals or cell.entries[step.entry].lacks in arrivals:
                return False  # it ends the phase, and the other one is of the next
            return self.commutes and step.commutes and (not (self.asked or step.asks_of_old) or self.may_begin(step))
        if step.access.is_store:
            before, after = cell.entries[step.entry - 1 : step.entry + 1]
            if self.is_exact or (before.is_wall and step.entry > 1) or not after.is_alone or after.least > self.reach:
                return False
            return all(answer(question, before.value) == answer(question, after.value) for question in self.asked)
        if reading is None or reading.is_exact or self.number is None or self.least > reading.reach:
            return False
        here = cell.entries[reading.index]
        if self.is_add and here.is_add and here.who != self.who:
            return False
        return agree(reading.asked, cell.wrap(here.value + self.number) if self.is_add else self.number)

    def may_begin(self, step: Step) -> bool:
        """Of two adds, of which one asks for less than the old value: whether each may as well be the first."""
        cell, reading = step.cell, step.reading
        assert cell is not None
        assert reading is not None
        assert self.number is not None
        before, after = cell.entries[step.entry - 1 : step.entry + 1]
        reach = min([self.reach] * bool(self.asked) + [reading.reach] * bool(reading.asked))
        least = shared_reach([before.message, self.message, after.message])
        if not all(answer(question, before.value) == answer(question, after.value) for question in self.asked):
            return False
        return agree(reading.asked, cell.wrap(before.value + self.number)) and max(least, after.least) <= reach


class Rest:
    """A wait that would fail here, or what is left of its turn: the looks of its thread, which sleeps.

    is_whole: whether that is the turn from its first look on
    begun: that look, if it has been tried by itself: all that can come behind it is known
    """

    def __init__(self, looks: list[Tried], *, is_whole: bool = True, begun: Tried | None = None):
        self.looks = looks
        self.is_whole = is_whole
        self.begun = begun
        self.access = load_of(frozenset().union(*(look.access.words for look in looks)))

    def commutes_with(self, step: Step) -> bool:
        """Whether it still fails behind a step."""
        return all(one.commutes_with(step) for one in self.looks)


def rest_of(looks: list[Step], *, is_whole: bool = True) -> Rest:
    tried = [Tried(look.access) for look in looks]
    for one, look in zip(tried, looks, strict=True):
        one.learn(look)
    return Rest(tried, is_whole=is_whole)


class Choice:
    """Where a run chose; what is known of it from all runs that came here.

    waiting: who stands before an access, and before which
    parked: hosts that would not go on here, and which words they would read
    asleep: whose accesses have been tried before, and nothing since depends on them; or whose waits would fail
    doubtful: of those, who may wake, because the step before this choice may still ask for more
    later: whose waits have failed here and might take an older value, and what is to be decided then
    begun: of those whose waits would fail, who is to make the first look of a turn here in some run
    chosen: who went on; picks: what the step decided besides, each time one of so many
    wanted, done: who is to go on here in some run, and who has
    """

    def __init__(self, waiting: dict[Who, Access], parked: dict[Who, Words], asleep: dict[Who, Any]):
        self.waiting = waiting
        self.parked = parked
        self.asleep = asleep
        self.doubtful: dict[Who, Any] = {}
        self.begun: set[Who] = set()
        self.later: dict[Who, list[list[int]]] = {}
        self.chosen: Who | None = None
        self.picks: list[list[int]] = []
        self.wanted: set[Who] = set()
        self.done: dict[Who, Tried] = {}

    @property
    def left(self) -> set[Who]:
        return self.wanted - self.done.keys() - self.asleep.keys()

    @property
    def awake(self) -> set[Who]:
        return self.waiting.keys() - self.asleep.keys()

    def fails(self, who: Who) -> bool:
        """Whether a thread would wait here."""
        return isinstance(self.asleep.get(who), Rest)

    def choose(self, who: Who | None) -> None:
        self.chosen, self.picks = who, []

    def close(self) -> None:
        """No other run is to go on from here."""
        self.wanted.clear()
        self.begun.clear()
        self.later.clear()
        self.choose(None)

    def undo(self, steps: list[Step]) -> None:
        """These steps, which began here, are none."""
        for step in steps:
            self.done.pop(step.who, None)
            self.wanted.discard(step.who)
        self.choose(None)

    def pick_next(self) -> bool:
        """Go on to what the one who was chosen can decide next; False if that was all."""
        while self.picks and self.picks[-1][0] + 1 == self.picks[-1][1]:
            self.picks.pop()
        if self.picks:
            self.picks[-1][0] += 1
        return bool(self.picks)

    def go_on(self) -> bool:
        """Choose what has not been tried here. False if all has."""
        if self.pick_next():
            return True
        if self.left:
            self.choose(min(self.left))
        elif begun := self.begun - self.done.keys():
            self.choose(min(begun))
        elif self.later:  # a poll that has failed with the latest value
            who, picks = self.later.popitem()
            self.asleep.pop(who, None)
            self.wanted.add(who)
            self.chosen, self.picks = who, picks
        else:
            return False
        return True

    def after(self, step: Step, waiting: dict[Who, Access], parked: dict[Who, Words]) -> Choice:
        """The next choice, behind a step that was made here: who need not go on there, as far as is known."""
        asleep: dict[Who, Any] = {}
        for who in self.asleep.keys() | self.done.keys():
            known: Any = self.asleep.get(who)
            tried = self.done.get(who)
            if who == step.who:
                if step.begins:
                    asleep[who] = Rest(known.looks[1:], is_whole=False)
                continue
            if isinstance(known, Rest):
                tried = tried or known.begun
                if known.commutes_with(step):
                    asleep[who] = Rest(known.looks, is_whole=known.is_whole, begun=tried) if tried else known
                    continue
            else:
                tried = tried or known
            if tried is not None and tried.commutes_with(step):
                asleep[who] = tried
        choice = Choice(waiting, parked, asleep)
        if step.may_ask:
            choice.doubtful = {who: one for who, one in asleep.items() if one.access.meets(step.access)}
        return choice


class Doubt:
    """Somebody who sleeps while a step may still ask for more. choice: the one behind that step"""

    def __init__(self, who: Who, tried: Tried, step: Step, choice: int):
        self.who = who
        self.tried = tried
        self.step = step
        self.choice = choice
        self.asked = -1

    def has_changed(self) -> bool:
        """Whether something has been asked since this was asked."""
        reading = self.step.reading
        assert reading is not None
        before, self.asked = self.asked, len(reading.asked) + reading.is_exact
        return before != self.asked


# Runs that are to come

Tree = Any  # that of `every`


def reverse_races(tree: Tree) -> None:
    """Have other runs in which the later one of two steps that depend on each other comes first."""
    tree.races.go_to(len(tree.steps))
    # With weak memory nothing is learned later of a step, unless its cell turns out to be mixed.
    is_final = tree.is_weak and not any(step.cell is not None and step.cell.is_mixed for step in tree.steps)
    first = tree.planned - 1 if is_final else 0  # the steps before were the same in an earlier run
    for earlier, later in tree.races.found:
        if later >= first and not tree.steps[later].is_wait:
            reverse(tree, earlier, tree.steps[later], later)
    for number, step in enumerate(tree.steps):
        if step.is_wait:
            let_go_on(tree, step, number)
    for at, looks in tree.failed:
        for store, look, number in tree.races.of_failed(at, looks):
            reverse(tree, store, look, at, number)
    for who, host in tree.hosts.items():
        wait = Step(who, load_of(host.words), host.clock, None)
        wait.clock = clock_before(tree.steps, wait)
        for step in tree.steps:
            if step.access.meets(wait.access):
                join(wait.clock, step.clock)
        let_go_on(tree, wait, len(tree.steps))


def let_go_on(tree: Tree, wait: Step, number: int) -> None:
    """A host has gone on at a step, or not up to the end: have it go on before stores that come first, in some run.

    Where it would not go on, the stores matter that it would have read there.
    """
    known = clock_before(tree.steps, wait)
    words = set(wait.access.words)
    found: list[int] = []
    for at in reversed(range(number)):
        step = tree.steps[at]
        if not step.access.is_store or words.isdisjoint(step.access.words) or known.get(step.who, -1) >= at:
            continue
        parked = tree.choices[at].parked.get(wait.who)
        if parked is not None:
            words |= parked
            if may_be_without(tree, at, number, words):
                reverse(tree, at, wait, number)
        elif not any(comes_before(tree.steps, at, later) for later in found):
            found.append(at)
            reverse(tree, at, wait, number)


def may_be_without(tree: Tree, at: int, number: int, words: set[tuple[Any, int]]) -> bool:
    """Whether some of these words may be stored to between two steps also if the first one is not made."""
    later = (step for step in tree.steps[at + 1 : number] if step.access.is_store)
    who = tree.steps[at].who
    return any(step.clock.get(who, -1) < at and not words.isdisjoint(step.access.words) for step in later)


def reverse(tree: Tree, at: int, last: Step, number: int, looks: int = 1) -> None:
    """Have a step come before an earlier one, in some run: one of those who can begin what leads there.

    looks: how many of its turn come up to it, if it is known
    """
    first: dict[Who, int] = {}
    for later in range(at + 1, number + 1):
        step = last if later == number else tree.steps[later]
        if later != number and comes_before(tree.steps, at, later):
            continue
        if step.who not in first and all(step.clock.get(who, -1) < begin for who, begin in first.items()):
            first[step.who] = later
    choice = tree.choices[at]
    begun = {who for who in first if may_begin(choice, who, looks if who == last.who else 1)}
    for who in [who for who in first if who in choice.parked or choice.fails(who)]:
        del first[who]
    if not (first or begun) or (tree.parts is not None and not tree.parts.reverses(tree.steps[at].who, last.who)):
        return
    if not first.keys() - begun and begun:
        if not begun & choice.begun:
            choice.begun.add(min(begun))
        return
    if not first.keys() <= choice.waiting.keys():  # something else than an access has let one of them come there
        choice.wanted |= {who for who in choice.waiting if not choice.fails(who)}
    elif not first.keys() & choice.wanted and (awake := first.keys() - choice.asleep.keys()):
        choice.wanted.add(min(awake))  # who is asleep may have come into this run without a need: see `Tried`


def may_begin(choice: Choice, who: Who, looks: int) -> bool:
    """Whether a thread whose wait would fail at a choice may make its first looks there, and more of them later."""
    asleep = choice.asleep.get(who)
    return isinstance(asleep, Rest) and asleep.begun is None and len(asleep.looks) > (looks if asleep.is_whole else 1)
