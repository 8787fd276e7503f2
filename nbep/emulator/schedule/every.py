"""Every schedule of a small program, each order of dependent accesses once: dynamic partial-order reduction.

A thread runs alone up to its next access that is not weak; who of those that stand before one goes first is a choice.
Two accesses are dependent if they meet in a byte, one of them is a store, and they do not commute: see `every_order`,
and `every_seen` for what a thread knows of a value. When a run is over, each pair of dependent accesses that nothing
orders is a race: in another run the later one comes first. *Source sets* say whom to choose for that, and *sleep sets*
who has been tried already, so that two runs never differ only by independent accesses.

A poll that fails is no step: its thread cannot go on, and the choice is made again among the others. It stays parked
until the cell changes. Where it would have succeeded before a store that came first, another run has it come there.

    tree = Tree()
    while tree.begin():
        ... one run, with Every(tree) as its strategy
        tree.end()

Source: Abdulla, Aronis, Jonsson, Sagonas, "Optimal Dynamic Partial Order Reduction", POPL 2014 (source sets);
Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems", 1996 (sleep sets)
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from .every_choice import Choice, Doubt, Rest, Tried, reverse_races
from .every_copies import Barriers
from .every_order import Races, clock_before, settle_unsure
from .every_parts import Parts
from .every_seen import Cells, Question
from .every_step import Access, Late, Replay, Step, Waiting, Who, Words, load_of
from .every_turns import Failed, Redundant, Turns
from .strategies import Alone, Ready


class OutOfTime(BaseException):
    """The time for all runs is over, and one is under way."""


class Changed(RuntimeError):
    """The same choices have led to another state."""


class Tree(Turns):
    """All runs of a program so far, and the one under way.

    Attributes:
        schedules: runs that came to their end
        redundant: runs that were given up, because another one had been the same
        picks: who went on, in the order of the run under way, polls that failed included
        decided: what the step of each pick has decided besides: how old a version a load takes, and the like
        looked_at: events of which a host has asked whether they are done, and barriers at which the order may matter
        is_weak: whether stores may be late and loads early, see `weak_thread`
        finds_races: whether a run then stops at a data race; without weak memory it always does
        is_plain: whether to go through all orders of all steps, to compare with: no race, and nobody asleep
        parts: of the program that are explored apart, if that is asked for; None if they are not, or cannot be
        end_time: by `time.monotonic`; from then on there is no other run, and the one under way stops
    """

    is_search = True  # whether other runs come after one
    end_time = math.inf

    def __init__(
        self,
        picks: Iterable[Who] = (),
        looked_at: Iterable[tuple] = (),
        decided: Iterable[Sequence[int]] = (),
        *,
        is_weak: bool = False,
        finds_races: bool = False,
        is_plain: bool = False,
        has_parts: bool = False,
    ):
        self.is_weak = is_weak
        self.finds_races = finds_races
        self.is_plain = is_plain
        self.parts = Parts() if has_parts and not is_weak else None
        self.choices: list[Choice] = []
        self.schedules = self.redundant = 0
        self.picks: list[Who] = []
        self.decided: list[list[int]] = []
        self.is_whole = False
        self._replayed = list(picks)
        self._decided = list(decided)
        self.planned = 0
        # Words of which loads are no steps, since nobody has stored there so far; and those that change.
        self._untouched: set[tuple[Any, int]] = set()
        self._changing: set[tuple[Any, int]] = set()
        self.looked_at = set(looked_at)
        self.failures: dict[Hashable, list[dict[Question, bool]]] = {}  # what waits for one cell were told, by state

    # --- runs -----------------------------------------------------------------------------------------------------

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.end_time

    def look_at_time(self) -> None:
        """Raises: OutOfTime"""
        if self.is_late:
            raise OutOfTime

    def begin(self) -> bool:
        """Begin the next run; False if there is none, or no time."""
        if self.is_whole or self.is_late:
            return False
        self.planned = len(self.choices)
        self._looked_at = tuple(sorted(self.looked_at))  # the same run adds the rest again
        self.steps: list[Step] = []
        self.races = Races(self.steps)
        self.failed: list[Failed] = []
        self.idle: set[Who] = set()
        self.hosts: dict[Who, Waiting] = {}  # that wait, and would go on waiting
        self.is_stale = False
        self.picks = []
        self.decided = []
        self.stores = 0  # steps that store
        self.at_rest: int | None = None
        self.is_stuck = False
        self.doubts: list[Doubt] = []
        if self.parts is not None:
            self.parts.begin()
        return True

    def end(self, is_redundant: bool = False) -> None:
        """The run is over: choose where the next one leaves it."""
        if self.is_outdated:
            self._untouched -= self._changing
            self.failures.clear()
            self.parts = self.parts and Parts()
            self.start_over()
            return
        at = self.at_rest
        if at is not None and (
            self.is_stuck or (self.is_weak and not any(one.access.is_store for one in self.steps[at:]))
        ):
            self.failed = [failed for failed in self.failed if failed.at <= at]
            self.choices[at].undo(self.forget(at))  # looks in vain; with weak memory some waits do not sleep
            if self.is_stuck:
                is_redundant = True
                self.choices[at].close()
        self.redundant += is_redundant
        self.schedules += not is_redundant
        settle_unsure(self.steps)
        self.wake()
        for choice, step in zip(self.choices, self.steps, strict=False):
            if step.who in choice.done:
                choice.done[step.who].learn(step)
            step.refused = step.refused or self.failures.get(step.state, [])
        if not self.is_plain:
            reverse_races(self)
        if self.parts is not None and not self.look_at_parts(self.parts, is_redundant):
            return
        while self.choices:
            if self.choices[-1].go_on():
                return
            self.choices.pop()
        if self.parts is not None and self.parts.next():
            self.schedules -= self.parts.first  # that run is made again
        else:
            self.is_whole = True

    def start_over(self) -> None:
        self.choices.clear()
        self.schedules = self.redundant = 0

    def look_at_parts(self, parts: Parts, is_redundant: bool) -> bool:
        """What the run tells of the program's parts. False if all begins again."""
        parts.end(self.steps, self.races.linked, is_redundant)
        is_first = parts.under_way is None
        if parts.is_one or (parts.has_joined and not is_first):
            self.parts = None if parts.is_one else parts
            parts.under_way = None
            parts.done.clear()
            parts.several.clear()
            parts.found = 0
            self.start_over()
            return False
        if is_first and parts.next():
            reverse_races(self)
        return True

    @property
    def replay(self) -> Replay:
        """What makes the run under way again."""
        return Replay(tuple(self.picks), self._looked_at, tuple(map(tuple, self.decided)))

    @property
    def num_left(self) -> int:
        """How many runs are to come, at least, besides the one under way."""
        return sum(len(choice.left - {choice.chosen}) for choice in self.choices)

    @property
    def share(self) -> float:
        """How much of the tree has been seen, about: each branch of a choice counts alike."""
        seen, part = 0.0, 1.0
        for choice in self.choices:
            part /= max(len(choice.wanted), 1)
            inner = part
            seen += part * max(len(choice.done) - (choice.chosen in choice.done), 0)
            for pick, count in choice.picks:
                inner /= max(count, 1)
                seen += inner * pick
            part = inner
        if self.parts is not None and (number := len(self.parts.parts(self.parts.racing))) > 1:
            seen = (seen + len(self.parts.parts(self.parts.done))) / number
        return 1.0 if self.is_whole else min(seen, 1.0)

    @property
    def is_outdated(self) -> bool:
        """Whether what was left out has turned out to be needed: all begins again when the run is over."""
        return self.is_stale or not self._untouched.isdisjoint(self._changing)

    # --- choices --------------------------------------------------------------------------------------------------

    def begin_again(self, name: tuple) -> None:
        """Something has turned out to be a choice. The runs so far are of no use.

        Raises: Redundant, in a search
        """
        self.looked_at.add(name)
        self.is_stale = True
        if self.is_search and not self._replayed:
            raise Redundant

    def choose(self, waiting: dict[Who, Access]) -> Who:
        """Who of those that wait goes on."""
        self.look_at_time()
        depth = len(self.steps)
        if self._replayed:
            if self.is_led:
                who = self._replayed[len(self.picks)]
                if who not in waiting:
                    raise Changed(f"the schedule is that of another program: {who} does not wait for its turn")
            else:
                who = min(waiting)
            if depth == len(self.choices):
                self.choices.append(Choice(waiting, {}, {}))
        else:
            who = self._choose(depth, waiting)
        if self.choices[depth].chosen != who:
            self.choices[depth].choose(who)
        self.note_pick(who)
        return who

    def note_pick(self, who: Who) -> None:
        self.picks.append(who)
        self.decided.append([])

    def decide(self, count: int) -> int:
        """What the step under way decides, besides who makes it: one of so many."""
        if count == 1 or not self.steps:
            return 0
        made = self.decided[self._pick]
        if self.is_replay:
            told = self._decided[self._pick] if self._pick < len(self._decided) else ()
            made.append(told[len(made)] if len(made) < len(told) else 0)
        else:
            picks = self.choices[len(self.steps) - 1].picks
            if len(made) == len(picks):
                picks.append([0, count])
            picks[len(made)][1] = count
            made.append(picks[len(made)][0])
        if made[-1] >= count:
            raise Changed("two runs with the same choices differ: a step has fewer ways to go on")
        return made[-1]

    def _choose(self, depth: int, waiting: dict[Who, Access]) -> Who:
        if depth == len(self.choices):
            parked = {who: host.words for who, host in self.hosts.items() if who not in waiting}
            if not depth or self.is_plain:
                self.choices.append(Choice(waiting, parked, {}))
            else:
                self.choices.append(self.choices[-1].after(self.steps[-1], waiting, parked))
                self.doubt(depth)
                self.wake()
        choice = self.choices[depth]
        if self.is_plain and depth >= self.planned:
            choice.wanted |= waiting.keys()
        if depth < self.planned:
            if self.at_rest is None and choice.waiting != waiting:
                raise Changed("two runs with the same choices differ: the program depends on more than its schedule")
            if choice.chosen is not None:
                return choice.chosen
            left = choice.left
        else:
            # Loads first: most waits fail then, and sleep. Who has looked last looks again before others do: the looks
            # of a turn are no choices only if nobody comes between them.
            latest = self.steps[-1].who if self.steps else None
            left = waiting.keys() - choice.asleep.keys()
            if not left:
                self.wake(waiting)
                left = waiting.keys() - choice.asleep.keys()

            def turn(who: Who) -> tuple:
                return who[4] < 0, waiting[who].is_store, who != latest, who  # what is late comes last

            left = {min(left, key=turn)} if left else left
            choice.wanted |= left
        if left:
            return min(left)
        return self.rest(choice, waiting)

    def skips(self, who: Who, words: Words) -> bool:
        """Whether a load is no step, because nobody stores there. A run of these picks, which knows nothing of that,
        chooses here.
        """
        if self.is_plain or self.is_replay or not words.isdisjoint(self._changing):
            return False
        self._untouched |= words
        self.note_pick(who)
        return True

    def step(self, step: Step) -> int:
        """The one who was chosen makes its access. Returns the number of the step."""
        depth = len(self.steps)
        choice = self.choices[depth]
        self._pick = len(self.picks) - 1
        choice.done.setdefault(step.who, Tried(step.access))
        if step.who in choice.begun and isinstance(choice.asleep.get(step.who), Rest):
            step.begins = True
        else:
            choice.wanted.add(step.who)
        self.steps.append(step)
        if step.access.is_store:
            self.stores += 1
            self.idle.clear()
            self._changing |= step.access.words
        if depth + 1 < len(self.choices):
            self.doubt(depth + 1)
        return depth

    def has_only_read(self, at: int) -> None:
        """A step is a compare-and-swap that has failed: a load."""
        step = self.steps[at]
        step.access = load_of(step.access.left)
        self.choices[at].done[step.who] = Tried(step.access)

    def comes_before(self, at: int) -> bool:
        """Whether a step comes before the one under way, also without what both touch."""
        self.races.go_to(len(self.steps) - 1)
        return clock_before(self.steps, self.steps[-1]).get(self.steps[at].who, -1) >= at


