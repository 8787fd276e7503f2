"""The cause of a race between two launches of one rank, or the host and a launch: who has to wait for which."""

from __future__ import annotations

from typing import Any

from ..machine.names import name_of
from ..models.knowledge import ALL_CLOCKS, CPU_CLOCK
from ..models.streams import Place
from .causes import Cause
from .chains import Race


def stream_cause(race: Race) -> Cause | None:
    """The wait that is missing; None if one launch is before the other, or the kernels talk to each other."""
    thread, _, access, earlier = race
    launch = thread.block.launch
    order: Any = thread.world.order
    if earlier.owner.is_cpu and launch.known.stores.get(CPU_CLOCK, earlier.number) < earlier.number:
        does = f"{access.verb}s"
        place = launch.place
        return race.cause("CPU after the launch", race.cell, launch=place.title, stream=place.stream.name, does=does)
    here, there = launch.place, order.place_of(earlier.owner)
    if there is None or earlier.owner.rank != thread.rank or there.is_before(here) or here.is_before(there):
        return None
    known, at_start = thread.knowledge.stores, launch.known.stores
    of_others = known.get(ALL_CLOCKS, 0), at_start.get(ALL_CLOCKS, 0)
    if any(known.get(clock, of_others[0]) > at_start.get(clock, of_others[1]) for clock in there.clocks()):
        return None
    first, second = sorted((here, there), key=lambda place: place.queued_as)
    verbs = {id(here): access.verb, id(there): earlier.verb}
    return race.cause(
        "streams",
        race.cell,
        first=_launch(first),
        second=_launch(second),
        rank=name_of(thread.rank),
        does=f"{verbs[id(first)]}s",
        also=f"{verbs[id(second)]}s {'it, too' if verbs[id(first)] == verbs[id(second)] else 'it'}",
        stream=second.stream.name,
        other=first.stream.name,
        instead=_waited(order, first, second),
    )


def _launch(place: Place) -> str:
    return f"{place.title} on stream `{place.stream.name}`"


def _waited(order: Any, first: Place, second: Place) -> str:
    """What the second stream has waited for instead."""
    waited = order.waits.get((second.stream, first.stream))
    if waited is None:
        return f"it has waited for no event of stream `{first.stream.name}`"
    record = f"record {waited.mark.number} of its event" if waited.mark.number > 1 else "an event"
    return f"it has waited for {record}, recorded before {first.title}"
