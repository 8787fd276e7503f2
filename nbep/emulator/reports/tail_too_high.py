"""Rows that are promised too soon: a tail that says one more than has been stored, or a reader that goes beyond it.

The reader then loads again what it has loaded before, and given back; the row that it was to load comes a moment later.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..models.knowledge import Access
from .causes import Cause
from .chains import Race


def loaded_again(race: Race) -> Cause | None:
    """That a signal let a thread load bytes again, to which this thread is about to store; and the signal's cell.

    This thread knows that the block has loaded them before, and had not acquired that cell then.
    """
    earlier, storer = race.earlier, race.thread.owner
    if earlier.verb == "store" or earlier.reach or earlier.owner.block == storer.block:
        return None  # a store, a poll, or what a barrier orders
    first = next((load for load in _loads(race) if not race.thread.is_new(load)), None)
    if first is None:
        return None
    link = next(race.signals_seen(earlier.owner, storer, earlier.time), None)
    if link is None or link.load.time < first.time or race.has_reached(link.store, first.owner, first.time):
        return None
    return race.cause("promised", link.cell, race.cell, lines=(link,), store=link.store.noun)


def has_old_signal(race: Race) -> bool:
    """Whether the last signal of another block that this thread has seen comes before what that one has stored."""
    earlier, listener = race.earlier, race.thread.owner
    if earlier.verb == "load" or earlier.owner.block == listener.block:
        return False
    link = next(race.signals_seen(listener, earlier.owner), None)
    return link is not None and link.store.time < earlier.time


def _loads(race: Race) -> Iterator[Access]:
    """What the block has loaded of the bytes of both since they were stored, before the load of the race."""
    begin, end = max(race.access.begin, race.earlier.begin), min(race.access.end, race.earlier.end)
    for granule in range(begin >> 4, (end + 15) >> 4):
        for last in race.allocation.last_loads.get(granule, {}).values():
            for load in (last, *last.before):
                if load.owner.block == race.earlier.owner.block and load.begin < end and begin < load.end:
                    if load.time < race.earlier.time:
                        yield load
