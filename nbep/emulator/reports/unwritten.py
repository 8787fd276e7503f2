"""A load of bytes that were never written: whether somebody writes them a moment later, so that an order is missing.

The run is over then. The other threads go on for a moment, one primitive at a time, to see who would have stored there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..machine.errors import Uninitialized
from ..machine.faults import Hole
from ..machine.names import name_of
from ..machine.source import Site, describe_site, source_line
from ..tracing import SILENT
from .chains import signals_seen

if TYPE_CHECKING:
    from ..machine.thread import Thread
    from ..models.history import Event
    from ..run import Run

MOST_STEPS = 20_000
NOT_RESET = "its reset is missing, or comes too late"
OPERATION_RATE = 0.1  # of those steps, if a copy or a start of a kernel is under way


class Writer(NamedTuple):
    """Who stores them; thread is None for what was under way: a bulk copy, or a store of `delayed`."""

    thread: Thread | None
    site: Site | None = None


def tell_who_writes(error: Uninitialized, world: Run) -> None:
    """Add to the error's first line that an order is missing, if that is the cause, and who stores the bytes.

    What the other threads do is lost: the run is not to be looked at afterwards.
    """
    hole = error.hole
    if hole is None or world.spans_processes or hole.allocation.freed:
        return
    writer = _on_its_way(hole)
    promise = ""
    if writer is None and not _is_there(hole):
        so_far = world.history.between(0, world.history.now)
        writer = _who_writes(hole, world)
        promise = _promise(hole, writer, so_far)
        if writer is None:
            _add(error, _not_launched(hole, world) or promise)
            return
    by: list[str] = []
    if writer is None:
        what = "it has been stored, but nothing makes this thread see that store"
    elif writer.thread is None:
        what = "a copy or a store under way is about to write it, and nothing makes this load wait for that"
    else:
        what = f"{_who(hole.thread, writer.thread)} stores it, and nothing makes this load wait for that"
        by = [f"    stored by {writer.thread.describe()}", f"      at {describe_site(writer.site)}"]
        by += [f"        {text}"] if (text := source_line(writer.site)) else []
    is_near = writer is not None and writer.thread is not None and writer.thread.block is hole.thread.block
    if hole.polls and not is_near and writer is not None and writer.thread is not None:
        who = _who(hole.thread, writer.thread)
        _add(error, f"{who} stores it, but this load comes first: {NOT_RESET}", by)
        return
    _add(error, "; ".join(filter(None, (f"{what}: {_missing(hole, writer)}", promise))), by)


def _add(error: Uninitialized, what: str, by: Sequence[str] = ()) -> None:
    """Say something more in the error's first line, and behind the line that names the cell."""
    first, *rest = str(error).splitlines()
    end = next((i for i, line in enumerate(rest) if not line.startswith("  in ")), len(rest))
    error.args = ("\n".join([f"{first}; {what}" if what else first, *rest[:end], *by, *rest[end:]]),)


def _not_launched(hole: Hole, world: Run) -> str:
    """Of ranks that have not launched this kernel as often: what they will do is not known."""
    launch = hole.thread.block.launch
    late = [rank for rank in range(world.num_ranks) if world.num_launches[rank, launch.name] < launch.number]
    if hole.allocation is hole.thread.shared or hole.allocation.is_hidden or not late:
        return ""
    who, has = (f"rank {late[0]}", "has") if len(late) == 1 else (f"ranks {', '.join(map(str, late))}", "have")
    what = f"{who} {has} not launched this kernel yet"
    if hole.polls:
        return f"{what}, but this load comes first: {NOT_RESET}"
    return f"{what}: if that launch is to store the bytes, nothing makes this load wait for it"


def _who(reader: Thread, writer: Thread) -> str:
    if writer.block is reader.block:
        return "another thread of its block"
    if writer.rank != reader.rank:
        return f"rank {writer.rank}"
    return "another block of its rank" if writer.block.launch is reader.block.launch else "another kernel of its rank"


def _missing(hole: Hole, writer: Writer | None) -> str:
    """What may be left out."""
    if writer is not None and writer.thread is not None and writer.thread.block is hole.thread.block:
        meeting = "syncwarp" if writer.thread.warp_state is hole.thread.warp_state else "barrier"
        return f"a {meeting} or a wait is missing, or comes too late"
    return "a wait is missing, or the signal that it polls is too weak or stored too early"


def _promise(hole: Hole, writer: Writer | None, so_far: list[Event]) -> str:
    """The cell of the last signal from another block before the bytes were stored; known under `checked` alone."""
    owner = getattr(hole.thread, "owner", None)
    if owner is None or hole.polls or hole.allocation is hole.thread.shared:
        return ""
    signaler = None if writer is None or writer.thread is None else getattr(writer.thread, "owner", None)
    if signaler is not None and signaler.block == owner.block:
        return ""
    links = (link for link in signals_seen(so_far, owner, signaler) if link.load.owner.block == owner.block)
    link = next(links, None)
    if link is None:
        return ""
    cell, who = link.allocation.cell(link.store.begin), name_of(link.store.owner.rank)
    return f"the last signal that let this thread go on is {cell}, stored by {who} before: it may announce too much"


def _is_there(hole: Hole) -> bool:
    return not hole.allocation.freed and hole.allocation.first_unwritten(hole.offset, hole.nbytes) < 0


def _on_its_way(hole: Hole) -> Writer | None:
    """Who has stored there, if that is not in memory yet; see `delayed`."""
    for granule in range(hole.offset >> 4, (hole.offset + hole.nbytes + 15) >> 4):
        for store in hole.allocation.pending.get(granule, ()):
            if store.offset < hole.offset + hole.nbytes and hole.offset < store.offset + len(store.data):
                if store.thread is not hole.thread:
                    return Writer(store.thread, store.site)
    return None


def _who_writes(hole: Hole, world: Run) -> Writer | None:
    """Let all threads go on, until one has stored the bytes."""
    world.hooks = None if world.hooks is None else SILENT
    for thread, site in world.single_steps(MOST_STEPS, OPERATION_RATE):
        if _is_there(hole) or (thread is not None and _on_its_way(hole)):
            return Writer(thread, site)
        if hole.allocation.freed:
            return None
    return None
