"""Turns of a loop that look at several cells, and threads that sleep while a value may still be asked for more.

A turn that fails is no step if no other thread has come between its looks. But its thread may have made the first of
them here, and the others once somebody has stored: another run *begins* the turn where that may matter. In the middle
of a turn whose rest would fail its thread sleeps, until somebody stores what changes that.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from typing import Any, NamedTuple

from .every_choice import Choice, Doubt, rest_of
from .every_loops import Frames, LoopingThread, is_same_place, place_of
from .every_order import Races
from .every_seen import Question, Reading
from .every_step import Access, Clock, Step, Who
from .strategies import ALONE

# A load: its step, the access, what came before it, the frames that led there; what its thread knew before, what it has
# observed, how many deeds it had done, and what it had polled.
Polled = tuple[int, Access, Clock, Frames, Any]


class Redundant(BaseException):
    """All that could go on here has been tried: the run would repeat another one."""


class Failed(NamedTuple):
    """A turn of a wait that has failed, and is no step: its looks, and how many steps there were before."""

    at: int
    looks: list[Step]


class Turns:
    """The part of a tree of runs that knows of waits.

    failed: the turns of the run under way; failures: what those of one look were told, in whichever run, by state
    idle: whose wait has failed since the last store
    at_rest: from which step on nobody can go on but those whose waits would fail; is_stuck: some of them amid a turn
    doubts: who sleeps in the run under way, and may have to wake
    """

    choices: list[Choice]
    steps: list[Step]
    races: Races
    failed: list[Failed]
    failures: dict[Hashable, list[dict[Question, bool]]]
    idle: set[Who]
    at_rest: int | None
    is_stuck: bool
    doubts: list[Doubt]
    is_search: bool
    picks: list[Who]
    _replayed: list[Who]
    planned: int

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

    @property
    def is_led(self) -> bool:
        """Whether they still do."""
        return len(self.picks) < len(self._replayed)

    @property
    def stops(self) -> bool:
        """Whether a thread whose wait has failed stops until a cell changes, and does not only stand before a look."""
        return self.at_rest is not None or (self.is_replay and not self.is_led)

    def forget(self, at: int) -> list[Step]:
        """The last steps are none. Returns them."""
        steps = self.steps[at:]
        del self.steps[at:], self.choices[at + 1 :]
        self.failed = [failed._replace(at=min(failed.at, at)) for failed in self.failed]
        if self.races.end > at:
            self.races = Races(self.steps)
        return steps

    def rest(self, choice: Choice, waiting: dict[Who, Access]) -> Who:
        """Nobody is awake. If all of them wait, they do so for ever; amid a turn they first look at the rest of it.

        If others sleep, who waits makes the first look of a turn if that wakes one of them: it would go on behind that.

        Raises: Redundant, if nobody can wake those who sleep
        """
        others = [who for who in waiting if not choice.fails(who)]
        if others:
            tried = [one for who in others if (one := choice.asleep.get(who) or choice.done.get(who)) is not None]
            for who in waiting.keys() - choice.done.keys() - set(others):
                rest = choice.asleep[who]  # all but its last look may be made here while that comes later
                if rest.begun is None and any(a.access.meets(b.access) for a in tried for b in rest.looks[:-1]):
                    choice.begun.add(who)
                    return who
            raise Redundant
        if self.at_rest is None:
            self.at_rest = len(self.steps)
        self.is_stuck |= not all(choice.asleep[who].is_whole for who in waiting)
        who = min(waiting)
        del choice.asleep[who]
        return who

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
        if all(choice.fails(one) for one in choice.waiting if one != who):
            self.at_rest, self.is_stuck = rest[0], True  # nobody else can go on: it looks again, and maybe for ever
            return
        looks = self.forget(rest[0])
        self.failed.append(Failed(rest[0], looks))
        choice.done.pop(who, None)
        choice.wanted.discard(who)
        choice.asleep[who] = rest_of(looks, is_whole=False)
        choice.choose(None)
        self.wake(choice.waiting)  # the looks have been asked for more since
        if choice.awake and not choice.done and not choice.left:
            choice.wanted.add(min(choice.awake, key=lambda one: (one[4] < 0, choice.waiting[one].is_store, one)))
        raise Redundant

    def fail(self, who: Who, looks: list[int], length: int) -> None:
        """The last steps were a turn that has failed: they are none, and its thread sleeps.

        length: of the turn; it may have been made twice

        Raises: Redundant
        """
        for at in reversed(looks):
            if any(pick for pick, _ in self.choices[at].picks):  # nor does an older value end the wait
                self.forget(at)
                raise Redundant
        choice = self.choices[looks[0]]
        steps = self.forget(looks[0])
        turn = steps[-length:]
        turn[0].after = steps[0].after
        look = turn[0]
        if len(turn) == 1:  # in the same state one that tells as much fails, too
            if look.state is not None and not look.refused:
                look.refused = self.failures.setdefault(look.state, [])
            if look.reading is not None and look.reading.told not in look.refused:
                look.refused.append(look.reading.told)
        self.failed.append(Failed(looks[0], turn))
        choice.done.pop(who, None)
        choice.wanted.discard(who)
        if choice.pick_next():  # an older value may do, but it may as well wait for a newer one, maybe in vain
            choice.later[who] = choice.picks
        choice.asleep[who] = rest_of(turn)
        if looks[0] < self.planned and choice.chosen == who:  # another one must begin what it was to begin
            choice.wanted |= choice.awake
            if len(turn) > 1:  # or this first look alone was wanted
                choice.begun.add(who)
        choice.choose(None)


class TurningThread(LoopingThread):
    """A thread that looks at several cells in a turn."""

    __slots__ = ()

    def do_more(self: Any) -> None:
        """It does more than look."""
        self.wake_for(None)
        self.does_more = True
        self.deeds += 1

    def end_turn(self: Any, looks: list[Polled], here: Frames, is_nested: bool, before: Sequence[Polled] = ()) -> bool:
        """A turn of a loop that polls is over. If no thread has come between its looks, they are no steps.

        If others came, another run has the last ones behind them. Returns whether its thread may go on to the next
        turn, to sleep before its first look.
        is_nested: the looks may be those of earlier waits, too; before: those of a turn just before that was the same

        Raises: Redundant, in a search
        """
        self.left = ALONE
        tree = self.world.strategy.tree
        tree.idle.add(self.who)
        failed: list[Polled] = []
        if looks and not (self.does_more or (is_nested and len(looks) > 1)) and place_of(here) not in tree.looked_at:
            rest: list[int] | None = None
            for failed in ([*before, *looks], looks):
                turn = [look[0] for look in failed]
                is_pure = {look[4][2] for look in failed} == {self.deeds}
                rest = tree.turn_of(self.who, turn) if is_pure else None
                if rest == turn:
                    break
            else:
                failed = []
                if rest is not None and not tree.is_replay and tree.at_rest is None:
                    tree.block(self.who, rest)
        looked = self.forget_looks()
        if failed:
            self.observed = [one for look in failed for one in look[4][1]]
            self.clock, self.before_load = failed[0][2], failed[0][4][0]
            first = tree.steps[looks[0][0]]
            tree.fail(self.who, turn, len(looks))
            self.refused = first.access.words, first.refused
            self.sleeping = (
                place_of(here),
                lambda access: access == looks[0][1] and is_same_place(looks[0][3], self.frames),
            )
            for words in {look[1].words for look in failed} & looked.keys():
                self.latest.pop(looked[words].cell, None)
            self.forget_polled()
        if tree.stops or not (failed or tree.is_replay):
            return False
        if failed:
            self.polled = failed[0][4][3]  # as in runs that do not make this turn
        return True

    def forget_looks(self: Any) -> dict[Any, Reading]:
        """The turn is over. Returns what it has read, by words."""
        looked: dict[Any, Reading] = self.looked
        self.looked = dict[Any, Reading]()
        self.polled_here = list[Polled]()
        self.loop.forget()
        return looked

    def forget_polled(self: Any) -> None:
        for cell, polled in list(self.polled.items()):
            if self.changed([polled]):  # since an earlier wait that has succeeded
                del self.polled[cell]
        self.knowledge, self.heard = self.before_load
        self.forget_met()
        for store, observation in self.observed:
            store.observed_by = tuple(one for one in store.observed_by if one is not observation)
