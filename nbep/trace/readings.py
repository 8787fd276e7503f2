"""Which store was read by which look: the arrows of all pictures.

A look reads the latest store of its value. An atomic hands on what was stored before it, so that who reads it reads
that too, as far as it is of the same call:

 rank 0   stores 1 -------------------.------------.
 rank 1              adds 1, that is 2 --.          v
 rank 2                                  v-> sees 2: reads both
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nbep.emulator.machine.orders import ACQUIRES
from nbep.trace.events import Cell, Event

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
