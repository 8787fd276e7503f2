"""In which loop of its kernel's source a thread stands, for `every_thread`: what it has loaded there is a poll.

A loop polls if it ends its turns with `wait_expired`; or if it is a `while` that has come back to where it was, all
that its functions hold is as it was, and nothing but looks at cells lies between.
"""

# mypy: disable-error-code="misc"
# `LoopingThread` has its slots in the classes that are made of it.

from __future__ import annotations

import dis
import sys
import zlib
from collections.abc import Callable, Hashable
from functools import cache
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..machine.carrier import OF_CARRIERS
from ..machine.memory import Allocation
from ..machine.source import describe_site, frames_of_kernel, site_of
from ..machine.thread import Thread
from .every_seen import Reading, Seen
from .every_step import Clock, Step, Who

Frames = list[tuple[FrameType, int]]
MOST_STEPS = 64  # primitive calls of a turn that is known again
MANY_LOOKS, MANY_WEAK_LOOKS = 1000, 100  # at one cell, while no thread stores; where each look may be another schedule
MANY_CALLS = 10_000  # weak accesses, after which some are looked at more closely
# The attributes of `LoopingThread`.
OF_CHOICES = (
    "who", "clock", "at", "loop", "polled_here", "does_more", "reading", "sleeping", "mates", "copies", "asked",
)  # fmt: skip


class Endless(BaseException):
    """A thread looks and looks in a loop that is not known to wait: no other thread would ever be chosen."""


class Mark(NamedTuple):
    """Where a thread was in a loop, all that the functions held which the loop may change, and the run's next step.

    depth: which of its functions has the loop
    """

    frames: Frames
    depth: int
    held: Any
    step: int


class Loop:
    """Whether the loop of a thread has come back to where it was, with nothing changed: then it waits.

    state: where it is about to look, and all that decides what it does if that fails; None if that is not known
    weak: weak accesses so far
    looks: how often it has looked at each cell since the last store of anybody, which was the one of this number
    """

    __slots__ = ("mark", "state", "steps", "same", "weak", "looks", "stores")

    def __init__(self) -> None:
        self.mark: Mark | None = None
        self.state: Hashable = None
        self.steps = self.weak = 0
        self.same: int | None = None  # the step at which one turn had come back; the next one has the same values
        self.looks: dict[Any, int] = {}
        self.stores = 0

    def forget(self) -> None:
        """Something has changed, or the thread has done more than look."""
        self.mark = None

    def comes_back(self, frame: FrameType, step: int) -> tuple[int, int] | None:
        """The thread is about to look at a cell: the first steps of two turns that have changed nothing, or None."""
        here = frames_of_kernel(frame)
        mark = self.mark
        self.steps += 1
        self.state = None
        if mark is None or self.steps > MOST_STEPS or not is_in_loop(mark.frames, here):
            self.set_mark(here, step)
        elif is_same_place(mark.frames, here):
            if held_in(here, mark.depth) != mark.held:
                self.set_mark(here, step)
            elif self.same is not None:
                return mark.step, self.same
            else:
                self.same = step
                self.state = state_of(mark)
        return None

    def set_mark(self, here: Frames, step: int) -> None:
        self.steps, self.same = 0, None
        depth = depth_of_loop(here)
        self.mark = Mark(here, depth, held_in(here, depth), step) if is_while(here, depth) else None
        self.state = state_of(self.mark)

    def has_many(self, tree: Any) -> bool:
        """One more weak access: whether there are so many that the next few are to be looked at.

        Raises: OutOfTime
        """
        self.weak += 1
        if self.weak % MANY_CALLS == 0:
            tree.look_at_time()
        return self.weak >= MANY_CALLS and self.weak % MANY_CALLS < MOST_STEPS

    def count(self, thread: Any, cell: Any, stores: int, most: int) -> None:
        """A look, which is a step. stores: how many have been made in the run

        Raises: Endless
        """
        if stores != self.stores:
            self.looks.clear()
            self.stores = stores
        looks = self.looks[cell] = self.looks.get(cell, 0) + 1
        if looks > most:
            raise Endless(
                f"{thread.describe()}, has looked {most:,} times at one cell while no thread has stored, at "
                f"{describe_site(site_of(sys._getframe(1)))}.\n"
                f"A `while` that does nothing but look at cells is a wait. This one does more in each iteration: it "
                f"counts, or it meets others. For a wait, end each iteration with `give_up(bounds, deadline)`: "
                f"docs/own_kernels.md"
            )


if TYPE_CHECKING:
    Base = Thread
else:
    Base = object


