"""Warp collectives: threads of a warp converge here and nowhere else.

Each lane named in the mask parks until the last one arrives.  Lanes that arrive with another operation or another line
stop the run, and so does a lane that leaves, or that waits for one which waits for it with another mask.

Lanes that poll, each its own cell, may meet here in every turn of their loop. When one comes with news, those that are
parked at theirs come too, once: if nothing has changed for them either, they park again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors
from .block import WARP_SIZE
from .faults import Diverged, LaneLeft, error_at
from .names import ranges, who_have
from .source import Site, is_same_call

if TYPE_CHECKING:
    from .thread import Thread


def lanes_of(mask: int) -> list[int]:
    return [lane for lane in range(WARP_SIZE) if mask >> lane & 1]


class Collective:
    """One collective that some lanes have reached: what they pass, by lane, and who they are, in order of arrival."""

    __slots__ = (
        "name", "mask", "site", "missing", "threads", "values", "result", "knowledge", "signals", "known", "brought",
        "clock",
    )  # fmt: skip

    def __init__(self, name: str, mask: int, site: Site | None):
        self.name = name
        self.mask = mask
        self.site = site
        self.missing = mask
        self.threads: list[Thread] = []
        self.values: dict[int, Any] = {}
        self.result: Any = None  # computed by the first lane that goes on
        # For `checked`: what the lanes know and have signalled, and what all know then.
        self.knowledge: list[Any] = []
        self.signals: dict[int, int] = {}
        self.known: Any = None
        self.clock: Any = {}  # of the lanes that have come; see `every`
        self.brought: int | None = None  # once a lane has come with news: the lanes that it has brought here


class Warp:
    """The 32 lanes of a warp and the collectives they are waiting in, by mask."""

    __slots__ = ("index", "reluctance", "lanes", "pending")

    def __init__(self, index: int, reluctance: float):
        self.index = index
        self.reluctance = reluctance
        self.lanes: list[Thread] = []
        self.pending: dict[int, Collective] = {}

    def collective(self, thread: Thread, name: str, mask: int, site: Site | None) -> Collective:
        """The one to which a lane comes, unless it may not: a new one, or one at which others wait."""
        collective = self.pending.get(mask)
        if collective is None:
            self.check_new(thread, name, mask)
            collective = self.pending[mask] = Collective(name, mask, site)
            if thread.block.launch.by_ptx:
                collective.missing &= ~sum(1 << lane.lane for lane in self.lanes if lane.exited)
        elif collective.name != name or not (
            collective.site == site or thread.block.launch.by_ptx or is_same_call(collective.site, site)
        ):
            raise thread.world.error_of(Diverged(thread, name, collective))
        if len(self.pending) > 1:
            self.check_others(thread, collective)
        return collective

    def bring(self, collective: Collective) -> None:
        """Wake the lanes that a collective misses and that are parked at a cell."""
        collective.brought = collective.brought or 0
        for lane in lanes_of(collective.missing & ~collective.brought):
            thread = self.lanes[lane]
            if thread in thread.world.polling:
                collective.brought |= 1 << lane
                thread.has_news = False
                thread.unwatch()

    def is_missed(self, thread: Thread) -> bool:
        """Whether a lane that is about to park is to come to a collective first."""
        for collective in self.pending.values():
            if collective.brought is not None and (collective.missing & ~collective.brought) >> thread.lane & 1:
                collective.brought |= 1 << thread.lane
                return True
        return False

    def check_new(self, thread: Thread, name: str, mask: int) -> None:
        """The first lane at a collective: is its mask possible at all?"""
        if not 0 < mask < 1 << WARP_SIZE or not mask >> thread.lane & 1:
            raise error_at(thread, errors.Divergence, f"{name}: mask {mask:#010x} does not name the calling lane")
        if mask >> len(self.lanes):
            absent = ranges(lane for lane in lanes_of(mask) if lane >= len(self.lanes))
            raise error_at(thread, errors.Divergence, f"{name}: the mask names lanes {absent}, which do not exist")
        if thread.block.live == thread.block_dim:
            return
        gone = [lane for lane in lanes_of(mask) if self.lanes[lane].exited]
        if gone and not thread.block.launch.by_ptx:
            message = f"{name} with mask {mask:#010x}: {who_have('lane', gone)} left the kernel"
            raise error_at(thread, errors.Divergence, message)

    def check_others(self, thread: Thread, collective: Collective) -> None:
        """A lane comes to one of several collectives: does it wait for lanes that wait for it?"""
        for other in self.pending.values():
            if other is not collective and other.missing >> thread.lane & 1:
                if other.mask & ~other.missing & collective.missing:
                    name = f"{collective.name} with mask {collective.mask:#010x}"
                    raise thread.world.error_of(Diverged(thread, name, other))

    def lane_left(self, thread: Thread) -> None:
        """A lane has returned from the kernel while others of its warp are inside a collective."""
        for collective in list(self.pending.values()):
            if collective.missing >> thread.lane & 1:
                if not thread.block.launch.by_ptx:
                    raise thread.world.error_of(LaneLeft(thread, collective))
                collective.missing ^= 1 << thread.lane
                if not collective.missing:
                    del self.pending[collective.mask]
                    thread.runnable.extend(collective.threads)


def shfl_source(mode: str, lane: int, lane_or_delta: int) -> int:
    """The lane that `lane` reads; out of range: itself."""
    if mode == "idx":
        return lane_or_delta & (WARP_SIZE - 1)
    if mode == "xor":
        source = lane ^ lane_or_delta
    elif mode == "up":
        source = lane - lane_or_delta
    else:
        source = lane + lane_or_delta
    return source if 0 <= source < WARP_SIZE else lane


def vote_result(mode: str, values: dict[int, Any]) -> Any:
    """any, all: a bool; ballot: the mask of the lanes whose value is true."""
    if mode == "any":
        return any(values.values())
    if mode == "all":
        return all(values.values())
    return sum(1 << lane for lane, predicate in values.items() if predicate)


def match_result(values: dict[int, Any]) -> dict[Any, int]:
    """value -> the mask of the lanes that pass it."""
    masks: dict[Any, int] = {}
    for lane, value in values.items():
        masks[value] = masks.get(value, 0) | 1 << lane
    return masks
