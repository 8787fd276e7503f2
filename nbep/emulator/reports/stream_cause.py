"""The cause of a race between two launches of one rank, or the host and a launch: who has to wait for which."""

from __future__ import annotations

from typing import Any

from ..machine.names import name_of
from ..models.knowledge import CPU_CLOCK, Place, latest, stream_of
from .causes import Cause
from .chains import Race


def stream_cause(race: Race) -> Cause | None:
    """The wait that is missing; None if one launch is before the other, or the kernels talk to each other."""
    thread, _, access, earlier = race
    launch = thread.block.launch
    order: Any = thread.world.order
    if earlier.owner.is_cpu and earlier.reach and (access.reach or earlier.verb == "load"):
        return None  # they are to meet while the kernel runs
    if earlier.owner.is_cpu and launch.known.stores.get(CPU_CLOCK, earlier.number) < earlier.number:
        does, did = f"{access.verb}s", "reads" if earlier.verb == "load" else "stores"
        words = {"launch": launch.place.title, "stream": launch.place.stream, "does": does, "did": did}
        return race.cause("CPU after the launch", race.cell, **words)
    here, there = launch.place, earlier.owner.place
    if there is None or earlier.owner.rank != thread.rank or there.clock == here.clock or there.is_before(here):
        return None
    known = thread.knowledge.stores
    if any(stream_of(clock) == there.clock and known[clock] > latest(here.start.stores, clock) for clock in known):
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
        stream=second.stream,
        other=first.stream,
        instead=_waited(order, first, second),
    )


def _launch(place: Place) -> str:
    return f"{place.title} on stream `{place.stream}`"


def _waited(order: Any, first: Place, second: Place) -> str:
    """What the second stream has waited for instead."""
    mark = order.waits.get((second.clock, first.clock))
    if mark is None:
        return f"it has waited for no event of stream `{first.stream}`"
    record = f"record {mark.number} of its event" if mark.number > 1 else "an event"
    return f"it has waited for {record}, recorded before {first.title}"
