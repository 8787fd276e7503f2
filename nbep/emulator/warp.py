"""Warp collectives: threads of a warp converge here and nowhere else.

Each lane named in the mask parks until the last one arrives; that one computes all results and goes on.  Lanes that
arrive with another operation, another line or an overlapping mask stop the run, and so does a lane that leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import errors
from .block import WARP_SIZE, ranges
from .faults import error_at
from .source import Site, describe_site, site_of

if TYPE_CHECKING:
    from .thread import Thread

Finish = Callable[["Collective"], None]


def lanes_of(mask: int) -> list[int]:
    return [lane for lane in range(WARP_SIZE) if mask >> lane & 1]


class Collective:
    """One collective that some lanes have reached: `threads`, `values` and `extras` are in order of arrival."""

    __slots__ = ("name", "mask", "site", "missing", "threads", "values", "extras")

    def __init__(self, name: str, mask: int, site: Site | None):
        self.name = name
        self.mask = mask
        self.site = site
        self.missing = mask
        self.threads: list[Thread] = []
        self.values: dict[int, Any] = {}
        self.extras: list[int] = []


class Warp:
    """The 32 lanes of a warp and the collectives they are waiting in, by mask."""

    __slots__ = ("index", "lanes", "pending")

    def __init__(self, index: int):
        self.index = index
        self.lanes: list[Thread] = []
        self.pending: dict[int, Collective] = {}

    def arrive(
        self, thread: Thread, name: str, mask: int, site: Site | None, value: Any, extra: int, finish: Finish | None
    ) -> bool:
        """Count a lane in.  True: it was the last, all results are there and the others are runnable."""
        collective = self.pending.get(mask)
        lane = thread.lane
        if collective is None:
            self.check_new(thread, name, mask)
            collective = self.pending[mask] = Collective(name, mask, site)
        elif collective.name != name or collective.site != site:
            raise self.divergence(thread, name, collective)
        collective.missing ^= 1 << lane
        collective.threads.append(thread)
        if finish is not None:
            collective.values[lane] = value
            collective.extras.append(extra)
        if collective.missing:
            return False
        del self.pending[mask]
        if finish is not None:
            finish(collective)
        collective.threads.pop()
        thread.runnable.extend(collective.threads)
        return True

    def check_new(self, thread: Thread, name: str, mask: int) -> None:
        """The first lane at a collective: is its mask possible at all?"""
        if not 0 < mask < 1 << WARP_SIZE or not mask >> thread.lane & 1:
            raise error_at(thread, errors.Divergence, f"{name}: mask {mask:#010x} does not name the calling lane")
        if mask >> len(self.lanes):
            absent = ranges(lane for lane in lanes_of(mask) if lane >= len(self.lanes))
            raise error_at(thread, errors.Divergence, f"{name}: the mask names lanes {absent}, which do not exist")
        for other in self.pending.values():
            if other.mask & mask:
                raise self.divergence(thread, f"{name} with mask {mask:#010x}", other)
        gone = [lane for lane in lanes_of(mask) if self.lanes[lane].exited]
        if gone:
            raise error_at(thread, errors.Divergence, f"{name}: lanes {ranges(gone)} of the mask have left the kernel")

    def divergence(self, thread: Thread, name: str, collective: Collective) -> Exception:
        came = ranges(t.lane for t in collective.threads)
        message = (
            f"{name}: the lane is named by the mask {collective.mask:#010x} of another collective:\n"
            f"  lanes {came} are at {collective.name}, {describe_site(collective.site)}"
        )
        absent = [self.lanes[n] for n in lanes_of(collective.missing) if self.lanes[n] is not thread]
        if absent:
            message += "\n" + whereabouts(absent)
        return error_at(thread, errors.Divergence, message)

    def lane_left(self, thread: Thread) -> None:
        """A lane has returned from the kernel while others of its warp are inside a collective."""
        for collective in self.pending.values():
            if collective.missing >> thread.lane & 1:
                came = ranges(t.lane for t in collective.threads)
                first = collective.threads[0]
                raise errors.Divergence(
                    f"{collective.name} with mask {collective.mask:#010x}: lanes {came} came, "
                    f"lane {thread.lane} has left the kernel",
                    first.describe(),
                    describe_site(collective.site),
                )


def whereabouts(threads: list[Thread]) -> str:
    """One line for each place where some of `threads` are."""
    places: dict[str, list[int]] = {}
    for thread in threads:
        places.setdefault(place(thread), []).append(thread.lane)
    return "\n".join(f"  lanes {ranges(lanes)} {where}" for where, lanes in places.items())


def place(thread: Thread) -> str:
    """Where a thread is that does not run now."""
    if thread.exited:
        return "have left the kernel"
    if thread.gr_frame is None:
        return "have not started"
    return f"are at {describe_site(site_of(thread.gr_frame))}"


def finish_shfl(mode: str) -> Finish:
    """Hand every lane the value of the lane it asked for; out of range: its own."""

    def finish(collective: Collective) -> None:
        values = collective.values
        for thread, extra in zip(collective.threads, collective.extras, strict=True):
            lane = thread.lane
            if mode == "idx":
                source = extra & (WARP_SIZE - 1)
            elif mode == "xor":
                source = lane ^ extra
            else:
                source = lane - extra if mode == "up" else lane + extra
            if not 0 <= source < WARP_SIZE:
                source = lane
            if source not in values:
                raise error_at(
                    thread,
                    errors.Divergence,
                    f"shfl.{mode}: lane {lane} reads lane {source}, which mask {collective.mask:#010x} does not name",
                )
            thread.result = values[source]

    return finish


def _finish_any(collective: Collective) -> None:
    result = any(collective.values.values())
    for thread in collective.threads:
        thread.result = result


def _finish_all(collective: Collective) -> None:
    result = all(collective.values.values())
    for thread in collective.threads:
        thread.result = result


def _finish_ballot(collective: Collective) -> None:
    result = sum(1 << lane for lane, predicate in collective.values.items() if predicate)
    for thread in collective.threads:
        thread.result = result


def finish_match(collective: Collective) -> None:
    """Hand every lane the mask of the lanes that hold the same value."""
    masks: dict[Any, int] = {}
    for lane, value in collective.values.items():
        masks[value] = masks.get(value, 0) | 1 << lane
    for thread in collective.threads:
        thread.result = masks[collective.values[thread.lane]]


SHFL: dict[str, Finish] = {mode: finish_shfl(mode) for mode in ("idx", "xor", "up", "down")}
VOTE: dict[str, Finish] = {"any": _finish_any, "all": _finish_all, "ballot": _finish_ballot}
