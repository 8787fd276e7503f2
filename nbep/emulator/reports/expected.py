"""What a thread that waits would have to see, asked of the thread itself once the run is over.

look    the thread takes one more turn of its loop. What it loads notes what it is compared with
expire  its wait times out. Where it goes on to report that, the world's `read_report` reads the report's words

A thread is stopped before its next primitive has an effect, so that little changes. What changes all the same does
not matter: the run has ended, and what its report says of memory and of places has been written down before.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..machine.kinds import KINDS, range_of
from ..machine.memory import Allocation
from ..models.pending import GRANULE
from ..tracing import SILENT

if TYPE_CHECKING:
    from ..machine.access import Cell
    from ..machine.thread import Thread

_MOST_STEPS = 12  # primitive calls of a thread that looks again
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NEGATED = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}
_MIRRORED = {"==": "==", "!=": "!=", "<": ">", ">": "<", "<=": ">=", ">=": "<="}


class TimedOutWait(NamedTuple):
    """What a wait reports when it times out: who waits (role) for which peer (-1: none) and for what (awaited)."""

    role: str
    peer: int
    awaited: str
    cell: str
    expected: int
    seen: int


class _Note(NamedTuple):
    """A comparison of a loaded value: what was compared (None: the value itself), with what, and whether it held."""

    cell: tuple[Any, int]
    text: str | None
    sign: str
    other: Any
    holds: bool


def _comparison(sign: str) -> Callable[[Seen, Any], bool]:
    return lambda seen, other: seen._compare(sign, other)


def _operation(sign: str, result: Callable[[int, Any], Any]) -> Callable[[Seen, Any], Any]:
    return lambda seen, other: seen._other_way(result(int(seen), other), sign, other)


class Seen(int):
    """A loaded value that notes what it is compared with; sums and differences are traced back to the value."""

    notes: list[_Note]
    cell: tuple[Any, int]
    scale: int  # this is scale * value + shift, unless it has a text of its own
    shift: Any
    text: str | None

    @classmethod
    def of(cls, value: int, notes: list[_Note], cell: tuple[Any, int]) -> Seen:
        return cls(value)._with(notes, cell, 1, 0, None)

    def _with(self, notes: list[_Note], cell: tuple[Any, int], scale: int, shift: Any, text: str | None) -> Seen:
        self.notes, self.cell, self.scale, self.shift, self.text = notes, cell, scale, shift, text
        return self

    def _sum(self, result: Any, sign: int, other: Any) -> Any:
        """The result of other + sign * self."""
        if isinstance(other, Seen) or not isinstance(other, int) or self.text is not None:
            return result
        return Seen(result)._with(self.notes, self.cell, sign * self.scale, other + sign * self.shift, None)

    def __add__(self, other: Any) -> Any:
        return self._sum(int(self) + other, 1, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._sum(int(self) - other, 1, -other)

    def __rsub__(self, other: Any) -> Any:
        return self._sum(other - int(self), -1, other)

    def __neg__(self) -> Any:
        return self._sum(-int(self), -1, 0)

    def _other_way(self, result: Any, sign: str, other: Any) -> Any:
        if self.text is not None or (self.scale, self.shift) != (1, 0) or not isinstance(result, int):
            return result
        return Seen(result)._with(self.notes, self.cell, 1, 0, f"its value {sign} {other}")

    __and__ = __rand__ = _operation("&", operator.and_)
    __mod__ = _operation("%", operator.mod)
    __floordiv__ = _operation("//", operator.floordiv)
    __rshift__ = _operation(">>", operator.rshift)

    def _compare(self, sign: str, other: Any) -> bool:
        holds = _OPERATORS[sign](int(self), int(other) if isinstance(other, Seen) else other)
        if isinstance(other, int) and not isinstance(other, Seen) and not _is_emulators(sys._getframe(2)):
            if self.text is None:
                if self.scale < 0:
                    sign, other = _MIRRORED[sign], -other
                    other += self.shift
                else:
                    other -= self.shift
            self.notes.append(_Note(self.cell, self.text, sign, int(other), holds))
        return holds

    __eq__, __ne__ = _comparison("=="), _comparison("!=")
    __lt__, __le__ = _comparison("<"), _comparison("<=")
    __gt__, __ge__ = _comparison(">"), _comparison(">=")

    def __bool__(self) -> bool:
        return self._compare("!=", 0)

    __hash__ = int.__hash__


def look(threads: Sequence[Thread], cells: Sequence[Cell]) -> dict[tuple[Any, int], str]:
    """Let threads, which wait together, take one more turn: for each of `cells` what they would have to see there.

    Args: threads: the lanes of one warp that wait at one place; cells: what the first of them polls
    """
    notes: list[_Note] = []
    thread = threads[0]
    with _noting(cells, notes):
        for other in threads:
            _wake(other)
        for _ in range(_MOST_STEPS):
            for other in thread.warp_state.lanes:  # some may wait for these at a collective
                if other not in other.world.polling:
                    _step(other)
            if thread in thread.world.polling:
                break
    expected = {}
    kinds = {(allocation, offset): kind for allocation, offset, kind, _ in cells}
    for cell in dict.fromkeys(note.cell for note in notes):
        text = condition([note for note in notes if note.cell == cell], kinds[cell])
        if text is not None:
            expected[cell] = text
    return expected


def expire(threads: Sequence[Thread]) -> TimedOutWait | None:
    """End the waits of some threads, which wait together: what the first of them reports, or else another lane."""
    first = threads[0]
    world, lanes = first.world, first.warp_state.lanes
    if world.read_report is None:
        return None
    reports = {thread: _read(thread) for thread in lanes}  # some may have come to their report already
    if reports[first] is None:
        for _ in range(_MOST_STEPS):
            for thread in threads:
                if thread in world.polling:
                    thread.expired = True
                    _wake(thread)
            for thread in lanes:
                if reports[thread] is None and thread not in world.polling:
                    _step(thread)
                    reports[thread] = _read(thread)
            if reports[first] is not None:
                break
    return reports[first] or next((reports[thread] for thread in threads if reports[thread] is not None), None)


def _read(thread: Thread) -> TimedOutWait | None:
    frame = None if thread.exited else thread.gr_frame
    read_report = thread.world.read_report
    return None if frame is None or read_report is None else read_report(thread, frame)


def _is_emulators(frame: FrameType) -> bool:
    """Whether the emulator itself compares, to find out what has changed."""
    return str(frame.f_globals.get("__name__")).startswith(("nbep.emulator.", "nbep.lab.numba_cuda."))


def _wake(thread: Thread) -> None:
    if thread in thread.world.polling:
        thread.unwatch()


def _step(thread: Thread) -> None:
    """Let a thread go on up to its next primitive, if it can."""
    runnable = thread.world.runnable
    if not thread or thread.exited or thread not in runnable:
        return
    runnable.remove(thread)
    thread.left = 0
    thread.world.current = thread
    with suppress(Exception):
        thread.switch()
    thread.world.current = None


@contextmanager
def quiet(world: Any) -> Iterator[None]:
    """Meanwhile no tracer sees what threads do, no launch ends, and no store counts as the last to a cell."""
    hooks, launches = world.hooks, list(world.launches)
    allocations = {allocation for space in world.spaces.values() for allocation in space.segments.values()}
    writers = [(allocation, dict(allocation.writers)) for allocation in allocations]
    world.hooks = None if hooks is None else SILENT
    for launch in launches:
        launch.copies += 1
    try:
        yield
    finally:
        world.hooks = hooks
        for launch in launches:
            launch.copies -= 1
        for allocation, before in writers:
            allocation.writers.clear()
            allocation.writers.update(before)


@contextmanager
def _noting(cells: Sequence[Cell], notes: list[_Note]) -> Iterator[None]:
    """Let loads of cells return values that note what they are compared with.

    All stores have been seen by now, so loads need not choose among versions, as they do with `delayed`.
    """
    before = []
    for allocation, offset, kind, _ in cells:
        if type(allocation) is Allocation and not allocation.freed and KINDS[kind].get is None:
            loads, granule = allocation.loads, offset // GRANULE
            before.append(
                (loads, kind, loads[kind], allocation.versions, granule, allocation.versions.pop(granule, None))
            )
            loads[kind] = _entry(loads[kind], allocation, offset, notes)
    try:
        yield
    finally:
        for loads, kind, entry, versions, granule, kept in reversed(before):
            loads[kind] = entry
            if kept is not None:
                versions[granule] = kept


def _entry(entry: tuple, allocation: Allocation, offset: int, notes: list[_Note]) -> tuple:
    """In place of an entry of `Views`: a cell's value notes what happens to it."""
    view, shift, misfit, convert, _, written = entry

    def get(view: Any, at: int) -> Any:
        value = view[at >> shift] if convert is None else convert(view, at)
        return Seen.of(value, notes, (allocation, offset)) if at == offset else value

    return view, shift, misfit, get, None, written


