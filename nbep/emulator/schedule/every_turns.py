"""Turns of a loop that look at several cells, and threads that sleep while a value may still be asked for more.

A turn that fails is no step if no other thread has come between its looks. But its thread may have made the first of
them here, and the others once somebody has stored: another run *begins* the turn where that may matter. In the middle
of a turn whose rest would fail its thread sleeps, until somebody stores what changes that.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from .every_choice import Choice, Doubt, Rest
from .every_loops import Frames, LoopingThread, is_same_place
from .every_order import Races
from .every_seen import Reading
from .every_step import Access, Clock, Step, Who, load_of

# A load: its step, the access, what came before it, the frames that led there; what its thread knew before, what it has
# observed, and how many deeds it had done.
Polled = tuple[int, Access, Clock, Frames, Any]


class Redundant(BaseException):
    """All that could go on here has been tried: the run would repeat another one."""


class Turns:
    """The part of a tree of runs that knows of turns.

    doubts: who sleeps in the run under way, and may have to wake
    """

    choices: list[Choice]
    steps: list[Step]
    races: Races
    doubts: list[Doubt]
    is_search: bool
    _replayed: list[Who]
    planned: int
    at_rest: int | None

    def fail(self, who: Who, depth: int) -> bool:
        raise NotImplementedError

    def to_hold(self) -> set[tuple[int, Who]]:
        """Whose turns are not to fail, at which choices: they begin one at a later choice, or at this one."""
        held = set()
        for at, choice in enumerate(self.choices):
            who = choice.chosen
            if who is None or who not in choice.begun or (who in choice.waiting and who not in choice.failed):
                continue
            for earlier in reversed(range(at + 1)):
                held.add((earlier, who))
                if who in self.choices[earlier].failed:
                    break
        return held

    def doubt(self, depth: int) -> None:
        """Behind the last step somebody may sleep, and the step may still ask for more."""
        step = self.steps[-1] if depth else None
        if step is not None:
            doubtful = self.choices[depth].doubtful.items()
            self.doubts += [Doubt(who, tried, step, depth) for who, tried in doubtful]

    def wake(self, all_of: Container[Who] = ()) -> None:
        """Wake those on whom a step has turned out to depend; all_of: and whoever else of these may wake."""
        doubts, self.doubts = self.doubts, []
        for doubt in doubts:
            who, tried, step, at = doubt.who, doubt.tried, doubt.step, doubt.choice
            if at > len(self.steps) or self.steps[at - 1] is not step:
                continue
            may_ask = step.may_ask
            if (may_ask and who in all_of) or (doubt.has_changed() and not tried.commutes_with(step)):
                for choice in self.choices[at:]:
                    if choice.asleep.get(who) is tried:
                        del choice.asleep[who]
                    if choice.doubtful.get(who) is tried:
                        del choice.doubtful[who]
            elif may_ask:
                self.doubts.append(doubt)

    @property
    def is_replay(self) -> bool:
        """Whether somebody has said who goes on."""
        return bool(self._replayed) or not self.is_search

    def is_last(self, choice: Choice, others: Container[Who]) -> bool:
        """Whether all of these stand amid a turn that would fail."""
        return all(isinstance(choice.asleep.get(one), Rest) for one in others)

    def turn_of(self, who: Who, looks: list[int]) -> list[int] | None:
        """The last looks of a turn that no other thread interrupts. None if its thread has done more than look."""
        if looks[-1] != len(self.steps) - 1:
            return None
        if sum(step.who == who for step in self.steps[looks[0] :]) != len(looks):
            return None
        last = len(self.steps)
        rest: list[int] = []
        for at in reversed(looks):
            if at != last - 1 or self.steps[at].begins:
                break
            rest.insert(0, at)
            last = at
        return rest

    def block(self, who: Who, rest: list[int]) -> None:
        """A turn that began before others came has failed. Its last looks would be made when somebody has stored.

        Raises: Redundant
        """
        if not rest:
            raise Redundant
        choice = self.choices[rest[0]]
        if self.is_last(choice, choice.waiting.keys() - {who} - set(choice.failed)):
            self.at_rest = rest[0]  # nobody else can go on: it looks again, and maybe waits for ever
            return
        looks = [self.steps[at] for at in rest]
        del self.steps[rest[0] :], self.choices[rest[0] + 1 :]
        self.races = Races(self.steps)
        choice.done.pop(who, None)
        choice.wanted.discard(who)
        if len(rest) == 1:
            choice.begun.discard(who)
        choice.asleep[who] = Rest(looks)
        choice.choose(None)
        self.wake(choice.waiting)  # the looks have been asked for more since
        awake = choice.waiting.keys() - choice.asleep.keys() - set(choice.failed)
        if awake and not choice.done and not choice.left:
            choice.wanted.add(min(awake, key=lambda one: (one[4] < 0, choice.waiting[one].is_store, one)))
        raise Redundant

    def fail_turn(self, who: Who, looks: list[int]) -> None:
        """A turn that looks at several cells has failed, and no other thread has come between: it is no step."""
        choice = self.choices[looks[0]]
        if looks[0] < self.planned and choice.chosen == who:  # it may have been the first look alone that was wanted
            choice.begun.add(who)
        accesses = [self.steps[at].access for at in looks]
        for at in reversed(looks):
            self.steps[at].state = None
            self.fail(who, at)
        choice.turns.add(who)
        # Who sleeps would wake if the turn began here: a look that fails now may be followed by one that comes later.
        if any(tried.access.meets(look) for tried in choice.asleep.values() for look in accesses[:-1]):
            choice.begun.add(who)


class TurningThread(LoopingThread):
    """A thread that looks at several cells in a turn."""

    __slots__ = ()

    def do_more(self: Any) -> None:
        """It does more than look."""
        self.does_more = True
        self.deeds += 1

    def fail_turn(self: Any, failed: list[Polled]) -> None:
        """A turn that has looked at several cells is over, and has failed.

        If others came between its looks, another run has the last ones behind them.

        Raises: Redundant, in a search
        """
        tree = self.world.strategy.tree
        failed = self.since_turn(failed)
        looks = [poll[0] for poll in failed]
        deeds = {poll[4][2] for poll in failed} | {self.deeds}
        rest = tree.turn_of(self.who, looks) if len(deeds) == 1 else None
        if rest is not None and rest != looks and not tree.is_replay and tree.at_rest is None:
            tree.block(self.who, rest)
        if rest != looks:
            self.forget_looks()
            return
        self.observed = []
        for poll in failed:
            self.observed += poll[4][1]
        self.clock, self.before_load = failed[0][2], failed[0][4][0]
        tree.fail_turn(self.who, looks)
        self.forget_turn()

    def forget_looks(self: Any) -> dict[Any, Reading]:
        """The turn is over. Returns what it has read, by words."""
        looked: dict[Any, Reading] = self.looked
        self.looked = dict[Any, Reading]()
        self.polled_here = list[Polled]()
        self.loop.forget()
        return looked

    def since_turn(self: Any, looks: list[Polled]) -> list[Polled]:
        """The looks of the last turn, and of those just before that have seen the same."""
        steps = self.world.strategy.tree.steps
        turns = turns_in(looks)

        def answers(turn: list[Polled]) -> list[Any]:
            readings = [steps[look[0]].reading if look[0] < len(steps) else None for look in turn]
            return [(look[1], one and one.told) for look, one in zip(turn, readings, strict=True)]

        first = len(turns) - 1
        while first > 0 and answers(turns[first - 1]) == answers(turns[-1]) and turns[first - 1][0][4][2] == self.deeds:
            between = range(turns[first - 1][0][0], turns[first][0][0])
            own = [at for at in between if steps[at].who == self.who]
            if own != [look[0] for look in turns[first - 1]]:
                break
            first -= 1
        return [look for turn in turns[first:] for look in turn]

    def forget_turn(self: Any) -> None:
        """A turn that has looked at several cells was no step: its thread has seen nothing new."""
        tree = self.world.strategy.tree
        looked = self.forget_looks()
        self.awaited = True
        for reading in looked.values():
            self.latest.pop(reading.cell, None)
        poll = Step(self.who, load_of(frozenset().union(*looked)), self.clock, None, [])
        poll.is_turn = True
        tree.refused[self.who] = poll
        self.forget_polled()

    def forget_polled(self: Any) -> None:
        for cell, polled in list(self.polled.items()):
            if self.changed([polled]):  # since an earlier wait that has succeeded
                del self.polled[cell]
        self.knowledge, self.heard = self.before_load
        self.forget_met()
        for store, observation in self.observed:
            store.observed_by = tuple(one for one in store.observed_by if one is not observation)


def turns_in(looks: list[Polled]) -> list[list[Polled]]:
    """Looks by the turns of the loop: each begins where the first one did."""
    begins = [i for i, look in enumerate(looks) if is_same_place(look[3], looks[0][3])]
    return [looks[i:j] for i, j in zip(begins, [*begins[1:], len(looks)], strict=True)]