class LoopingThread(Base):
    """A thread of a run of a tree. It forgets its mark when it changes something, or finds a cell changed.

    who: its name in all runs
    clock: the last steps that come before its next one: its own, and those of threads that it has met since
    at: the step that it makes now, None if it is none; with weak memory or its last one
    loop: whether it has come back to where it was
    polled_here: its loads since the last turn of a loop; does_more: whether anything else has come after the last one
    reading: what it reads, or has read last
    sleeping: where a turn has failed, and whether an access is its first
    mates: the lanes for which it arrives at a barrier, itself included; none if another one does it for it
    copies: those that it has started and that are choices
    asked: the mbarrier and the phase that it has asked for last, and where; it was not over
    """

    __slots__ = ()

    def __init__(self, block: Any, thread_idx: int, warp: Any, hub: Any):
        super().__init__(block, thread_idx, warp, hub)
        launch = block.launch
        self.who: Who = (self.rank, launch.name, launch.number, block.index, thread_idx)
        self.clock: Clock = self.world.order.begin(self)
        self.at: int | None = None
        self.loop = Loop()
        self.polled_here: list[Any] = []
        self.does_more = False
        self.reading: Reading | None = None
        self.sleeping: tuple[tuple, Callable[[Any], bool]] | None = None
        self.mates: list[Any] = []
        self.copies = 0
        self.asked: Any = None

    @property
    def made(self) -> Step | None:
        """The step that is being made."""
        return None if self.at is None else self.world.strategy.tree.steps[self.at]

    # Whoever leaves a meeting comes behind all that came there, itself included.

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> Any:
        barrier = super().meet(barrier_id, num_threads, predicate)
        self.clock = barrier.clock
        return barrier

    def collect(self, name: str, mask: int, value: Any, site: Any) -> Any:
        collective = super().collect(name, mask, value, site)
        self.clock = collective.clock
        self.waits_for = None  # so that nobody keeps what the lanes have passed
        return collective

    def before_meeting(self) -> None:
        """It is about to arrive somewhere: what it does before that."""

    def wake_for(self: Any, access: Any) -> None:
        """What it does behind a turn that has failed: if that is not to look there again, it does more than wait.

        Raises: Redundant, in a search
        """
        if self.sleeping is not None:
            place, first = self.sleeping
            self.sleeping = None
            tree = self.world.strategy.tree
            if (access is None or not first(access)) and not tree.is_outdated:
                tree.begin_again(place)

    def modify(
        self, op: str, allocation: Allocation, offset: int, kind: str, operand: Any, compare: Any, address: int
    ) -> Any:
        before = self.polled.get((allocation, offset))
        old = super().modify(op, allocation, offset, kind, operand, compare, address)
        if self.polled.get((allocation, offset)) is before:  # it has changed something
            self.loop.forget()
        return old

    def note_polled(self, allocation: Allocation, offset: int, kind: str, value: Any) -> None:
        before = self.polled.get((allocation, offset))
        if before is not None and before[3] != value:
            self.loop.forget()
        super().note_polled(allocation, offset, kind, value)


class Same(int):
    """The number of an object, by which it is known again in the same run."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def held_in(here: Frames, depth: int) -> Any:
    """What is held by the function with the innermost loop, which has this depth, and by those that it has called."""
    return tuple(held(dict(frame.f_locals)) for frame, _ in here[depth:])


def state_of(mark: Mark | None) -> Hashable:
    """What decides what a thread does next at a mark, as other runs may know it; None if it is not known."""
    if mark is None:
        return None
    here = mark.frames[mark.depth :]
    state = tuple((frame.f_code, position_of(frame.f_code, at)) for frame, at in here), mark.held
    try:
        hash(state)
    except TypeError:
        return None
    return state


def held(value: Any) -> Any:
    """A value as it is now. An object that is none of Python's plain ones counts as one that does not change."""
    if isinstance(value, dict):
        return tuple((key, held(one)) for key, one in value.items())
    if isinstance(value, (tuple, list, set)):
        return type(value).__name__, tuple(held(one) for one in value)
    if isinstance(value, FunctionType):
        return value
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, Seen):
        return value.value, value.steps
    own = getattr(value, "own_bytes", None)  # an array of its thread alone, which may be what counts the turns
    if own is not None:
        return own
    return (type(value), value) if isinstance(value, (int, float, str, np.generic)) else Same(id(value))


def depth_of_loop(here: Frames) -> int:
    """Which function has the innermost loop; -1 if none has one."""
    depth = len(here) - 1
    while depth >= 0 and not innermost(here[depth][0].f_code, here[depth][1]):
        depth -= 1
    return depth


def is_while(here: Frames, depth: int) -> bool:
    """Whether the loop at a depth is no `for`: what that goes through lies in none of its function's names."""
    return depth >= 0 and begins_as(here[depth][0].f_code, here[depth][1]) != "FOR_ITER"


