"""The smallest schedule that fails as one does: it switches seldom away from a thread that could have gone on.

Such a switch is a *preemption*. Some are left out: their threads go on, and all others keep their order.

 picks:  a a b a c c b      preemptions: at b, and at the first c if a could go on there
 tried:  a a a b c c b      without the first one
"""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import pairwise
from typing import Any, NamedTuple

from nbep.emulator.schedule.every import Choice, Every, Tree
from nbep.emulator.schedule.every_step import Access, Replay, Who

Fails = Callable[[Every], Any]  # runs under a strategy; what it finds, or None if that is not what is looked for


class Schedule(NamedTuple):
    """A run; at which of its picks somebody was preempted; what it has found."""

    replay: Replay
    preemptions: tuple[int, ...]
    found: Any

    @property
    def switches(self) -> int:
        return sum(one != other for one, other in pairwise(self.replay.picks))

    @property
    def size(self) -> tuple[int, int]:
        return len(self.preemptions), self.switches


class Led(Tree):
    """A run that follows some picks as far as it can, and preempts only at some of them.

    left: the numbers of the picks that have not been made, by who makes them, the next one last
    """

    is_search = False

    def __init__(self, replay: Replay, kept: Container[int], is_weak: bool):
        super().__init__(looked_at=replay.events, is_weak=is_weak)
        plan = self.plan = replay.picks
        self.planned_decisions = replay.decided
        self.kept = kept
        self.at = 0
        self.left: dict[Who, list[int]] = {}
        for at in reversed(range(len(plan))):
            self.left.setdefault(plan[at], []).append(at)
        self.preemptions: list[int] = []
        self.begin()

    def choose(self, waiting: dict[Who, Access]) -> Who:
        if len(self.steps) == len(self.choices):
            self.choices.append(Choice(waiting, self.parked(waiting), {}))
        who, last = self.next_of(waiting), self.picks[-1] if self.picks else None
        if last is not None and last in waiting and who != last:
            if self.at in self.kept:
                self.preemptions.append(len(self.picks))
            else:
                who = last
        left = self.left.get(who)
        self._decided.append(self.planned_decisions[left.pop()] if left else ())
        self.choices[len(self.steps)].chosen = who
        self.note_pick(who)
        return who

    def next_of(self, waiting: dict[Who, Access]) -> Who:
        """Whose turn it is by the plan; behind its end anybody's."""
        while self.at < len(self.plan):
            who = self.plan[self.at]
            left = self.left[who]
            if left and left[-1] <= self.at and who in waiting:
                return who
            if left and left[-1] <= self.at:
                left.pop()
            self.at += 1
        return min(waiting)


def led(replay: Replay, kept: Container[int], fails: Fails, is_weak: bool) -> Schedule | None:
    """The run that follows another one, if it fails."""
    tree = Led(replay, kept, is_weak)
    found = fails(Every(tree))
    return None if found is None else Schedule(tree.replay, tuple(tree.preemptions), found)


def fewest_preemptions(
    replay: Replay, fails: Fails, most: int, is_weak: bool = False
) -> tuple[Schedule, Schedule] | None:
    """The schedule of a run, and the smallest one that still fails, in so many runs; None if it fails no more."""
    first = led(replay, range(len(replay.picks)), fails, is_weak)
    if first is None:
        return None
    best, length = first, max(len(first.preemptions), 1)
    while length > 0:
        end = len(best.preemptions)
        while end > 0 and most > 0:
            most -= 1
            kept = {*best.preemptions[: max(end - length, 0)], *best.preemptions[end:]}
            found = led(best.replay, kept, fails, is_weak)
            if found is not None and found.size < best.size:
                best = found
                end = min(end, len(best.preemptions))
            else:
                end -= length
        length //= 2
    return first, best
