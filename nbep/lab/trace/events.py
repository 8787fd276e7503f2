"""What a trace is made of: launches, and events at cells that have names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from nbep.emulator.machine.orders import ACQUIRES

# As allocations name cells: `tail[channel 0, src 1]`, `x[channel 0, src 1, slot 2] + 16`, `tail[channel 0, node 1]`.
_CELL = re.compile(r"(\w+)(?:\[(?:channel (\d+), (src|node) (\d+)(?:, slot (\d+))?|[^]]*)\])?(?: \+ (\d+))?")
_ROW = re.compile(r"\w+\[(row|slot) (\d+)[],]")  # `recv_x[row 3, half 0] + 0`, `x[slot 2] + 0`


class Cell(NamedTuple):
    """A place in memory. channel, src, node, slot and row are -1 where they mean nothing."""

    owner: int  # the rank whose memory it is
    text: str  # "tail[channel 0, src 1]"
    name: str  # "tail"
    channel: int = -1
    src: int = -1
    slot: int = -1
    byte: int = 0  # within the slot or row
    row: int = -1  # of an output
    node: int = -1  # of whose ranks it is, where a cell is of a whole node
    words: Callable[[int], str | None] | None = None  # what a value means, if not the number; None: the number

    @classmethod
    def parse(cls, owner: int, text: str) -> Cell:
        """The cell that an allocation describes as `text`."""
        match = _CELL.match(text)
        if match is None:
            return cls(owner, text, text)
        name, channel, kind, src, slot, byte = match.groups()
        direct = _ROW.match(text)
        row = -1
        if direct is not None:
            row, slot = (int(direct[2]), None) if direct[1] == "row" else (-1, direct[2])
        return cls(
            owner,
            text,
            name,
            int(channel) if channel else -1,
            int(src) if kind == "src" else -1,
            int(slot) if slot else -1,
            int(byte) if byte else 0,
            row=row,
            node=int(src) if kind == "node" else -1,
        )

    def value(self, number: Any) -> Any:
        """What a value of the cell is, as it is shown."""
        text = self.words(number) if self.words is not None and isinstance(number, int) else None
        return number if text is None else text


class Launch(NamedTuple):
    """One kernel on one rank. Steps are primitive calls of all threads since the run began."""

    rank: int
    kernel: str
    call: int  # 0 for the rank's first launch of this kernel; ranks launch together, so calls pair up (1)
    begin: int
    end: int | None  # None: it has not ended
    grid: int
    block: int
    half: int = -1  # of a double buffer, which its call takes
    phases: str = ""  # of its call: "send", "receive", "send and receive", or "free" behind a receive
    notes: Any = None  # of its view, see `trace.view`

    # (1) With a hook, the launches of both phases have the number of their call.


class Token(NamedTuple):
    """A token: its rank and its index there, and the ranks that it goes to: inside a node that of the slot alone."""

    rank: int
    index: int  # type: ignore[assignment]  # hides the method of tuples, which is not called
    destinations: tuple[int, ...]


class Line(NamedTuple):
    """A line of a kernel's source."""

    file: str
    number: int
    function: str
    begin: int  # the line where the function begins


class Event(NamedTuple):
    """Something that one thread did.

    what   "store"   wrote `value` to the cell
           "fill"    wrote the first bytes of a token's row to slot `value` of a ring, to slot or token `value` of a
                     half, or to row `value` of an output
           "atomic"  changed the cell to `value`
           "see"     a polling load got a `value` that this thread had not seen in the cell before, or that was stored
                     there anew
           "wait"    parked on the cell from `step` to `until`, having seen `value`; until is None if nothing ended it
           "hang"    has come to a barrier or a collective that nothing completes: see `Recorder.hangs`
           "finding" has done what stopped the run; the cell is the kind of error, `value` the first line of its report
    """

    step: int
    what: str
    rank: int
    kernel: str
    call: int
    block: int
    thread: int
    role: str  # what the thread is there for, as "sender", "receiver"; its kernel's name if no view says it
    cell: Cell
    value: Any
    order: str
    until: int | None = None
    team: int = -1  # which of several peers its role serves
    token: Token | None = None  # of a "fill" of a slot in dispatch, where the bytes that it writes name the token
    first: bytes = b""  # of a "fill" by a bulk copy: the first bytes of the row
    at: tuple[Line, ...] = ()  # where the thread was, and who called that, innermost first


# Which store was read by which look: the arrows of all pictures.
#
# A look reads the latest store of its value. An atomic hands on what was stored before it, so that who reads it reads
# that too, as far as it is of the same call:
#
#  rank 0   stores 1 -------------------.------------.
#  rank 1              adds 1, that is 2 --.          v
#  rank 2                                  v-> sees 2: reads both


STORES = ("store", "atomic")


class Reading(NamedTuple):
    """Indices of two events: a store or an atomic, and a later look by another thread that reads it."""

    stored: int
    seen: int


def readings(events: Sequence[Event]) -> Iterator[Reading]:
    """Each store with all who read it, each thread once. In the order of the looks; events are in that of steps.

    A look is a "see", or an atomic of acquire order, which reads what stood in the cell before.
    """
    stores: dict[Cell, list[int]] = {}  # indices of events
    looked: dict[tuple[object, ...], int] = {}  # up to which store of a cell a thread has read
    for i, event in enumerate(events):
        is_atomic = event.what == "atomic"
        if event.what == "see" or (is_atomic and event.order in ACQUIRES):
            mine = stores.get(event.cell, [])
            last = len(mine) - 1
            while event.what == "see" and last >= 0 and events[mine[last]].value != event.value:
                last -= 1
            key = (event.rank, event.kernel, event.call, event.block, event.thread, event.cell)
            known = looked.get(key, -1)
            looked[key] = max(last, known)
            while last > known:
                stored = events[mine[last]]
                if _thread(stored) != _thread(event):
                    yield Reading(mine[last], i)
                goes_on = stored.what == "atomic" and not is_atomic and last > 0
                last = last - 1 if goes_on and _call(events[mine[last - 1]]) == _call(stored) else -1
        if event.what in STORES:
            stores.setdefault(event.cell, []).append(i)


def _thread(event: Event) -> tuple[object, ...]:
    return event.rank, event.kernel, event.call, event.block, event.thread


def _call(event: Event) -> tuple[str, int]:
    return event.kernel, event.call
