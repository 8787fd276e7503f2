"""A thread under the strategy `every`: it stands still before each access that is not weak, until it is chosen.

Weak accesses are no choices: "checked" looks for races of theirs in every run, and a program that has none has no other
results. Neither are barriers, shuffles and votes: they wait for all whom they name, in whatever order these come.
"""

from __future__ import annotations

import dis
import sys
from functools import cache
from types import CodeType, FrameType
from typing import Any

from ..machine.kinds import KINDS
from ..models.checked import CheckedThread
from .every import ALONE, Access, Clock, join

MAX_POLLED = 64  # loads of a turn that are remembered; what is forgotten counts as a load like others
WEAK = ("weak", "nc", "na")


class EveryThread(CheckedThread):
    """A thread of a run of a tree: see `schedule.every`.

    who: its name in all runs
    pending: the access that it stands before
    clock: the steps that come before its next one
    polled_here: its loads since the last turn of a loop: step, access, the frames that led there
    does_more: whether a weak store or a meeting has come after the last of them
    before_load: what it knew before its last load
    awaited: whether its last poll has failed and was no step
    woken_at: the step that has woken it since
    """

    __slots__ = ("who", "pending", "clock", "polled_here", "does_more", "awaited", "woken_at", "before_load")

    def __init__(self, block: Any, thread_idx: int, warp: Any, hub: Any):
        super().__init__(block, thread_idx, warp, hub)
        launch = block.launch
        self.who = (self.rank, launch.name, launch.number, block.index, thread_idx)
        self.pending: Access | None = None
        self.clock: Clock = {}
        earlier = self.world.strategy.threads.setdefault(launch.stream, [])
        for thread in earlier:
            if thread.who[:3] != self.who[:3]:  # a kernel begins when those before it in its stream are done
                join(self.clock, thread.clock)
        earlier.append(self)
        self.polled_here: list[tuple[int, Access, Clock, list[tuple[FrameType, int]]]] = []
        self.does_more = False
        self.before_load: Any = None
        self.awaited = False
        self.woken_at: int | None = None

    @property
    def meetings(self) -> dict[Any, Clock]:
        return self.world.strategy.meetings

    def stand(self, cell: tuple, offset: int, size: int, is_store: bool) -> None:
        """Wait until it is this thread's turn."""
        words = frozenset((cell, word) for word in range(offset >> 2, (offset + size + 3) >> 2))
        access = Access(words, is_store)
        tree = self.world.strategy.tree
        self.left = ALONE
        if tree.probing == self.who:
            return
        self.does_more = False
        if not is_store:
            self.before_load = self.knowledge, dict(self.heard), set(self.observed)
        self.pending = access
        self.runnable.append(self)
        self.park()
        self.pending = None
        self.left = ALONE
        clock = dict(self.clock)
        if tree.probing == self.who:
            return
        at = tree.step(self.who, access, self.clock, self.woken_at)
        self.woken_at = None
        if not is_store:
            self.polled_here.append((at, access, clock, frames_above(sys._getframe(2))))
            del self.polled_here[:-MAX_POLLED]

    def stand_global(self, address: int, kind: str, is_store: bool) -> None:
        allocation, offset = self.locate(address)
        self.stand((allocation.rank, allocation.name), offset, KINDS[kind].size, is_store)

    def stand_shared(self, address: int, kind: str, is_store: bool) -> None:
        self.stand(self.who[:4], address, KINDS[kind].size, is_store)

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        if order not in WEAK:
            self.stand_global(address, kind, False)
        self.left = ALONE
        return super().load(address, kind, order, scope)

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        if order not in WEAK:
            self.stand_global(address, kind, True)
        else:
            self.does_more = True
        self.left = ALONE
        super().store(address, kind, value, order, scope)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        self.stand_global(address, kind, True)
        return super().atomic(op, address, kind, operand, order, scope, compare)

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        if order not in WEAK:
            self.stand_shared(address, kind, False)
        self.left = ALONE
        return super().load_shared(address, kind, order)

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        if order not in WEAK:
            self.stand_shared(address, kind, True)
        else:
            self.does_more = True
        self.left = ALONE
        super().store_shared(address, kind, value, order)

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        self.stand_shared(address, kind, True)
        return super().atomic_shared(op, address, kind, operand, order, compare)

    def spin(self, deadline_ns: int) -> bool:
        """A turn of a loop that polls. If it looks at one cell, its loads are no steps.

        A turn that loads two cells that change is steps: one may change between the loads of both.
        """
        self.left = ALONE
        here = frames_above(sys._getframe(1))
        failed = [poll[:3] for poll in self.polled_here if is_in_loop(poll[3], here)]
        tree = self.world.strategy.tree
        self.awaited = False
        if tree.probing == self.who:
            tree.probing = None
            self.awaited = True
        elif failed and not self.does_more and tree.is_await([access for _, access, _ in failed], is_nested(here)):
            for at, access, clock in reversed(failed):
                if tree.fail(self.who, at, access):
                    self.clock = clock
                    self.awaited = True
        self.polled_here = []
        if self.awaited:  # a poll that is no step has told its thread nothing
            self.knowledge, self.heard, self.observed = self.before_load
        return super().spin(deadline_ns)

    def unwatch(self) -> None:
        waker = self.world.current
        if self.awaited and isinstance(waker, EveryThread):
            self.woken_at = waker.clock.get(waker.who)
        super().unwatch()

    # Whoever leaves a meeting comes behind all that came there.

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> Any:
        self.does_more = True
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        join(self.meetings.setdefault(barrier, {}), self.clock)
        return barrier

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> Any:
        barrier = super().meet(barrier_id, num_threads, predicate)
        join(self.clock, self.meetings[barrier])
        return barrier

    def converge(self, name: str, mask: int, value: Any, site: Any) -> Any:
        self.does_more = True
        collective = super().converge(name, mask, value, site)
        join(self.meetings.setdefault(collective, {}), self.clock)
        return collective

    def collect(self, name: str, mask: int, value: Any, site: Any) -> Any:
        collective = super().collect(name, mask, value, site)
        join(self.clock, self.meetings[collective])
        return collective