@cache
def begins_as(code: CodeType, at: int) -> str:
    """The first instruction of the innermost loop."""
    begin, _ = shortest(loops_around(code, at))
    names = (one.opname for one in dis.get_instructions(code) if one.offset >= begin)
    return next(name for name in names if name != "EXTENDED_ARG")


def is_same_place(before: Frames, here: Frames) -> bool:
    """Whether a thread is at the same instruction of the same loop, reached by the same calls."""
    return len(before) == len(here) and all(
        one.f_code is other.f_code and position_of(one.f_code, at) == position_of(other.f_code, now)
        for (one, at), (other, now) in zip(before, here, strict=True)
    )


def frames_above(frame: FrameType | None) -> Frames:
    """The frames of a thread from its kernel inwards, each with the instruction at which it is.

    The carrier below has a loop, too, which is none of the kernel's.
    """
    frames = []
    while frame is not None and frame.f_code is not OF_CARRIERS:
        frames.append((frame, frame.f_lasti))
        frame = frame.f_back
    return frames[::-1]


def still_running(frames: Frames) -> Frames:
    """Those of a thread that runs now that have not returned. The others are cleared: what they held asks nothing."""
    running = len(frames)
    try:  # not `suppress`, which takes three times as long: this is done before every access and meeting
        while running:
            frames[running - 1][0].clear()
            running -= 1
    except RuntimeError:
        pass  # it has not returned, nor have those that have called it
    return frames[:running]


def is_in_loop(load: Frames, turn: Frames) -> bool:
    """Whether a load lies in the loop of a turn: the innermost one of the innermost function that has one there."""
    depth = depth_of_loop(turn)
    if depth < 0 or depth >= len(load) or load[depth][0] is not turn[depth][0]:
        return False
    frame, at = turn[depth]
    return position_of(frame.f_code, load[depth][1]) in innermost(frame.f_code, at)


def is_same_turn(before: Frames, turn: Frames) -> bool:
    """Whether a thread stands where it stood before, and the innermost loop there has brought it back."""
    depth = depth_of_loop(turn)
    return is_in_loop(before, turn) and is_same_place(before[depth : depth + 1], turn[depth : depth + 1])


def place_of(here: Frames) -> tuple[str, int, int, int]:
    """The name of a place in a kernel, in all runs."""
    frame, at = here[-1]
    line, _, column, _ = position_of(frame.f_code, at)
    return "loop", zlib.crc32(frame.f_code.co_filename.encode()), line or 0, column or 0


@cache
def positions(code: CodeType) -> list[tuple]:
    return list(code.co_positions())


def position_of(code: CodeType, at: int) -> tuple:
    """Where in its file an instruction comes from: a loop's condition is compiled twice."""
    return positions(code)[at // 2]


def last_turn(looks: list[Frames], here: Frames) -> int:
    """The number of the first look of the last turn of a loop that ends here: each begins where the first one did."""
    called = depth_of_loop(here) + 1  # by the function that has the loop: one call may look several times
    for number in reversed(range(1, len(looks))):
        if is_same_place(looks[number], looks[0]) and looks[number][called][0] is not looks[number - 1][called][0]:
            return number
    return 0


def is_nested(turn: Frames) -> bool:
    """Whether the loop of a turn may have been entered before in the same frame: old loads look like its own."""
    if (depth := depth_of_loop(turn)) < 0:
        return False
    frame, at = turn[depth]
    return len({begin for begin, _ in loops_around(frame.f_code, at)}) > 1


@cache
def loops_around(code: CodeType, at: int) -> list[tuple[int, int]]:
    """The loops that hold an instruction, or its other copy: the offsets of their first and last ones."""
    place = position_of(code, at)
    copies = [2 * number for number, other in enumerate(positions(code)) if other == place]
    jumps = [one for one in dis.get_instructions(code) if "JUMP" in one.opname and isinstance(one.argval, int)]
    return [(one.argval, one.offset) for one in jumps if any(one.argval <= copy <= one.offset for copy in copies)]


@cache
def innermost(code: CodeType, at: int) -> frozenset[tuple]:
    """Where the instructions of the innermost loop come from that holds one of them; nothing if no loop does."""
    loops = loops_around(code, at)
    if not loops:
        return frozenset()
    begin, end = shortest(loops)
    return frozenset(position_of(code, here) for here in range(begin, end + 2, 2))


def shortest(loops: list[tuple[int, int]]) -> tuple[int, int]:
    last = {begin: max(end for other, end in loops if other == begin) for begin, _ in loops}  # jumps of one condition
    return min(last.items(), key=lambda loop: loop[1] - loop[0])
