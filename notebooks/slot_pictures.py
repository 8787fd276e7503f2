"""Pictures that these notebooks alone show: of the slots of rings, and of the entries of a send queue.

plot_slots(trace, dst=1)             what lies in each slot, from when to when
plot_queue(trace, rank=0, peer=1)    a bar for each entry

What lies in the slots of the rings that end at one rank, who waits for them, and which warp takes the rows out:

rank 0 sends      ==waits for a free slot==
slot 0    [ 0 |     0     ]   [ 2 |    2    ]       light: being filled; dark: the tail is past it, it may be read
slot 1         [ 1 |     1      ]      [ 3 |   3  ]
rank 1, warp 1   ==waits==   o        ==waits==     o: it has written a row of the output
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from nbep.lab.trace.events import Event
from nbep.lab.trace.recorder import Recorder
from nbep.lab.trace.style import (
    FAINT,
    HEAD_COLOR,
    INK,
    RANK_COLORS,
    SMALL,
    STUCK_COLOR,
    TAIL_COLOR,
    TINY,
    WAIT_COLOR,
    Picture,
    count_steps,
    plain_axes,
)
from nbep.lab.trace.table import entry_lives

HALF = 0.36  # of a lane's height
GREY = "#8a8a8a"


class Stay(NamedTuple):
    """A row in a slot: when it was written, announced, and given up. is_lost: the next row came before that."""

    number: int
    slot: int
    filled: int
    announced: int
    left: int
    is_lost: bool


def stays(events: list[Event], src: int, num_slots: int, end: int) -> list[Stay]:
    """The rows that went through one ring, in order of their slots and steps. events: all of that ring."""
    moves = {name: [(e.step, e.value) for e in events if e.cell.name == name] for name in ("tail", "head")}

    def reached(name: str, value: int) -> int:
        return next((step for step, moved in moves[name] if moved >= value), end)

    found = []
    for slot in range(num_slots):
        fills = [e.step for e in events if e.what in ("fill", "store") and index(e, "slot") == slot]
        for turn, filled in enumerate(fills):
            number = turn * num_slots + slot
            left = reached("head", number + 1)
            after = fills[turn + 1] if turn + 1 < len(fills) else end
            announced = min(max(filled, reached("tail", number + 1)), left, after)
            found.append(Stay(number, slot, filled, announced, min(left, after), after < left))
    return found


def index(event: Event, word: str) -> int:
    """The number behind a word in the name of a cell, -1 if there is none: 2 of `x[slot 2, src 0]` for "slot"."""
    match = re.search(rf"\b{word} (\d+)", event.cell.text)
    return int(match[1]) if match else -1


def plot_slots(
    trace: Recorder,
    dst: int = 1,
    channel: int = 0,
    kernel: str | None = None,
    *,
    call: int = 0,
    follow: int | None = None,
) -> Picture:
    """The slots of all rings that end at a rank: which row lies there from when to when, and who waits.

    Cells are found by their names: `tail[src 0]`, `head[src 0]`, `x[slot 1, src 0]`, with or without a channel.

    Args:   dst, channel, kernel, call: which rings
            follow: the row of each ring that has a colour, counted from 0; None: all
    Raises: ValueError if no slot of such a ring was filled
    """

    def is_of_ring(event: Event) -> bool:
        at = max(index(event, "channel"), 0)
        return event.cell.owner == dst and index(event, "src") >= 0 and at == channel

    run = [e for e in trace.events() if e.call == call and kernel in (None, e.kernel)]
    cells = [e for e in run if is_of_ring(e) and e.what in ("fill", "store")]
    rings: defaultdict[int, list[Event]] = defaultdict(list)
    for event in cells:
        if event.cell.name in ("tail", "head") or index(event, "slot") >= 0:
            rings[index(event, "src")].append(event)
    rings = defaultdict(
        list, {src: rings[src] for src in sorted(rings) if any(index(e, "slot") >= 0 for e in rings[src])}
    )
    if not rings:
        raise ValueError(f"dst, channel, kernel, call: no slot of such a ring at rank {dst} was filled")
    receives = [e for e in run if e.rank == dst and e.what in ("wait", "fill") and e.role not in ("sender", "copier")]
    waits = [e for e in run if e.what == "wait"]
    begin = min(e.step for e in cells)
    end = max([e.step for e in cells] + [e.until or 0 for e in waits] + [e.step for e in receives]) + 1
    sizes = {src: 1 + max(index(e, "slot") for e in events) for src, events in rings.items()}
    readers = sorted(
        {
            (e.block, e.thread // 32)
            for e in receives
            if (e.what == "fill" and e.cell.row >= 0) or (e.what == "wait" and e.cell.name != "head")
        }
    )
    num_lanes = sum(1 + size for size in sizes.values()) + len(readers)
    picture = Picture(9.5, 1.0 + 0.3 * num_lanes)
    axes = picture.subplots()
    plain_axes(axes)
    names: list[str] = []
    for src, events in rings.items():
        senders = [e for e in waits if e.rank == src and e.cell.name == "head" and is_of_ring(e)]
        _draw_waits(axes, senders, len(names), end)
        names.append(f"rank {src} sends")
        for stay in stays(events, src, sizes[src], end):
            _draw_stay(axes, stay, len(names) + stay.slot, src, stay.number if follow is None else follow)
        names += [f"slot {slot}" for slot in range(sizes[src])]
    for block, warp in readers:
        own = [e for e in receives if (e.block, e.thread // 32) == (block, warp)]
        _draw_waits(axes, [e for e in own if e.what == "wait"], len(names), end)
        rows = sorted({(e.step, e.cell.row) for e in own if e.what == "fill" and e.cell.row >= 0})
        for step, row in rows:
            axes.plot([step], [len(names)], marker="o", color=INK, markersize=4, zorder=4)
            axes.annotate(
                f"row {row}", (step, len(names)), (4, 0), "data", textcoords="offset points", fontsize=TINY, va="center"
            )
        role = own[0].role if own[0].role in ("receiver", "coordinator") else ""
        names.append(f"rank {dst}, warp {warp} {role}".strip())
    axes.set_yticks(range(len(names)), names, fontsize=SMALL)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(begin - 0.02 * (end - begin), end + 0.02 * (end - begin))
    count_steps(axes)
    any_lost = any(stay.is_lost for src, events in rings.items() for stay in stays(events, src, sizes[src], end))
    axes.set_title(
        "Numbers: the rows in the order of their ring. Light: being written. Dark: announced by the tail. "
        "Grey bar: waits." + (" Red: written over too early." if any_lost else ""),
        fontsize=SMALL,
        color=INK,
        loc="left",
    )
    return picture


def _draw_waits(axes: Axes, waits: list[Event], lane: int, end: int) -> None:
    for event in waits:
        until = end if event.until is None else event.until
        color = STUCK_COLOR if event.until is None else WAIT_COLOR
        axes.barh(lane, until - event.step, 0.5 * HALF, event.step, color=color, zorder=1)


def _draw_stay(axes: Axes, stay: Stay, lane: int, src: int, follow: int) -> None:
    color = RANK_COLORS[src % len(RANK_COLORS)] if stay.number == follow else GREY
    axes.barh(lane, stay.announced - stay.filled, 2 * HALF, stay.filled, color=color, alpha=0.3, zorder=2)
    axes.barh(lane, stay.left - stay.announced, 2 * HALF, stay.announced, color=color, alpha=0.75, zorder=2)
    edge, width = (STUCK_COLOR, 2.0) if stay.is_lost else (FAINT, 0.5)
    axes.barh(
        lane, stay.left - stay.filled, 2 * HALF, stay.filled, fill=False, edgecolor=edge, linewidth=width, zorder=3
    )
    middle = (stay.filled + stay.left) / 2
    axes.text(middle, lane, str(stay.number), fontsize=SMALL, color=INK, ha="center", va="center", zorder=4)


# The picture of a send queue: what becomes of each entry over time.
#
# entry 0   |wrt|..|---- the NIC ----|
# entry 1      |write|.......|--------- the NIC ---------|       .. written, and not rung for yet
# entry 2            |write|.|----------------------------------|


HEIGHT = 0.5
MOST = 64  # entries that one picture shows
PARTS = (
    ("reserved: its owner writes it, and waits for its turn", HEAD_COLOR),
    ("ready: not rung for yet", WAIT_COLOR),
    ("rung: the NIC has it", TAIL_COLOR),
)
STUCK = "not done"


def plot_queue(trace: Recorder, rank: int = 0, peer: int = 1, queue: int = 0) -> Picture:
    """A bar for each entry, the first on top, from its reservation to its completion.

    Raises: ValueError if the trace has no entries of that queue
    """
    lives = entry_lives(trace, rank, peer, queue)[:MOST]
    picture = Picture(9.5, 1.1 + 0.22 * len(lives))
    axes = picture.subplots()
    plain_axes(axes)
    is_stuck = False
    for life in lives:
        # Who rings for its own entry does so just before the next one has the turn.
        ready = min((step for step in (life.ready, life.rung) if step is not None), default=None)
        steps = (life.reserved, ready, life.rung, life.done)
        for (_, color), begin, end in zip(PARTS, steps, steps[1:], strict=False):
            if begin is None:
                break
            until = trace.last_step if end is None else end
            if until == begin:
                continue
            lost = end is None or (life.is_refused and end == life.done)
            is_stuck = is_stuck or lost
            axes.barh(-life.number, until - begin, HEIGHT, begin, color=STUCK_COLOR if lost else color)
    axes.set_yticks([-life.number for life in lives], [f"entry {life.number}" for life in lives])
    axes.set_ylim(-len(lives) + 0.4, 0.6)
    axes.set_title(f"Queue {queue} from rank {rank} to rank {peer}", loc="left", fontsize=SMALL, color=INK)
    count_steps(axes)
    kinds = [Patch(color=color, label=text) for text, color in (*PARTS, (STUCK, STUCK_COLOR))[: 4 if is_stuck else 3]]
    picture.legend(handles=kinds, loc="outside lower left", ncols=2, fontsize=SMALL, frameon=False)
    return picture
