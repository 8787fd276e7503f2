"""What a trace knows of a launch: what threads are there for, what cells are called, which token a row is.

`LaunchView` takes the names that allocations give their cells. A `View` knows some kernels better; nbep.registry has
those that there are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from nbep.emulator.machine.carrier import CURRENT
from nbep.lab.trace.events import Cell, Token
from nbep.registry import registered

if TYPE_CHECKING:
    from nbep.lab.trace.page import Slots, Story
    from nbep.lab.trace.recorder import Recorder

OF_A_NIC = "NIC"  # its memory: only it and its rank's kernels use it


class Role(NamedTuple):
    """What a thread is there for. team: which of several peers its role serves; -1: none, or all."""

    name: str
    team: int = -1


class LaunchView:
    """One launch.

    number, half, phases: of the call that it belongs to, where launches of several phases make one
    header_bytes: in front of a slot's row, which one bulk copy brings together
    notes: what pictures of its view want to know
    """

    number: int | None = None
    half, phases = -1, ""
    header_bytes = 0
    notes: Any = None

    def role(self, thread: Any) -> Role:
        """What a thread is there for; the kernel's name where all threads do the same."""
        return Role(thread.block.launch.name)

    def has_cells(self, allocation: Any) -> bool:
        """Whether weak stores to an allocation are recorded."""
        return is_described(allocation)

    def cell(self, allocation: Any, offset: int, thread: Any, is_weak: bool) -> Cell | None:
        """The cell at an offset; None for bytes that have no place in a trace. is_weak: the access is a weak store."""
        if is_described(allocation):
            return cell_of(allocation.rank, allocation.describe(offset))
        name = "shared" if allocation.number == 0 else allocation.name
        return Cell(allocation.rank, f"{name}[byte {offset - allocation.lowest}]", name)

    def token(self, cell: Cell, data: bytes) -> Token | None:
        """Which token a bulk copy brings to a slot, header and all; None if the bytes do not say it."""
        return None


class Counter(NamedTuple):
    """A number over time, of a rank: values[i] from steps[i] on. what: that the values count"""

    rank: int
    title: str
    what: str
    steps: list[int]
    values: list[int]


@dataclass(frozen=True)
class View:
    """Kernels that somebody knows.

    begin     what a new trace asks for the view of each launch, as it begins; None for a launch of other kernels
    parse     the cell that an allocation of a rank describes in words; None if they are as `Cell.parse` takes them
    private   allocations that their own kernels alone use: their cells have names in reports, and no place in a trace
    payload   names of cells that are tokens and what goes with them; of those in `first` the first bytes are recorded
    slots, stories, counters  of a trace: for its page, and for Perfetto
    pictures  further methods of `nbep.lab.trace.Trace`: where they are, as "module:name"; imported when they are called
    """

    begin: Callable[[], Callable[[Any], LaunchView | None]]
    parse: Callable[[int, str], Cell | None] = lambda rank, text: None
    private: Container[str] = ()
    payload: Container[str] = ()
    first: Container[str] = ()
    slots: Callable[[Recorder], Iterable[Slots]] = lambda trace: ()
    stories: Callable[[Recorder], Iterable[Story]] = lambda trace: ()
    counters: Callable[[Recorder], Iterable[Counter]] = lambda trace: ()
    pictures: Mapping[str, str] = field(default_factory=dict)


@cache
def views() -> tuple[View, ...]:
    return tuple(registered("views"))


def cell_of(rank: int, text: str) -> Cell:
    """The cell that an allocation of a rank describes so."""
    found = (view.parse(rank, text) for view in views())
    return next((cell for cell in found if cell is not None), None) or Cell.parse(rank, text)


def is_described(allocation: Any) -> bool:
    """Whether an allocation has named cells that others than its owner's kernels may see."""
    name = allocation.name
    is_private = name == OF_A_NIC or any(name in view.private for view in views())
    return allocation.describe is not None and not is_private


def is_recorded(cell: Cell) -> bool:
    """Whether accesses to a cell are events: not those to bytes of tokens behind the first ones."""
    return not any(cell.name in view.payload and not (cell.name in view.first and cell.byte == 0) for view in views())


def function_of(thread: Any, names: Container[str]) -> FrameType | None:
    """The outermost function with one of these names that a thread is in."""
    frame: FrameType | None = sys._getframe(1) if CURRENT.get() is thread else thread.gr_frame
    found = None
    while frame is not None:
        if frame.f_code.co_name in names:
            found = frame
        frame = frame.f_back
    return found