def frames_above(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """The frames of a thread from its kernel inwards, each with the instruction at which it is."""
    frames = []
    while frame is not None:
        frames.append((frame, frame.f_lasti))
        frame = frame.f_back
    return frames[::-1]


def is_in_loop(load: list[tuple[FrameType, int]], turn: list[tuple[FrameType, int]]) -> bool:
    """Whether a load lies in the loop of a turn: the innermost one of the innermost function that has one there."""
    for depth in reversed(range(len(turn))):
        frame, at = turn[depth]
        if loop := innermost(frame.f_code, at):
            if depth >= len(load) or load[depth][0] is not frame:
                return False
            return position_of(frame.f_code, load[depth][1]) in loop
    return False


@cache
def positions(code: CodeType) -> list[tuple]:
    return list(code.co_positions())


def position_of(code: CodeType, at: int) -> tuple:
    """Where in its file an instruction comes from: a loop's condition is compiled twice."""
    return positions(code)[at // 2]


def is_nested(turn: list[tuple[FrameType, int]]) -> bool:
    """Whether the loop of a turn may have been entered before in the same frame: old loads look like its own."""
    for frame, at in reversed(turn):
        if loops := loops_around(frame.f_code, at):
            return len({begin for begin, _ in loops}) > 1
    return False


@cache
def loops_around(code: CodeType, at: int) -> list[tuple[int, int]]:
    """The loops that hold an instruction: the offsets of their first and last ones."""
    return [
        (instruction.argval, instruction.offset)
        for instruction in dis.get_instructions(code)
        if "JUMP" in instruction.opname
        and isinstance(instruction.argval, int)
        and instruction.argval <= at <= instruction.offset
    ]


@cache
def innermost(code: CodeType, at: int) -> frozenset[tuple]:
    """Where the instructions of the innermost loop come from that holds one of them; nothing if no loop does."""
    loops = loops_around(code, at)
    if not loops:
        return frozenset()
    begin, end = min(loops, key=lambda loop: loop[1] - loop[0])
    return frozenset(position_of(code, here) for here in range(begin, end + 2, 2))
