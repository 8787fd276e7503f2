"""Which item lies in which slot of a ring, from when to when: all of it from the ring's two counters.

tail  ----n+1-------------------      item n is there: its bar begins, in the row of slot n % num_slots
head  -----------------n+1------      its slot is free: the bar ends
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nbep.trace.events import Event
from nbep.trace.recorder import Recorder
from nbep.trace.style import FAINT, INK, RANK_COLORS, SHADE, SMALL, TINY, Picture, count_steps, plain_axes


class CountedRing(NamedTuple):
    """A ring of one's own: a label, and each counter as the rank that it lies at and the name of its cell."""

    label: str
    tail: tuple[int, str]
    head: tuple[int, str]


def counted_picture(
    trace: Recorder, rings: Sequence[CountedRing], num_slots: int, items: Sequence[str], follow: int = -1
) -> Picture:
    """A row for each slot of each ring. items: their names; follow: the one that has a colour, -1: none

    Raises: ValueError if a ring has no tail that moves
    """
    rows = [(ring, slot) for ring in rings for slot in range(num_slots)]
    picture = Picture(9.0, 0.6 + 0.42 * len(rows))
    axes = picture.add_subplot()
    plain_axes(axes)
    for line, (ring, slot) in enumerate(rows):
        filled, freed = _moves(trace, ring.tail), _moves(trace, ring.head)
        if not filled:
            raise ValueError(f"{ring.label}: no thread has moved {ring.tail[1]} of rank {ring.tail[0]}")
        axes.barh(line, trace.last_step, height=0.7, color=SHADE)
        for n in range(slot, max(count for _, count in filled), num_slots):
            begin = _reached(filled, n + 1, trace.last_step)
            end = _reached(freed, n + 1, trace.last_step)
            color = RANK_COLORS[0] if n == follow else FAINT
            axes.barh(line, end - begin, left=begin, height=0.7, color=color, edgecolor="white")
            axes.text((begin + end) / 2, line, items[n], fontsize=TINY, color=INK, ha="center", va="center")
    axes.set_yticks(range(len(rows)), [f"{ring.label}, slot {slot}" for ring, slot in rows], fontsize=SMALL)
    axes.set_xlim(0, trace.last_step)
    axes.invert_yaxis()
    count_steps(axes)
    return picture


def _moves(trace: Recorder, counter: tuple[int, str]) -> list[tuple[int, int]]:
    """When a counter got a value, and which, in this order."""
    owner, name = counter
    return [(event.step, event.value) for event in trace.events(("store", "atomic")) if _is(event, owner, name)]


def _is(event: Event, owner: int, name: str) -> bool:
    return event.cell.owner == owner and event.cell.text == name


def _reached(moves: list[tuple[int, int]], count: int, never: int) -> int:
    return next((step for step, value in moves if value >= count), never)
