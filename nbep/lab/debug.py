"""For a debugger at a stop in an emulated run: where everybody is, what an address is, what happened to a cell.

    (Pdb) nbep.debug.where()                     all threads, a group for each place
    (Pdb) nbep.debug.what(tail)                  the cell at an address: whose, what it holds, who stored, who polls
    (Pdb) nbep.debug.history("tail[channel 0")   its stores, in order; takes spawn(..., tracer=nbep.debug.History())

They work where `breakpoint()` stops in a kernel or in a rank's host function. A kernel with `breakpoint()` in it runs
on the emulator alone. Nothing is slower for them, but a run with a History is.
"""

from __future__ import annotations

import sys
from collections import deque
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from nbep.emulator import Allocation, EmulatorError, Thread, World, current_thread
from nbep.emulator.machine.kinds import KINDS
from nbep.emulator.machine.memory import OFFSET_BITS, OFFSET_MASK
from nbep.emulator.machine.names import name_of
from nbep.emulator.machine.source import Site, describe_site, site_of
from nbep.emulator.reports.waiting import last_writer, waiting_groups, warps_and_lanes, who
from nbep.emulator.schedule.scheduler import running_host
from nbep.emulator.tracing import Atomic
from nbep.host.target.checked_arrays import unwritten_rows
from nbep.host.target.cpu_arrays import CpuTensors
from nbep.registry import registered

__all__ = ["History", "history", "unwritten", "what", "where"]


class Text(str):
    """A string that a debugger and a notebook show as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Change(NamedTuple):
    """A store to some bytes of an allocation."""

    step: int
    begin: int
    end: int
    what: str
    value: Any
    block: str
    thread: int
    site: Site | None

    def __str__(self) -> str:
        by = f"{self.block}, {warps_and_lanes([self.thread])}"
        return f"step {self.step}: {self.what} {self.value}, by {by}, at {describe_site(self.site)}"


class History:
    """A tracer that remembers the last stores to each cell. `other`: a tracer that gets every event too.

    history = nbep.debug.History()
    nbep.spawn(main, 2, "emulator", tracer=history)
    history.of("tail[channel 0, src 1]")            also when the run has failed
    """

    def __init__(self, other: Any = None, most: int = 32):
        self._other = other
        self._most = most
        self._changes: dict[Allocation, dict[int, deque[Change]]] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_") and self._other is not None:
            return getattr(self._other, name)
        raise AttributeError(name)

    def on_store(self, thread: Thread, allocation: Any, offset: int, kind: str, value: Any, *order: str) -> None:
        self._tell("on_store", thread, allocation, offset, kind, value, *order)
        self._note(thread, allocation, offset, KINDS[kind].size, ".".join(order) + " store of", value)

    def on_atomic(self, thread: Thread, allocation: Any, offset: int, atomic: Atomic, *order: str) -> None:
        self._tell("on_atomic", thread, allocation, offset, atomic, *order)
        kind = atomic.kind
        what = f"{'.'.join(order)} atomic {atomic.op} {atomic.operand}: {atomic.old} becomes"
        self._note(thread, allocation, offset, KINDS[kind].size, what, allocation.read(offset, kind))

    def on_copy(self, thread: Thread, allocation: Any, offset: int, data: bytes, site: Site | None) -> None:
        self._tell("on_copy", thread, allocation, offset, data, site)
        self._note(thread, allocation, offset, len(data), "bulk copy of", f"{len(data)} bytes")

    def _tell(self, name: str, *args: Any) -> None:
        if self._other is not None and hasattr(self._other, name):
            getattr(self._other, name)(*args)

    def _note(self, thread: Thread, allocation: Any, offset: int, size: int, what: str, value: Any) -> None:
        site = site_of(sys._getframe(2))
        change = Change(
            thread.world.step, offset, offset + size, what, value, thread.block.name, thread.thread_idx, site
        )
        cells = self._changes.setdefault(allocation, {})
        cells.setdefault(offset, deque(maxlen=self._most)).append(change)

    def of(self, cell: int | str, rank: int | None = None) -> Text:
        """The stores to a cell, in order. cell: how its name begins, or its address as `rank` sees it."""
        if isinstance(cell, int):
            allocation, offset = _locate(cell, rank)
            return self._lines([(allocation, offset)])
        found = [
            (allocation, offset)
            for allocation, cells in self._changes.items()
            for offset in sorted(cells)
            if not allocation.freed and _matches(allocation, offset, cell) and rank in (None, allocation.rank)
        ]
        return self._lines(found) if found else Text(f"no store to a cell whose name begins with {cell!r}")

    def _lines(self, cells: list[tuple[Any, int]]) -> Text:
        lines = []
        for allocation, offset in cells:
            lines.append(allocation.cell(offset))
            changes = [c for there in self._changes.get(allocation, {}).values() for c in there]
            touching = sorted((c for c in changes if c.begin <= offset < c.end), key=lambda c: c.step)
            lines += [f"  {change}" for change in touching[-self._most :]] or ["  no store so far"]
        return Text("\n".join(lines))


def __getattr__(name: str) -> Any:
    """What is registered for this module, as `save_call`."""
    for tools in registered("debug"):
        if name in tools:
            return tools[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def unwritten(array: Any) -> np.ndarray:
    """Which rows of an array that a call has returned no kernel has written: bool, without the last dimension.

    On the emulator alone, in every memory model; of an array of one dimension which elements. Rows past those that
    came are unwritten, and all of them before the event or the hook of the call.

    Args:
        array: of NumPy, or a tensor of torch on the CPU
    """
    return unwritten_rows(array if isinstance(array, np.ndarray) else CpuTensors.view(array))


def where(rank: int | None = None, kernel: str | None = None) -> Text:
    """Where every thread is: a group for each place, and what it waits for. After a failed run: its error."""
    world = _world()
    if world.failure is not None:
        return Text(getattr(world.failure, "full", str(world.failure)))
    thread = current_thread()
    lines = []
    for group in waiting_groups(world, (thread, _kernel_frame()) if isinstance(thread, Thread) else (None, None)):
        if rank in (None, group.rank) and kernel in (None, group.launch.name):
            lines.append(f"{name_of(group.rank)}, kernel `{group.launch.name}`, {who(group.threads)}")
            if group.chain:
                lines.append("  at " + ", called from ".join(map(describe_site, group.chain)))
            lines += [f"  {line}" for line in group.wait.body]
    for host in world.hosts:
        if rank in (None, host.rank):
            lines.append(f"the host of rank {host.rank} {_host_state(host)}")
    return Text("\n".join(lines) or "no kernel runs")


def what(address: int, rank: int | None = None) -> Text:
    """What an address is: whose memory, which cell, what it holds, who stored there, who polls it.

    Args:
        rank: who sees it so; without it, the one that runs
    """
    try:
        allocation, offset = _locate(address, rank)
    except LookupError as error:
        return Text(str(error))
    lines = [f"{address:#x} is {allocation.cell(offset)}, of {allocation.nbytes - allocation.lowest} bytes"]
    if not allocation.lowest <= offset < allocation.nbytes:
        return Text(f"{lines[0]}: out of bounds")
    values = []
    for kind in ("s32", "s64"):
        size = KINDS[kind].size
        if offset % size == 0 and offset + size <= allocation.nbytes:
            unwritten = allocation.first_unwritten(offset, size) >= 0
            values.append(f"{kind} never written" if unwritten else f"{kind} {allocation.read(offset, kind)}")
    lines += [f"  holds {', '.join(values)}"] if values else []
    lines.append(f"  {last_writer(allocation, offset)}")
    for thread in allocation.watchers.get(offset >> 3, ()):
        cells = [cell for cell in thread.waits_for if getattr(cell[0], "identity", None) is allocation.identity]
        seen = [f"sees {value}" for _, at, _, value in cells if at == offset]
        lines += [f"  polled by {thread.describe()}, {text}" for text in seen]
    return Text("\n".join(lines))


def history(cell: int | str, rank: int | None = None) -> Text:
    """The last stores to a cell, in order: an address, or how the cell's name begins. It takes a History as tracer."""
    world = _world()
    if isinstance(world.tracer, History):
        return world.tracer.of(cell, rank)
    hint = "only the last store is known: for all of them, spawn(..., tracer=nbep.debug.History())"
    cells = [_locate(cell, rank)] if isinstance(cell, int) else _named(world, cell, rank)
    lines = [f"{allocation.cell(offset)}\n  {last_writer(allocation, offset)}" for allocation, offset in cells]
    return Text("\n".join([*lines, hint]))


