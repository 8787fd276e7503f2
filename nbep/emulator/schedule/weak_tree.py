"""Every run of a small program under `delayed`, late stores and early loads included: each once, as far as can be.

Who acts is a thread, or a store on its way. A thread stands before each access to memory that others see, and before
what publishes its stores. A store arrives when it is chosen; a thread that is to publish waits for that. What a step
decides besides are its *picks*: how old a version a load takes, and before which others a store comes.

A step *touches* things, from the left or from the right. Two steps depend on each other if one touches from the left
what the other one touches from the right:

    a load           its 16 bytes: left
    an arrival       its 16 bytes, and the order of what is on its way to them: left and right
    a late store     that order: left. Two of them commute, as each picks its place among those that are there
    a release        less than sys: the bytes of what it shows to its block or its GPU: left and right

Two steps of two threads that depend on each other, and that nothing else orders, are a race: in another run the later
one comes first. *Source sets* say whom to choose for that, and *sleep sets* who has been tried already.

A poll that fails is no step: its thread waits until what it sees changes. A load takes an older version only if what it
misses comes before it for another reason. Else the same load, put before the arrival, is another run.

    tree = WeakTree()
    while tree.begin():
        ... one run, with `weak.Weak(tree)` as its strategy and the memory model "delayed"
        tree.end()

Source: Abdulla, Aronis, Jonsson, Sagonas, "Optimal Dynamic Partial Order Reduction", POPL 2014 (source sets)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .every import Changed, Limited, Redundant
from .every_step import Replay

Who = tuple[int, str, int, int, int, int]  # rank, kernel, number of the launch, block, thread; of its stores, from 1
Clock = dict[Who, int]  # the last step of each actor that comes before
Pick = tuple[Who, list[int]]  # who goes on, and what its step decides


class Touch(NamedTuple):
    """What a step touches."""

    left: frozenset[Any]
    right: frozenset[Any]

    def meets(self, other: Touch) -> bool:
        return not (self.left.isdisjoint(other.right) and self.right.isdisjoint(other.left))


def touch(left: Iterable[Any] = (), right: Iterable[Any] = (), both: Iterable[Any] = ()) -> Touch:
    both = frozenset(both)
    return Touch(both.union(left), both.union(right))


class Step:
    """A step that has been made.

    after: what comes before it in its thread, in those that it has met, and of what it had to wait for
    clock: what comes before it, and itself
    races: those before it that it depends on, and that nothing else orders
    has_failed: whether its thread has polled before, since its last step
    """

    __slots__ = ("after", "clock", "has_failed", "is_settled", "races", "touch", "who")

    def __init__(self, who: Who, touch: Touch, after: Clock, has_failed: bool):
        self.who = who
        self.touch = touch
        self.after = after
        self.has_failed = has_failed
        self.clock: Clock = {}
        self.races: list[int] = []
        self.is_settled = False


class Choice:
    """Where a run chose; what is known of it from all runs that came here.

    waiting: who could go on, and what its step touches
    asleep: whose steps have been tried before, and nothing since depends on them
    refused: whose polls have failed here; later: of those, who might take an older value, and which is the next;
        older: who has
    wanted, done: who is to go on here in some run, and who has, with all that it can pick
    who, picks: who goes on, what its step picks, and of how many; has_run: whether it has in a run before
    """

    def __init__(self, waiting: dict[Who, Touch], asleep: dict[Who, Touch]):
        self.waiting = waiting
        self.asleep = asleep
        self.refused: set[Who] = set()
        self.later: dict[Who, list[list[int]]] = {}
        self.older: set[Who] = set()
        self.wanted: set[Who] = set()
        self.done: dict[Who, Touch] = {}
        self.who: Who | None = None
        self.picks: list[list[int]] = []
        self.has_run = False

    @property
    def left(self) -> set[Who]:
        return self.wanted - self.done.keys() - self.asleep.keys() - self.refused

    def choose(self, who: Who) -> None:
        self.who, self.picks, self.has_run = who, [], False

    def pick_next(self) -> bool:
        """Go on to the next picks of the one who was chosen; False if it has had all."""
        while self.picks and self.picks[-1][0] + 1 == self.picks[-1][1]:
            self.picks.pop()
        if self.picks:
            self.picks[-1][0] += 1
        return bool(self.picks)

    def refuse(self, who: Who) -> None:
        self.refused.add(who)
        self.wanted.discard(who)
        self.who = None

    def choose_older(self) -> None:
        """Choose one whose poll failed with the latest value."""
        who, picks = self.later.popitem()
        self.older.add(who)
        self.choose(who)
        self.picks = picks
        self.refused.discard(who)
        self.wanted.add(who)

    def finish(self, who: Who) -> None:
        self.done[who] = self.waiting[who]
        self.who = None


class WeakTree(Limited):
    """All runs of a program so far, and the one under way.

    Attributes:
        schedules: runs that came to their end
        redundant: runs that were given up, because another one had been the same
        is_plain: whether to go through all orders of all steps, to compare with: no race, and nobody asleep
    """

    def __init__(self, picks: Iterable[Pick] = (), is_plain: bool = False):
        self.choices: list[Choice] = []
        self.steps: list[Step] = []
        self.schedules = self.redundant = 0
        self.is_whole = False
        self.is_plain = is_plain
        self.depth = 0  # steps of the run under way
        self._replayed = list(picks)
        self._planned = 0
        self._picked = 0
        self._refused: dict[Who, Step] = {}  # polls that have failed, and not come to their end since

    @property
    def replay(self) -> Replay:
        """What makes the run under way again."""
        made = self.choices[: self.depth]
        picks = ((choice.who, [pick for pick, _ in choice.picks]) for choice in made if choice.who is not None)
        return Replay(tuple(picks))

    # --- runs -----------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin the next run; False if there is none, or no time."""
        if self.is_whole or self.is_late:
            return False
        self._planned = len(self.choices)
        del self.steps[max(self._planned - 1, 0) :]
        self.depth = 0
        self.stores = 0  # steps that others may see
        self._refused = {}
        return True

    def end(self, is_redundant: bool = False) -> None:
        """The run is over: choose where the next one leaves it."""
        self.redundant += is_redundant
        self.schedules += not is_redundant
        self._settle()
        for (
            poll
        ) in self._refused.values():  # one that came earlier, to be given up here, may have to come earlier still
            self._reverse_all(poll, self.depth)
        while self.choices:
            last = self.choices[-1]
            if last.who is not None:
                last.has_run = True
                if last.pick_next():
                    return
                last.finish(last.who)
            if last.left:
                last.choose(min(last.left))
                return
            if last.later:
                last.choose_older()
                return
            self.choices.pop()
        self.is_whole = True

    @property
    def share(self) -> float:
        """How much of the tree has been seen, about: each branch of a choice counts alike."""
        seen, part = 0.0, 1.0
        for choice in self.choices:
            part /= max(len(choice.wanted), 1)
            inner = part
            seen += part * len(choice.done.keys() & choice.wanted)
            for pick, count in choice.picks:
                inner /= max(count, 1)
                seen += inner * pick
            part = inner
        return 1.0 if self.is_whole else min(seen, 1.0)

    # --- choices --------------------------------------------------------------------------------------------------

    def choose(self, waiting: dict[Who, Touch]) -> Who:
        """Who of those that can go on does."""
        self.look_at_time()
        depth = self.depth
        if depth == len(self.choices):
            if depth < len(self._replayed):
                return self._replay(depth, waiting)
            asleep = {} if self.is_plain else self._asleep_at(depth)
            self.choices.append(Choice(waiting, asleep))
        choice = self.choices[depth]
        if choice.who is not None:
            if choice.waiting[choice.who] != waiting.get(choice.who):
                raise Changed("two runs with the same choices differ: the program depends on more than its schedule")
            return choice.who
        choice.waiting |= waiting  # before a deadlock is reported, those that are parked look once more
        if self.is_plain and not choice.wanted:
            choice.wanted = set(waiting)
        left = choice.left
        if not left and depth >= self._planned:
            left = waiting.keys() - choice.asleep.keys() - choice.refused
            left = {min(left, key=lambda who: (who[-1] > 0, who))} if left else left  # threads first: stores are late
            choice.wanted |= left
        if not left:
            if not waiting.keys() <= choice.refused:
                raise Redundant
            left = set(waiting)  # they look once more before a deadlock is reported
        who = min(left)
        choice.choose(who)
        return who

    def _replay(self, depth: int, waiting: dict[Who, Touch]) -> Who:
        who, picks = self._replayed[depth]
        if who not in waiting:
            raise Changed(f"the schedule is that of another program: {who} does not wait for its turn")
        choice = Choice(waiting, {})
        choice.choose(who)
        choice.picks = [[pick, 0] for pick in picks]
        self.choices.append(choice)
        return who

    def _asleep_at(self, depth: int) -> dict[Who, Touch]:
        if depth == 0:
            return {}
        before, step = self.choices[depth - 1], self.steps[depth - 1]
        tried = {**before.asleep, **before.done}
        return {who: one for who, one in tried.items() if who != step.who and not one.meets(step.touch)}

    def pick(self, count: int) -> int:
        """What the step under way decides: one of so many."""
        if count == 1 or self.depth == 0:
            return 0
        picks = self.choices[self.depth - 1].picks
        at = self._picked
        self._picked += 1
        if at == len(picks):
            picks.append([0, count])
        picks[at][1] = count
        if picks[at][0] >= count:
            raise Changed("two runs with the same choices differ: a step has fewer ways to go on")
        return picks[at][0]

    def step(
        self, who: Who, touch: Touch, after: Iterable[int], behind: Iterable[int] = (), has_failed: bool = False
    ) -> int:
        """The one who was chosen goes on. Returns the number of its step.

        Args: after: the steps that come before it in its thread, and so on
              behind: arrivals that it had to wait for, unless it had come before their stores were shown to it
        """
        self._settle()
        at, steps = self.depth, self.steps
        self.depth += 1
        self.stores += bool(touch.right)
        self._picked = 0
        self._refused.pop(who, None)
        if at < len(steps):
            return at
        step = Step(who, touch, {}, has_failed)
        for before in after:
            join(step.after, steps[before].clock)
        step.clock = dict(step.after)
        behind = set(behind)
        for before in range(at - 1, -1, -1):
            other = steps[before]
            if before not in behind and step.clock.get(other.who, -1) < before and touch.meets(other.touch):
                step.races.append(before)
                join(step.clock, other.clock)
        for before in behind:
            join(step.clock, steps[before].clock)
        step.clock[who] = at
        steps.append(step)
        return at

    def comes_before(self, at: int, step: int) -> bool:
        """Whether a step comes before another one that is not about what both touch."""
        return self.steps[step].after.get(self.steps[at].who, -1) >= at

    # --- polls ----------------------------------------------------------------------------------------------------

    def fail(self, who: Who, at: int) -> bool | None:
        """A step was a poll that failed: it is none. Returns whether it can pick again at once.

        None if others have gone on since, in this run or an earlier one: then it stays a step
        """
        if at != self.depth - 1 or at < self._planned - 1:
            return None
        self.depth = at
        poll = self.steps.pop()
        del self.choices[at + 1 :]
        choice = self.choices[at]
        assert choice.who == who
        is_latest = not any(pick for pick, _ in choice.picks)
        can_pick = not self._replayed and choice.pick_next()
        if can_pick and not is_latest:
            return True
        if choice.has_run:
            choice.finish(who)
        else:
            choice.refuse(who)
            # An older value may do. But the thread may as well wait for a newer one, maybe in vain.
            if can_pick and who not in choice.older:
                choice.later[who] = choice.picks
        self._refused[who] = poll
        return False

    # --- the other runs that there are to be ----------------------------------------------------------------------

    def _settle(self) -> None:
        """The last step was one: see which races it ends."""
        at = self.depth - 1
        if at < 0 or self.is_plain or self._replayed or self.steps[at].is_settled:
            return
        step = self.steps[at]
        step.is_settled = True
        if step.has_failed:
            self._reverse_all(step, at)
        for before in step.races:
            self._reverse(before, step, at)

    def _reverse_all(self, poll: Step, number: int) -> None:
        """A poll that has failed before: it might have succeeded before any of the steps that it depends on."""
        for at in range(number):
            other = self.steps[at]
            if poll.after.get(other.who, -1) < at and poll.touch.meets(other.touch):
                self._reverse(at, poll, number)

    def _reverse(self, at: int, last: Step, number: int) -> None:
        """Have a step come before an earlier one, in some run: one of those who can begin what leads there."""
        first: dict[Who, int] = {}
        who = self.steps[at].who
        for later in range(at + 1, number + 1):
            step = last if later == number else self.steps[later]
            if later != number and step.clock.get(who, -1) >= at:
                continue
            if step.who not in first and all(step.clock.get(one, -1) < begin for one, begin in first.items()):
                first[step.who] = later
        choice = self.choices[at]
        if first.keys() & (choice.wanted | choice.done.keys() | choice.asleep.keys()):
            return
        can = first.keys() & choice.waiting.keys()
        if can - choice.refused:
            choice.wanted.add(min(can - choice.refused))
        elif not can and not all((last if one == number else self.steps[one]).has_failed for one in first.values()):
            # Something else than a step has let them come there. A thread whose poll had failed is parked there.
            choice.wanted |= choice.waiting.keys() - choice.refused


def join(clock: Clock, other: Clock) -> None:
    for who, at in other.items():
        if clock.get(who, -1) < at:
            clock[who] = at
