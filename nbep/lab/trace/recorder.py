"""The tracer: what the emulator's hooks report, reduced to events at cells that have names.

 emulator --on_launch, on_load, on_store, on_atomic, on_copy, on_park, on_wake--> Trace --> events --> pictures, tables

Recorded are all stores and atomics of more than weak order, and weak stores to cells that their allocation names; of
tokens the first bytes, see `view.is_recorded`. Loads are recorded when they poll and see a value for the first time.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from nbep.emulator import DeadlockError, current_thread
from nbep.emulator.machine.block import NamedBarrier
from nbep.emulator.machine.bulk import MBarrier
from nbep.emulator.machine.orders import POLLED
from nbep.emulator.machine.source import Site, call_chain, raising_chain, site_of
from nbep.emulator.machine.warp import Collective
from nbep.emulator.tracing import Atomic
from nbep.lab.trace.events import Cell, Event, Launch, Line
from nbep.lab.trace.view import LaunchView, is_described, is_recorded, views

Warp = tuple[int, str, int, int, int]  # rank, kernel, call, block, warp
FIRST_BYTES = 16  # of a row: see Event.first
ATOMICS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, operand: old + operand,
    "exch": lambda old, operand: operand,
    "max": max,
    "min": min,
}


class _Call:
    """What is remembered of a running launch: its place in `Recorder.launches`, its number, cells and values seen."""

    __slots__ = "cells", "index", "number", "seen", "view"

    def __init__(self, index: int, number: int, view: LaunchView):
        self.index = index
        self.number = number
        self.view = view
        self.cells: dict[tuple[Any, int, bool], Cell | None] = {}
        self.seen: dict[tuple[int, int, Cell], Any] = {}


class Recorder:
    """The hooks; pass it as `tracer=`. One recorder records one run.

    Attributes: launches: a `Launch` for each kernel launch, in order of their begin; error: what has stopped the run
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.error: BaseException | None = None
        self._world: Any = None
        self._events: list[Event] = []
        self._calls: dict[Any, _Call] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._views = [view.begin() for view in views()]
        self._parked: dict[Any, Event] = {}
        self._polled: dict[Any, list[Any]] = {}
        self._acted: dict[Any, int] = {}  # when a warp last stored something
        self._woken: dict[Any, Event] = {}  # waits that may go on, for the same value
        self._meetings: dict[Any, dict[Site | None, int]] = {}  # where a thread came to a barrier, the last one last
        self._versions: Counter[Cell] = Counter()  # how often a cell was stored to
        self._lines: dict[Site, Line] = {}
        self._left: defaultdict[Warp, list[int]] = defaultdict(list)
        self._end = 0  # the step at which an error has stopped the run

    def events(
        self,
        what: str | Iterable[str] | None = None,
        *,
        cell: str | None = None,
        rank: int | None = None,
        kernel: str | None = None,
    ) -> list[Event]:
        """Events in the order of their steps.

        Args:
            what: "store", "fill", "atomic", "see", "wait" or "finding", or several of them
            cell: how the cell's name begins: "tail", "tail[channel 0", "barrier_signal"
            rank, kernel: of the thread
        """
        kinds = None if what is None else {what} if isinstance(what, str) else set(what)
        chosen = [
            event
            for event in (*self._events, *self._woken.values(), *self._parked.values())
            if (kinds is None or event.what in kinds)
            and (cell is None or event.cell.text.startswith(cell))
            and (rank is None or event.rank == rank)
            and (kernel is None or event.kernel == kernel)
        ]
        return sorted(chosen, key=lambda event: event.step)

    def exits(self) -> dict[Warp, int]:
        """When the last thread of a warp has left: by rank, kernel, call, block and warp; only warps that are gone."""
        blocks = {(each.rank, each.kernel, each.call): each.block for each in self.launches}
        sizes = {warp: min(blocks[warp[:3]] - 32 * warp[4], 32) for warp in self._left}
        return {warp: steps[-1] for warp, steps in self._left.items() if len(steps) % sizes[warp] == 0}

    def hangs(self) -> list[Event]:
        """Threads that stand at a barrier or a collective that nothing completes any more.

        The name of the cell says what they wait for; `value` is how many threads have come.
        """
        hangs = []
        for thread, meetings in self._meetings.items():
            site, step = list(meetings.items())[-1]
            call = self._calls.get(thread.block.launch)
            what = thread.waits_for
            if call is None or thread.block.launch.is_service:
                continue
            if isinstance(what, NamedBarrier) and not what.is_full:
                text, count = f"barrier[{what.number}] of {what.expected} threads", len(what.arrived)
            elif isinstance(what, Collective) and what.missing:
                text, count = f"{what.name}[mask {what.mask:#010x}]", len(what.values)
            else:
                continue
            cell = Cell(thread.rank, text, text.partition("[")[0])
            event = self._event("hang", thread, call, cell, count, "")
            hangs.append(event._replace(step=step, at=() if site is None else (self._line(site),)))
        return sorted(hangs, key=lambda event: (event.step, event.rank, event.block, event.thread))

    @property
    def num_ranks(self) -> int:
        return 0 if self._world is None else self._world.num_ranks

    @property
    def last_step(self) -> int:
        """Steps of the run so far."""
        return 0 if self._world is None else max(self._world.calls, self._end)

    # --- hooks ----------------------------------------------------------------------------------------------------

    def on_launch(self, launch: Any) -> None:
        if self._world is None:
            self._world = launch.world
        elif self._world is not launch.world:
            raise ValueError("tracer: got a trace that holds another run; make a new one for each")
        key = (launch.rank, launch.name)
        number = self._numbers[key] = self._numbers.get(key, -1) + 1
        found = (begin(launch) for begin in self._views)
        view = next((view for view in found if view is not None), None) or LaunchView()
        number = number if view.number is None else view.number
        index = len(self.launches)
        self._calls[launch] = _Call(index, number, view)
        begin, size = self._step(), (launch.grid, launch.block)
        self.launches.append(
            Launch(launch.rank, launch.name, number, begin, None, *size, view.half, view.phases, view.notes)
        )

        def done() -> None:
            del self._calls[launch]
            self.launches[index] = self.launches[index]._replace(end=self._step())

        launch.callbacks.append(done)

    def on_load(self, thread: Any, allocation: Any, offset: int, kind: str, value: Any, order: str, scope: str) -> None:
        if order not in POLLED:
            return
        call = self._calls[thread.block.launch]
        cell = self._cell(call, thread, allocation, offset)
        if cell is None:
            return
        key, seen = (thread.block_idx, thread.thread_idx, cell), (value, self._versions[cell])
        if call.seen.get(key) != seen:
            call.seen[key] = seen
            self._record("see", thread, call, cell, value, order)

    def on_store(
        self, thread: Any, allocation: Any, offset: int, kind: str, value: Any, order: str, scope: str
    ) -> None:
        call = self._calls[thread.block.launch]
        if order == "weak" and not call.view.has_cells(allocation):
            return
        cell = self._cell(call, thread, allocation, offset, order == "weak")
        if cell is None:
            return
        if max(cell.slot, cell.row) >= 0:
            self._record("fill", thread, call, cell, max(cell.slot, cell.row), order)
        else:
            self._versions[cell] += 1
            self._record("store", thread, call, cell, value, order)

    def on_copy(self, thread: Any, allocation: Any, offset: int, data: bytes, site: Site | None) -> None:
        """A bulk copy fills a slot or a row when it is done; it has no order of its own."""
        call = self._calls[thread.block.launch]
        if not call.view.has_cells(allocation):
            return
        cell = self._cell(call, thread, allocation, offset)
        token, header = None, call.view.header_bytes
        if cell is None and 0 < header < len(data) and allocation.describe is not None:
            cell = self._cell(call, thread, allocation, offset + header)
            if cell is not None:
                token = call.view.token(cell, data)
                data = data[header:]
        elif cell is not None and header == 0:
            token = call.view.token(cell, data)
        if cell is not None and max(cell.slot, cell.row) >= 0:
            event = self._event("fill", thread, call, cell, max(cell.slot, cell.row), "")
            at = () if site is None else (self._line(site),)
            self._events.append(event._replace(token=token, first=bytes(data[:FIRST_BYTES]), at=at))

    def on_atomic(self, thread: Any, allocation: Any, offset: int, atomic: Atomic, order: str, scope: str) -> None:
        call = self._calls[thread.block.launch]
        cell, is_known = self._cell(call, thread, allocation, offset), atomic.op in ATOMICS
        if cell is not None and (is_known or allocation.read(offset, atomic.kind) != atomic.old):
            # What another one leaves is what the cell holds.
            value = ATOMICS[atomic.op](atomic.old, atomic.operand) if is_known else allocation.read(offset, atomic.kind)
            self._versions[cell] += 1
            self._record("atomic", thread, call, cell, value, order)

    def on_park(self, thread: Any, cells: list[tuple[Any, int, str, Any]]) -> None:
        call = self._calls[thread.block.launch]
        # Parked is who polled all of these; the one that was polled last and has a name is what the loop is about.
        allocation, offset, _, value = max(enumerate(cells), key=lambda item: (_telling(*item[1][:2]), item[0]))[1]
        cell = self._cell(call, thread, allocation, offset)
        if cell is None:  # a poll of payload
            cell = _cell(call, thread, allocation, offset, False)
        assert cell is not None
        event = self._event("wait", thread, call, cell, value, "")
        before = self._woken.pop(thread, None)
        if before is not None:
            has_acted = self._acted.get(thread.warp_state, -1) >= (before.until or 0)
            if (before.cell, before.value) == (event.cell, event.value) and not has_acted:  # it waits as before
                event = event._replace(step=before.step)
            else:
                self._events.append(before)
        self._parked[thread] = event
        self._polled[thread] = cells

    def on_wake(self, thread: Any) -> None:
        event = self._parked.pop(thread)._replace(until=self._step())
        # Who is woken and finds what it has seen, because a lane of its warp has news or because the emulator makes
        # sure that nothing goes on, waits on.
        if thread.expired or thread.changed(self._polled.pop(thread)):
            self._events.append(event)
        else:
            self._woken[thread] = event

    def on_meet(self, thread: Any, name: str) -> None:
        # Lanes that poll come to the same collectives again and again: since when, while their warp does nothing else?
        site, step = site_of(_frame_of(thread)), self._step()
        since = self._meetings.get(thread, {})
        if name == "barrier" or (since and self._acted.get(thread.warp_state, -1) >= min(since.values())):
            since = {}
        first = since.pop(site, step)
        self._meetings[thread] = {**since, site: first}

    def on_exit(self, thread: Any) -> None:
        self._meetings.pop(thread, None)
        if thread in self._woken:
            self._events.append(self._woken.pop(thread))
        launch = thread.block.launch
        warp = thread.rank, launch.name, self._calls[launch].number, thread.block_idx, thread.warp
        self._left[warp].append(self._step())

    def on_failure(self, error: BaseException) -> None:
        """The run stops: a wait that is open then never ends only if that is why."""
        self.error, self._end = error, self._step()
        if not isinstance(error, DeadlockError):
            self._events += [wait._replace(until=self._end) for wait in self._parked.values()]
            self._parked.clear()
            self._meetings.clear()
        thread = self._world.current
        call = None if thread is None else self._calls.get(getattr(getattr(thread, "block", None), "launch", None))
        if call is not None:
            cell = Cell(thread.rank, type(error).__name__, type(error).__name__)
            event = self._event("finding", thread, call, cell, str(error).partition("\n")[0], "")
            self._events.append(event._replace(at=tuple(map(self._line, raising_chain(error.__traceback__)))))

    # --- what they share --------------------------------------------------------------------------------------------

    def _record(self, what: str, thread: Any, call: _Call, cell: Cell, value: Any, order: str) -> None:
        if what != "see":
            self._acted[thread.warp_state] = self._step()
        self._events.append(self._event(what, thread, call, cell, value, order))

    def _event(self, what: str, thread: Any, call: _Call, cell: Cell, value: Any, order: str) -> Event:
        launch, place = thread.block.launch, (thread.block_idx, thread.thread_idx)
        role, team = call.view.role(thread)
        step, name = self._step(), launch.name
        at = tuple(map(self._line, call_chain(_frame_of(thread))))
        return Event(step, what, thread.rank, name, call.number, *place, role, cell, value, order, team=team, at=at)

    def _line(self, site: Site) -> Line:
        """The line of an instruction."""
        if site not in self._lines:
            code, instruction = site
            lines = [line for begin, end, line in code.co_lines() if begin <= instruction < end and line]
            number = lines[-1] if lines else code.co_firstlineno
            self._lines[site] = Line(code.co_filename, number, code.co_name, code.co_firstlineno)
        return self._lines[site]

    def _step(self) -> int:
        """Primitive calls of all threads so far."""
        return self._world.step

    def _cell(self, call: _Call, thread: Any, allocation: Any, offset: int, is_weak: bool = False) -> Cell | None:
        """The cell at an offset; None for the bytes of payload that are not recorded.

        is_weak: of a store; see LaunchView.cell
        """
        key = (allocation, offset, is_weak)
        try:
            return call.cells[key]
        except KeyError:
            cell = _cell(call, thread, allocation, offset, is_weak)
            return call.cells.setdefault(key, cell if cell is not None and is_recorded(cell) else None)


def _frame_of(thread: Any) -> FrameType | None:
    """Where a thread is in the kernel, from within a hook."""
    if current_thread() is not thread:
        return thread.gr_frame
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame


def _telling(allocation: Any, offset: int) -> int:
    """Which cell a wait is about, if it polls several: a named one, else the block's, else another; not the claim, at
    which a wait looks when it begins.
    """
    if isinstance(allocation, MBarrier):
        return 1
    if is_described(allocation) and allocation.describe(offset) == "claim":
        return -1
    return 2 if is_described(allocation) else int(allocation.number == 0)


def _cell(call: _Call, thread: Any, allocation: Any, offset: int, is_weak: bool) -> Cell | None:
    if isinstance(allocation, MBarrier):
        return Cell(allocation.block.launch.rank, f"mbarrier[byte {allocation.address}]", "mbarrier")
    return call.view.cell(allocation, offset, thread, is_weak)