def _named(world: World, name: str, rank: int | None) -> list[tuple[Allocation, int]]:
    """Cells that were stored to, by the beginning of their names."""
    own = [a for space in world.spaces.values() for a in space.segments.values() if a.rank == space.rank]
    found = [(a, offset) for a in own for offset in sorted(a.writers) if _matches(a, offset, name)]
    return [(a, offset) for a, offset in found if rank in (None, a.rank)]


def _matches(allocation: Any, offset: int, name: str) -> bool:
    return allocation.describe is not None and allocation.describe(offset).startswith(name)


def _world() -> World:
    """The world that runs, or else the latest."""
    current = current_thread()
    world = current.world if isinstance(current, Thread) else World.latest()
    if not isinstance(world, World):
        raise EmulatorError("no emulated run: these words work where a run on the emulator has been stopped")
    world.show_threads()
    return world


def _locate(address: int, rank: int | None) -> tuple[Allocation, int]:
    """The allocation and the offset that an address means to a rank.

    Raises:
        LookupError: if it means nothing
    """
    world, current = _world(), current_thread()
    number, offset = address >> OFFSET_BITS, address & OFFSET_MASK
    if number == 0:
        if isinstance(current, Thread) and rank in (None, current.rank):
            return current.shared, offset
        raise LookupError(f"{address:#x} is an address in the shared memory of a block: ask from a thread of it")
    if rank is not None and rank not in world.spaces:
        raise LookupError(f"rank: got {rank}; the run has {', '.join(map(name_of, world.spaces))}")
    spaces = world.spaces if rank is None else {rank: world.spaces[rank]}
    for space in spaces.values():  # no two ranks share a segment's number
        if number in space.segments:
            return space.segments[number], offset
        if number in space.retired:
            raise LookupError(f"{address:#x} was in {space.retired[number]}, which is freed or closed")
    raise LookupError(f"{address:#x} is no address of any rank")


def _kernel_frame() -> FrameType | None:
    """The innermost frame outside of this module and of a debugger."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_globals is globals()
        or frame.f_globals.get("__name__") in ("bdb", "pdb", "cmd", "code", "codeop")
        or frame.f_code.co_filename.startswith("<stdin>")
    ):
        frame = frame.f_back
    return frame


def _host_state(host: Any) -> str:
    if host.finished:
        return "has returned"
    if host.predicate is not None and host in _world().waiting_hosts:
        return f"waits for {host.waits_for() if callable(host.waits_for) else host.waits_for}"
    return "is here" if host is running_host() else "runs"
