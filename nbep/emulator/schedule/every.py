"""Every schedule of a small program, each order of dependent accesses once: dynamic partial-order reduction.

A thread runs alone up to its next access that is not weak; who of those that stand before one goes first is a choice.
Two accesses are dependent if they meet in a byte and one of them is a store. When a run is over, each pair of dependent
accesses that nothing orders is a race: in another run the later one comes first. *Source sets* say whom to choose for
that, and *sleep sets* who has been tried already, so that two runs never differ only by independent accesses.

A poll that fails is no step: its thread cannot go on, and the choice is made again among the others. It stays parked
until the cell changes, and the store that wakes it comes before it.

    tree = Tree()
    while tree.begin():
        ... one run, with Every(tree) as its strategy
        tree.end()

Source: Abdulla, Aronis, Jonsson, Sagonas, "Optimal Dynamic Partial Order Reduction", POPL 2014 (source sets);
Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems", 1996 (sleep sets)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .strategies import Ready, Strategy

Who = tuple[int, str, int, int, int]  # rank, kernel, number of the launch, block, thread
Clock = dict[Who, int]  # the last step of each thread that comes before

ALONE = 1 << 40  # primitive calls: more than any run has


class Redundant(BaseException):
    """All that could go on here has been tried: the run would repeat another one."""


class Changed(RuntimeError):
    """The same choices have led to another state."""


class Access(NamedTuple):
    """What a thread is about to do. words: the 4-byte words of an allocation"""

    words: frozenset[tuple[Any, int]]
    is_store: bool

    def meets(self, other: Access) -> bool:
        return (self.is_store or other.is_store) and not self.words.isdisjoint(other.words)


class Step(NamedTuple):
    """An access that has been made. clock: the steps that come before it, and itself"""

    who: Who
    clock: Clock


class Choice:
    """Where a run chose; what is known of it from all runs that came here.

    waiting: who stands before an access, and before which
    asleep: whose accesses have been tried before, and nothing since depends on them
    failed: whose polls have failed here, in this order: they could not go on
    chosen: who went on
    wanted, done: who is to go on here in some run, and who has
    """

    def __init__(self, waiting: dict[Who, Access], asleep: dict[Who, Access]):
        self.waiting = waiting
        self.asleep = asleep
        self.failed: list[Who] = []
        self.chosen: Who | None = None
        self.wanted: set[Who] = set()
        self.done: set[Who] = set()

    @property
    def left(self) -> set[Who]:
        return self.wanted - self.done - self.asleep.keys() - set(self.failed)


class Tree:
    """All runs of a program so far, and the one under way.

    Attributes:
        schedules: runs that came to their end
        redundant: runs that were given up, because another one had been the same
        picks: who went on, in the order of the run under way, polls that failed included
    """

    def __init__(self, picks: Iterable[Who] = ()):
        self.choices: list[Choice] = []
        self.schedules = self.redundant = 0
        self.picks: list[Who] = []
        self.is_whole = False
        self._replayed = list(picks)
        self._planned = 0
        # Words that nobody has stored to, and that polls look at besides; and those that turned out to change.
        self._constant: set[tuple[Any, int]] = set()
        self._changing: set[tuple[Any, int]] = set()

    # --- runs -----------------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Begin the next run; False if there is none."""
        if self.is_whole:
            return False
        self._planned = len(self.choices)
        self._tries = 0  # polls that have failed since the last step
        self._depth = 0
        self.probing: Who | None = None  # whose polls are known to fail: up to its next turn nothing is a step
        self.steps: list[Step] = []
        self.stores: dict[Any, int] = {}  # word -> the last step that stored to it
        self.loads: dict[Any, list[int]] = {}  # word -> the steps that have loaded it since
        self.asleep: dict[Who, Access] = {}
        self.picks = []
        return True

    def end(self, is_redundant: bool = False) -> None:
        """The run is over: choose where the next one leaves it."""
        if self._constant & self._changing:  # what was left out for that is needed: from the beginning
            self._constant.clear()
            self.choices.clear()
            self.schedules = self.redundant = 0
            return
        self.redundant += is_redundant
        self.schedules += not is_redundant
        while self.choices:
            last = self.choices[-1]
            if last.left:
                last.chosen = min(last.left)
                return
            self.choices.pop()
        self.is_whole = True

    @property
    def share(self) -> float:
        """How much of the tree has been seen, about: each branch of a choice counts alike."""
        seen, part = 0.0, 1.0
        for choice in self.choices:
            part /= max(len(choice.wanted), 1)
            seen += part * max(len(choice.done) - (choice.chosen in choice.done), 0)
        return 1.0 if self.is_whole else min(seen, 1.0)

    # --- choices --------------------------------------------------------------------------------------------------

    def choose(self, waiting: dict[Who, Access]) -> Who:
        """Who of those that wait goes on."""
        depth = len(self.steps)
        if depth != self._depth:
            self._depth, self._tries = depth, 0
        if self._replayed:
            if len(self.picks) < len(self._replayed):
                who = self._replayed[len(self.picks)]
                if who not in waiting:
                    raise Changed(f"the schedule is that of another program: {who} does not wait for its turn")
            else:
                who = min(waiting)
            if depth == len(self.choices):
                self.choices.append(Choice(waiting, {}))
        else:
            who = self._choose(depth, waiting)
        if self.probing is None:
            self.choices[depth].chosen = who
        self.picks.append(who)
        return who

    def _choose(self, depth: int, waiting: dict[Who, Access]) -> Who:
        if depth == len(self.choices):
            self.choices.append(Choice(waiting, self.asleep))
        choice = self.choices[depth]
        if depth < self._planned:
            if self._tries == 0 and choice.waiting != waiting:
                raise Changed("two runs with the same choices differ: the program depends on more than its schedule")
            if self._tries < len(choice.failed):
                self._tries += 1
                self.probing = choice.failed[self._tries - 1]
                return self.probing
            if choice.chosen is not None and choice.chosen not in choice.failed:
                return choice.chosen
            left = choice.left
        else:
            # Loads first: most polls fail then, and are no choice any more.
            left = waiting.keys() - choice.asleep.keys() - set(choice.failed)
            left = {min(left, key=lambda who: (waiting[who].is_store, who))} if left else left
            choice.wanted |= left
        if left:
            return min(left)
        if waiting.keys() <= set(choice.failed):
            return min(waiting)  # it looks once more before a deadlock is reported
        raise Redundant

    def step(self, who: Who, access: Access, clock: Clock, woken_at: int | None = None) -> int:
        """The one who was chosen makes its access. Returns the number of the step.

        woken_at: the step without which it would still be parked before this very access
        """
        depth = len(self.steps)
        choice = self.choices[depth]
        choice.done.add(who)
        choice.wanted.add(who)
        tried = {other: choice.waiting[other] for other in choice.done if other != who and other in choice.waiting}
        self.asleep = {
            other: its for other, its in {**choice.asleep, **tried}.items() if other != who and not its.meets(access)
        }
        before = {self.stores[word] for word in access.words if word in self.stores}
        if access.is_store:
            before.update(*(self.loads.get(word, ()) for word in access.words))
        last = {at for at in before if not any(other != at and self._comes_before(at, other) for other in before)}
        races = [at for at in last if at != woken_at and clock.get(self.steps[at].who, -1) < at]
        for at in before:
            join(clock, self.steps[at].clock)
        clock[who] = depth
        self.steps.append(Step(who, dict(clock)))
        for at in races:
            self._reverse(at)
        if access.is_store:
            self._changing |= access.words
        for word in access.words:
            if access.is_store:
                self.stores[word] = depth
                self.loads.pop(word, None)
            else:
                self.loads.setdefault(word, []).append(depth)
        return depth

    def is_await(self, loads: list[Access], is_nested: bool) -> bool:
        """Whether a turn of a loop looks at one cell only, besides cells that nobody stores to.

        is_nested: the loads may be those of earlier waits, too
        """
        if is_nested and len(loads) > 1:
            return False
        cell = loads[-1].words
        others = {word for load in loads for word in load.words - cell}
        if others & self._changing:
            return False
        self._constant |= others
        return True

    def fail(self, who: Who, depth: int, access: Access) -> bool:
        """A step was a poll that failed: it is none. False if others have gone on since."""
        if depth != len(self.steps) - 1:
            return False
        self.steps.pop()
        for word in access.words:  # who stores there later need not come first
            self.loads[word].remove(depth)
        choice = self.choices[depth]
        choice.done.discard(who)
        choice.wanted.discard(who)
        if who not in choice.failed:
            choice.failed.append(who)
        self._depth, self._tries = depth, len(choice.failed)
        self.asleep = choice.asleep
        del self.choices[depth + 1 :]
        choice.chosen = None if choice.chosen == who else choice.chosen
        return True

    def _reverse(self, at: int) -> None:
        """Have the last step come before an earlier one, in some run: one of those who can begin what leads there."""
        last = len(self.steps) - 1
        later = [j for j in range(at + 1, last) if not self._comes_before(at, j)] + [last]
        first: set[Who] = set()
        for n, j in enumerate(later):
            if not any(self._comes_before(k, j) for k in later[:n]):
                first.add(self.steps[j].who)
        choice = self.choices[at]
        if not first <= choice.waiting.keys():  # something else than an access has let one of them come there
            choice.wanted |= choice.waiting.keys() - set(choice.failed)
        elif not first & (choice.wanted | choice.asleep.keys()):
            choice.wanted.add(min(first))

    def _comes_before(self, at: int, later: int) -> bool:
        return self.steps[later].clock.get(self.steps[at].who, -1) >= at


