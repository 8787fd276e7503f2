"""The trace as text, for terminals and notebooks: events, and what became of the entries of a send queue."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nbep.device.network.ibgda.completion import REQ_ERR, index_of, opcode_of
from nbep.device.primitives import byteswap_u32
from nbep.emulator.machine.names import NIC_NUMBERS
from nbep.lab.debug import Text
from nbep.lab.trace.events import Cell, Event
from nbep.lab.trace.recorder import Recorder


def align(rows: Sequence[Sequence[object]], right: str) -> Text:
    """Columns side by side. `right` has a character for each column: ">" where it is flush right."""
    texts = [[str(value) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(right))]
    lines = []
    for row in texts:
        cells = [
            text.rjust(width) if side == ">" else text.ljust(width)
            for text, width, side in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return Text("\n".join(lines))


def event_table(events: Sequence[Event], limit: int | None) -> Text:
    """One line for each event, in order."""
    shown = events if limit is None else events[:limit]
    rows: list[tuple[object, ...]] = [("step", "rank", "kernel", "block", "warp", "lane", "role", "does", "memory of")]
    for event in shown:
        warp, lane = divmod(event.thread, 32)
        role = "" if event.role == event.kernel else event.role
        rows.append(
            (
                event.step,
                who(event.rank),
                event.kernel,
                event.block,
                warp,
                lane,
                role,
                describe(event),
                who(event.cell.owner),
            )
        )
    text = align(rows, ">><>>><<>")
    if len(shown) < len(events):
        text = Text(f"{text}\n... {len(events) - len(shown)} more")
    return text


def stuck_table(events: Sequence[Event]) -> Text:
    """One line for each cell that a role of a rank waits for and that nothing has changed since."""
    rows: list[tuple[object, ...]] = [("rank", "role", "waits, and sees", "memory of")]
    stuck = [event for event in events if event.until is None and "[byte " not in event.cell.text]
    for event in sorted(stuck, key=lambda event: (event.rank, event.role, event.cell)):
        row = (who(event.rank), event.role, f"{event.cell.text} = {event.value}", who(event.cell.owner))
        if row not in rows:
            rows.append(row)
    return align(rows, "><<>")


def who(number: int) -> str:
    """A rank, or the NIC of one, in a column."""
    return str(number) if number < NIC_NUMBERS else f"NIC {number - NIC_NUMBERS}"


def describe(event: Event) -> str:
    """What an event is, in a few words."""
    order = f" ({event.order})" if event.order else ""
    if event.what == "fill":
        where = event.cell.text
        return f"fills {where.partition('[')[2].partition(']')[0] if event.cell.name == 'x' else where}"
    value = event.cell.value(event.value) if event.cell.name != "head" else event.value
    if event.what == "see":
        return f"sees {event.cell.text} = {value}{order}"
    if event.what == "wait":
        how_long = "and is never woken" if event.until is None else f"for {event.until - event.step} steps"
        return f"waits {how_long}: {event.cell.text} is {value}"
    if event.what == "finding":
        return f"{event.cell.text}: {event.value}"
    if event.what == "store":
        return f"stores {event.cell.text} = {value}{order}"
    return f"makes {event.cell.text} {value}{order}"


# What became of the entries of a send queue: when each was reserved, ready, rung for and done
#
# RESERVED past it --> READY past it --> doorbell past it --> completion of it, or of a later one
# a slot is its own    it is written,    the NIC may look     the NIC is done
#                      as all before


_CELL = re.compile(r"(RESERVED|READY|doorbell|completion) of queue pair \d+ \(queue (\d+) to rank (\d+)\)")


class EntryLife(NamedTuple):
    """Steps at which an entry got so far; None if it did not. `done` is that of the completion that says so."""

    number: int  # in its queue, from 0
    reserved: int | None
    ready: int | None
    rung: int | None
    done: int | None
    is_refused: bool = False


def entry_lives(trace: Recorder, rank: int, peer: int, queue: int) -> list[EntryLife]:
    """All entries of a rank's queue to a peer, in order.

    Raises: ValueError if the trace has nothing of that queue
    """
    lives = all_lives(trace).get((rank, peer, queue))
    if lives is None:
        raise ValueError(
            f"rank, peer, queue: the trace has none of rank {rank}'s entries for rank {peer}, queue {queue}"
        )
    return lives


def all_lives(trace: Recorder) -> dict[tuple[int, int, int], list[EntryLife]]:
    """The entries of all queues that have any, by rank, peer and queue."""
    queues: dict[tuple[int, int, int], _Progress] = {}
    found: dict[Cell, re.Match[str] | None] = {}
    for event in trace.events(["store", "atomic"]):
        cell = event.cell
        if cell not in found:
            found[cell] = _CELL.match(cell.text)
        match = found[cell]
        if match is not None:
            key = cell.owner, int(match[3]), int(match[2])
            queues.setdefault(key, _Progress()).add(match[1], event)
    return {key: progress.lives() for key, progress in queues.items() if progress.past["RESERVED"]}


class _Progress:
    """How far a queue's counters have got: for each, the steps at which it was past which number."""

    def __init__(self) -> None:
        self.past: dict[str, list[tuple[int, int]]] = {name: [] for name in NUMBERS}
        self.refused = -1

    def add(self, name: str, event: Event) -> None:
        numbers, past = self.past[name], NUMBERS[name](event)
        if past is None:
            return
        if name in ("doorbell", "completion"):  # 16 bits of it
            last = numbers[-1][1] if numbers else 0
            past = last + ((past - last + 0x8000 & 0xFFFF) - 0x8000)
        if name == "completion" and opcode_of(event.value) == REQ_ERR:
            self.refused = past - 1
        numbers.append((event.step, past))

    def lives(self) -> list[EntryLife]:
        num_entries = max(past for _, past in self.past["RESERVED"])
        return [
            EntryLife._make(
                (
                    number,
                    *(next((step for step, past in numbers if past > number), None) for numbers in self.past.values()),
                    number == self.refused,
                )
            )
            for number in range(num_entries)
        ]


def _done(event: Event) -> int | None:
    """A completion's status is its release; the syndrome before it says nothing of which entry it is."""
    return index_of(event.value) + 1 if event.order == "release" else None


NUMBERS: dict[str, Callable[[Any], int | None]] = {
    "RESERVED": lambda event: event.value,
    "READY": lambda event: event.value,
    "doorbell": lambda event: byteswap_u32(event.value & 0xFFFFFFFF) >> 8 & 0xFFFF,
    "completion": _done,
}
