"""The report of a data race: its cause in one sentence, both accesses, and the signals that were to order them.

Under the sentence stand the lines of code of the two accesses, before anything else: they are what a reader looks for.
"""

from __future__ import annotations

from typing import Any

from ..machine import errors
from ..machine.access import describe_thread
from ..machine.names import name_of
from ..machine.orders import SCOPES
from ..machine.source import describe_site, source_line
from ..models import races
from ..models.host import HostRace
from ..models.knowledge import NOT_YET, Access, Place, distance, latest, stream_of
from .causes import Cause
from .chains import Race
from .race_cause import causes_of_late, find_causes

MAX_LINKS = 4  # of a chain that are shown


def race(fact: races.Race) -> errors.EmulatorError:
    """The error for an access that meets an earlier one, which the thread cannot know of."""
    thread, _, access, earlier = one = Race(*fact)
    error = errors.DataRace("")
    error.causes = (one.cause("unordered", one.cell),)
    with errors.explaining(error):
        if min(access.reach, earlier.reach) >= distance(access.owner, earlier.owner):
            error.causes = (one.cause("mixed sizes", one.cell, had=_bytes_of(earlier), has=_bytes_of(access)),)
        elif not isinstance(thread, races.CheckingThread):
            error.causes = causes_of_late(one)
        else:
            error.causes = find_causes(one)
            missing = stream_cause(one)
            if missing is not None and not any(cause.lines for cause in error.causes):
                error.causes = (missing,)  # else the kernels talk: too weakly
    who = "this thread" if earlier.owner is thread.owner else "another thread"
    who = "a bulk copy" if earlier.order == "bulk" else "the CPU" if earlier.owner.is_cpu else who
    what = f"{access.how} {access.verb} {'to' if access.verb == 'store' else 'of'} {access.end - access.begin} bytes"
    lines = [
        "; and ".join(cause.sentence for cause in error.causes),
        *_describe(earlier, "  "),
        *_describe(access, "  "),
        f"  {what} that {who} has {_done(earlier, is_plain=True)}",
        f"  in {one.cell}",
    ]
    for allocation, store, load in error.causes[-1].lines[-MAX_LINKS:]:
        lines += [f"  signal in {allocation.cell(load.begin)}", *_describe(store, "    "), *_describe(load, "    ")]
    error.args = ("\n".join(lines),)
    error.thread, error.source = thread.describe(), describe_site(access.site)
    return error


def _bytes_of(access: Access) -> str:
    return f"bytes {access.begin}-{access.end - 1}" if access.end - access.begin > 1 else f"byte {access.begin}"


def host_race(fact: HostRace) -> errors.EmulatorError:
    """The error for an access by a host to bytes that a kernel or another host has accessed."""
    allocation, access, earlier, gives_up = fact
    does = "writes" if access.verb == "store" else "polls" if access.reach else "reads"
    who, other = "the CPU", "a thread"
    if earlier.owner.is_cpu:
        who, other = (f"the host of {name_of(one.owner.block_idx)}" for one in (access, earlier))
        why = "the two have not met since, and this one has polled no word that the other one has stored since"
    elif min(access.reach, earlier.reach) == SCOPES["sys"]:
        why = f"the thread's {earlier.verb} has {_bytes_of(earlier)}, the CPU's {access.verb} {_bytes_of(access)}: "
        why += "only accesses of the same bytes are ordered, however strong they are"
    elif access.reach and earlier.reach:
        why = f"scope {earlier.scope} does not reach the CPU: that takes scope sys"
    elif access.reach:
        needed = f"a {earlier.verb} with an order, and scope sys"
        why = f"the CPU {does} these bytes while the kernel runs: that takes {needed}"
    elif earlier.number >= NOT_YET or earlier.at_exit:
        why = "its thread has released nothing since, and the CPU has not waited for the end of the kernel"
    else:
        why = "the CPU has polled nothing that was released with scope sys since, nor waited for an event since"
    host = access.owner.host
    here = f"the CPU, for {name_of(allocation.rank if host is None else host)}"
    if gives_up:
        what = f"{gives_up} `{allocation.name}` of {name_of(allocation.rank)}, where {other} has {_done(earlier)}"
    else:
        what = f"{does} {access.end - access.begin} bytes that {other} has {_done(earlier, is_plain=True)}"
    lines = [
        f"{who} {what}: nothing orders the two",
        *_describe(earlier, "  "),
        *_place(access, "  "),
        f"    {gives_up.removesuffix('s') + 'd' if gives_up else _done(access)} by {here}",
        f"  in {allocation.cell(max(access.begin, earlier.begin))}",
        f"  {why}",
    ]
    error = errors.DataRace("\n".join(lines))
    error.thread, error.source = here, describe_site(access.site)
    return error


def _done(access: Access, is_plain: bool = False) -> str:
    if access.is_atomic and not is_plain:
        return "changed"
    return "stored" if access.verb == "store" else "loaded"


def _describe(access: Access, indent: str) -> list[str]:
    """Where an access is made, by which code, with which order, and by whom."""
    owner = access.owner
    thread = describe_thread(owner.rank, owner.kernel, owner.launch, owner.block_idx, owner.thread_idx)
    how = "by a bulk copy of" if access.order == "bulk" else f"with {access.how} order by"
    by = "by the CPU" if owner.is_cpu else f"{how} {thread}"
    by += f", for {name_of(owner.host)}" if owner.host is not None else ""
    lines = [*_place(access, indent), f"{indent}  {_done(access)} {by}"]
    if access.serving is not None:
        queue_pair, entry = access.serving
        lines.append(f"{indent}  for entry {entry} of queue pair {queue_pair}")
    return lines


def _place(access: Access, indent: str) -> list[str]:
    """The line that accesses, and what stands there."""
    text = source_line(access.site)
    return [f"{indent}at {describe_site(access.site)}", *([f"{indent}    {text}"] if text else [])]


# --- two launches of a rank, or the host and a launch -----------------------------------------------------------------


def stream_cause(race: Race) -> Cause | None:
    """The wait that is missing; None if one launch is before the other, or the kernels talk to each other."""
    thread, _, access, earlier = race
    launch = thread.block.launch
    order: Any = thread.world.order
    if earlier.owner.is_cpu and earlier.reach and (access.reach or earlier.verb == "load"):
        return None  # they are to meet while the kernel runs
    if earlier.owner.is_cpu and latest(launch.known.stores, earlier.owner.clock) < earlier.number:
        does, did = f"{access.verb}s", "reads" if earlier.verb == "load" else "stores"
        words: dict[str, Any] = {"launch": launch.place.title, "does": does, "did": did}
        other = earlier.owner.host
        if other is not None and other != thread.rank:
            words |= {"other": name_of(other), "rank": name_of(thread.rank)}
            return race.cause("hosts", race.cell, **words)
        return race.cause("CPU after the launch", race.cell, **words, stream=launch.place.stream)
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
