"""The trace as text, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from nbep.debug import Text
from nbep.emulator.machine.names import NIC_NUMBERS
from nbep.trace.events import Event
from nbep.trace.low_latency import in_tags
from nbep.trace.recorder import Recorder
from nbep.trace.rings import RingFill, ring_fills

BARS = " ▁▂▃▄▅▆▇█"


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
    value = in_tags(event.value) if event.cell.is_in_tags else event.value
    if event.what == "see":
        return f"sees {event.cell.text} = {value}{order}"
    if event.what == "wait":
        how_long = "and is never woken" if event.until is None else f"for {event.until - event.step} steps"
        return f"waits {how_long}: {event.cell.text} is {value}"
    if event.what == "store":
        return f"stores {event.cell.text} = {value}{order}"
    return f"makes {event.cell.text} {value}{order}"


def ring_table(trace: Recorder, kernel: str | None, width: int) -> Text:
    """One line for each ring: how often its cells were published, and how full it was over its launch."""
    rings = ring_fills(trace, kernel)
    has_levels = any(ring.level for ring in rings)
    level = ("level",) if has_levels else ()
    rows: list[tuple[object, ...]] = [
        ("rank", "kernel", *level, "channel", "src", "tokens", "tails", "heads", "peak", "slots", "fill over time")
    ]
    rows += [
        (
            ring.rank,
            ring.kernel if ring.call == 0 else f"{ring.kernel} {ring.call}",
            *(_level(ring) if has_levels else ()),
            ring.channel,
            ring.src,
            ring.num_tokens,
            ring.num_tail_stores,
            ring.num_head_stores,
            ring.peak,
            ring.capacity,
            sparkline(ring, width),
        )
        for ring in rings
    ]
    return align(rows, ("><<" if has_levels else "><") + ">>>>>>><")


def _level(ring: RingFill) -> tuple[str]:
    return (ring.level if ring.node < 0 else f"{ring.level}, for node {ring.node}",)


def sparkline(ring: RingFill, width: int) -> str:
    """The fill in `width` characters, the highest in each piece of time; `█` is a full ring."""
    begin, end = ring.steps[0], max(ring.steps[-1], ring.steps[0] + 1)
    highest = [ring.at(begin + (end - begin) * i // width) for i in range(width)]
    for step, fill in zip(ring.steps, ring.fill, strict=True):
        piece = min((step - begin) * width // (end - begin), width - 1)
        highest[piece] = max(highest[piece], fill)
    return "".join(BARS[-(-fill * (len(BARS) - 1) // ring.capacity)] for fill in highest)