def join(clock: Clock, other: Clock) -> None:
    for who, at in other.items():
        if clock.get(who, -1) < at:
            clock[who] = at


class Standing(Ready):
    """Threads and hosts that can go on: those before an access wait until no other can."""

    def __init__(self, strategy: Every, turn: Callable[[], bool]):
        self.strategy: Any = strategy
        self.free: list[Any] = []
        self.before_access: dict[Who, Any] = {}
        self.turn = turn

    def append(self, thread: Any) -> None:
        if getattr(thread, "pending", None) is None:
            self.free.append(thread)
        else:
            self.before_access[thread.who] = thread

    def __len__(self) -> int:
        return len(self.free) + len(self.before_access)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.free, *self.before_access.values()])

    def clear(self) -> None:
        self.free.clear()
        self.before_access.clear()

    def take(self) -> Any:
        while not self.free and self.turn():
            pass
        if self.free:
            return self.free.pop()
        tree = self.strategy.tree
        who = tree.choose({who: thread.pending for who, thread in sorted(self.before_access.items())})
        return self.before_access.pop(who)


class Every(Strategy):
    """The strategy of a run of a tree: what is under way happens at once, and a thread alone up to its next choice."""

    name = "every"

    def __init__(self, tree: Tree):
        super().__init__(0, random.Random(0))
        self.tree = tree
        self.operation_rate = 1.0
        self.meetings: dict[Any, Clock] = {}
        self.threads: dict[Any, list[Any]] = {}  # by stream

    def quanta(self, count: int) -> list[int]:
        return [ALONE] * count

    def reluctance(self, rank: int, block: int) -> float:
        return 0.0

    def quantum(self, calls: int, quantum: int) -> int:
        return ALONE

    def put_last(self, thread: Any) -> None:
        """Nobody is preempted."""

    def ready_list(self) -> Standing:
        return Standing(self, self.turn)

    def turn(self) -> bool:
        """Let something happen that nobody chooses: what is under way, or a host that need not wait any more."""
        world = self.world
        if world.operations:
            world._operate()
            return True
        before = len(world.waiting_hosts)
        world._poll_hosts()
        return len(world.waiting_hosts) < before
