"""Threads of a block that still wait in a place which another one has left: a hint that they were to meet there."""

from __future__ import annotations

import dis
import sys
from types import CodeType
from typing import TYPE_CHECKING

from ..machine.source import Site, call_chain, describe_site, polling
from .causes import Cause

if TYPE_CHECKING:
    from ..machine.block import Block
    from ..machine.thread import Thread
    from ..models.knowledge import Owner
    from ..run import Run

LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD"}
MOST_CALLS = 32


def block_of(world: Run, owner: Owner) -> Block | None:
    """The block of a thread that has accessed something; None if its launch is over."""
    for launch in world.launches:
        if (launch.rank, launch.name, launch.number) == (owner.rank, owner.kernel, owner.launch):
            return launch.blocks[owner.block_idx]
    return None


def who_is_behind(world: Run, owner: Owner, only_waiting: bool = False) -> Cause | None:
    """A thread of the same block that still waits at the place which this thread has left.

    One that does not wait yet counts if it is on its way there: what it comes to is named `wait_...`.
    only_waiting: it does not count; this thread has waited itself
    """
    block = block_of(world, owner)
    if block is None:
        return None
    here = block.threads[owner.thread_idx]
    own = _places(here)
    found = [
        (waits, depth, mate.warp == here.warp, -mate.thread_idx)
        for mate in block.threads
        if (depth := _common_calls(places := _places(mate), own))
        and ((waits := _waits(mate, places[depth:])) or (not only_waiting and _will_wait(places, own, depth)))
    ]
    if not found:
        return None
    waits, *_, number = max(found)
    mate, words = block.threads[-number], {"thread": -number}
    site = _places(mate)[-1]
    if not waits:
        return Cause("behind, on its way", words={**words, "site": describe_site(site)})
    if mate not in world.polling or not mate.waits_for:
        return Cause("behind, waits", words={**words, "function": site[0].co_name})
    allocation, offset, *_ = mate.waits_for[-1]  # those before it may have been met on the way to the loop
    return Cause("behind, polls", (allocation.cell(offset),), words=words)


def _places(thread: Thread) -> list[Site]:
    """The calls that a thread is in, the kernel's first."""
    frame = sys._getframe() if thread is thread.world.current else thread.gr_frame
    return [] if thread.exited else call_chain(frame, MOST_CALLS)[::-1]


def _common_calls(places: list[Site], further: list[Site]) -> int:
    """How many calls a thread has in common with another one that is further; 0 if that is not further."""
    depth = next((i for i, (a, b) in enumerate(zip(places, further, strict=False)) if a != b), None)
    if depth is None or places[depth][0] is not further[depth][0] or places[depth][1] > further[depth][1]:
        return 0
    return depth + 1


def _waits(thread: Thread, inner: list[Site]) -> bool:
    """Whether a thread polls; inner: the calls in which it may do so."""
    return thread in thread.world.polling or any(not polling.isdisjoint(code.co_names) for code, _ in inner)


def _will_wait(places: list[Site], further: list[Site], depth: int) -> bool:
    """Whether a thread is in a call that waits, or has one to come before it is as far as the other one."""
    code, begin = places[depth - 1]
    names = _loaded(code, begin, further[depth - 1][1])
    for inner, at in places[depth:]:
        names |= _loaded(inner, at, len(inner.co_code))  # what it has called there before is past
    return any(name.startswith("wait_") for name in names)


def _loaded(code: CodeType, begin: int, end: int) -> set[str]:
    """The names of functions and values of others that code uses between two of its instructions."""
    return {str(i.argval) for i in dis.get_instructions(code) if i.opname in LOADS and begin < i.offset < end}