class Standing(Ready):
    """Threads, hosts and what is under way: those before an access wait until no other can go on."""

    def __init__(self, strategy: Every, turn: Callable[[], bool]):
        self.strategy: Any = strategy
        self.free: list[Any] = []
        self.before_access: dict[Who, Any] = {}
        self.in_order: list[Who] = []  # those
        self.turn = turn

    def append(self, thread: Any) -> None:
        if getattr(thread, "is_standing", False):
            if thread.who not in self.before_access:
                insort(self.in_order, thread.who)
            self.before_access[thread.who] = thread
        else:
            self.free.append(thread)

    def __len__(self) -> int:
        if not self.free:
            self.free_some()
        if not self.free and not self.before_access and not self.leaving:
            self.strategy.barriers.let_one_go()
        return len(self.free) + len(self.before_access) + len(self.leaving)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.free, *self.before_access.values()])

    def clear(self) -> None:
        self.free.clear()
        self.before_access.clear()
        self.in_order.clear()

    def free_some(self) -> None:
        """Let happen what nobody chooses, until somebody can go on."""
        while not self.free and self.turn():
            pass

    @property
    def leaving(self) -> dict[Who, Any]:
        """The hosts that may go on."""
        return self.strategy.world.cpu.leaving

    def take(self) -> Any:
        self.free_some()
        if self.free:
            return self.free.pop()
        standing, in_order = self.before_access, self.in_order
        if self.leaving:
            standing = {**standing, **self.leaving}
            in_order = sorted(standing)
        before = {who: access for who in in_order if (access := standing[who].pending) is not None}
        who = self.strategy.tree.choose(before)
        chosen = standing[who]
        if self.before_access.pop(who, None) is not None:
            self.in_order.remove(who)
        return chosen


class Every(Alone):
    """The strategy of a run of a tree: a thread runs alone up to its next choice.

    What is under way and nobody can see happens at once: kernels that start, stores of bulk copies.
    """

    name = "every"
    chooses_hosts = True

    def __init__(self, tree: Tree):
        super().__init__()
        self.tree = tree
        self.cells = Cells()
        self.barriers = Barriers()
        self.late = Late()

    @property
    def memory_model(self) -> str:
        """What its runs must have."""
        return "delayed" if self.tree.is_weak else "checked"

    def ready_list(self) -> Standing:
        return Standing(self, self.turn)

    def wait_of(self, predicate: Callable[[], bool]) -> Callable[[], bool]:
        return self.world.cpu.wait_of(predicate)

    def turn(self) -> bool:
        """Let something happen that nobody chooses."""
        world = self.world
        if world.operations:
            world._operate()
            return True
        return world.cpu.let_go()