def condition(notes: list[_Note], kind: str) -> str | None:
    """What a value has to be, in words, from the comparisons that it has not passed. What no value can be is left out.

    If that is all of it, the words say so.
    """
    wanted: list[str] = []
    in_vain: list[str] = []
    for note in notes:
        if note.holds == notes[-1].holds:  # the last one decides; those that came out otherwise have led to it
            sign = _NEGATED[note.sign] if note.holds else note.sign
            text = _in_words(note.text, sign, note.other)
            (wanted if note.text is not None or can_be(kind, sign, note.other) else in_vain).append(text)
    words = " or ".join([*dict.fromkeys(wanted)][:3])
    if words or not in_vain:
        return words or None
    return f"{' or '.join([*dict.fromkeys(in_vain)][:3])}, which no {kind} can be,"


def can_be(kind: str, sign: str, other: int) -> bool:
    """Whether some value of a kind compares so with a number."""
    least, most = range_of(kind)
    if sign == "==":
        return least <= other <= most
    return any(_OPERATORS[sign](value, other) for value in (least, most))


def _in_words(text: str | None, sign: str, other: int) -> str:
    if text is not None:
        return f"{text} {sign} {other}"
    if sign == "==":
        return str(other)
    if sign == "!=":
        return f"anything but {other}"
    if sign in (">", ">="):
        return f"{other + (sign == '>')} or more"
    return f"{other - (sign == '<')} or less"
