"""The trace as text, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from nbep.emulator.machine.names import NIC_NUMBERS
from nbep.lab.debug import Text
from nbep.lab.trace.events import Event


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
