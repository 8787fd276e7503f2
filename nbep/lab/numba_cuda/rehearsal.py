"""What the host is about to wait for, run as machine code first.

The session's own world stays as it is meanwhile: another one, whose threads are compiled, gets the same queues, the
same memory and the same generator, so it makes the same choices. If it comes to its end, the session's world goes on
from there. If something stops it, memory is put back, and Python runs all of it in the session's world and explains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from nbep.device.engine import machine
from nbep.emulator import World
from nbep.emulator.engine import Stopped, state, world
from nbep.emulator.engine.checked_world import CheckedWorld
from nbep.emulator.machine.memory import Allocation
from nbep.emulator.machine.stream import Launch, Mark

from .compiled import words_of
from .launch import SM_WARPS
from .loops import GRID_CELL
from .session import _latest

MANY_TURNS = 1 << 18  # of loops, while nothing changes, after which it is asked whether all look at one element each
MANY_LOOKS = 1 << 8  # one after the other, of each thread
MOST_TURNS = 1 << 28  # while no block leaves
MUST_FAIL = state.OUT_OF_BOUNDS, state.UNWRITTEN, state.READ_ONLY, state.RAISED


class Rehearsing:
    """A world of plain kernels. on_card: of its launches, the share of the SMs that a block takes on the card"""

    turns: Any = world.field("turns")
    max_calls: int | None = None
    _at_change = _at_leave = 0
    _live: Any = None

    def _look_around(self: Any, finished: Any, describe: Any) -> None:
        live = [one.live for one in self.launches]
        if self.has_changed:
            self._at_change = self.turns
        if live != self._live:
            self._at_leave, self._live = self.turns, live
        super()._look_around(finished, describe)  # type: ignore[misc]
        is_still = self.turns - self._at_change > MANY_TURNS and self._all_look()
        if is_still or self.turns - self._at_leave > MOST_TURNS:
            raise Stopped("loops go on and on")
        if self.max_calls is not None and self.calls > self.max_calls:
            raise Stopped("more calls than max_calls")

    def _all_look(self: Any) -> bool:
        """Whether each thread that can run looks at one element again and again."""
        self._at_change, tables = self.turns, self.tables
        who = np.concatenate([tables.runnable[: len(self.runnable)], tables.slow[: len(self.slow)]])
        return bool((tables.threads["spins"][who[who > 0]] > MANY_LOOKS).all())

    def _find_endless_loops(self, describe: Any) -> None:
        """`_look_around` does."""


@cache
def _class_of(model: str) -> Any:
    return type("Rehearsal", (Rehearsing, CheckedWorld if model == "checked" else world.CompiledWorld), {})


def _memories(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _memories(one)
    elif hasattr(value, "_memory"):
        yield value._memory


def rehearse(session: Any, streams: list[Any]) -> Stopped | None:
    """Run what is queued as machine code, until the host has waited for these streams.

    Returns: None if that is done; else why it was stopped, and nothing is done
    """
    there, model = session.world, session.world.memory_model
    launches = [item for one in there.streams for what, item, _ in one.queue if what == "launch"]
    given = [[*one.function.keep, *one.function.unit.captured] for one in launches]
    memories = dict.fromkeys(_memories(given))
    saved = [(one, one.buffer.copy(), one.shadow and bytes(one.shadow)) for one in memories]
    code = SimpleNamespace(machine=lambda: machine(model), entry=lambda address: address)
    options = {"memory_model": model, "strategy": there.strategy.name, "num_sms": session.options["num_sms"]}
    made: Any
    latest, made = World.latest, SimpleNamespace(tables=None)
    try:
        with world.one_thread:
            made = _class_of(model)(1, there.seed, code=code, **options)
            made.max_calls = session.options["max_calls"]
            _latest[:] = [made]  # which `how_far` looks at
            _run(there, made, streams, memories)
            _take_over(there, made)
        return None
    except Stopped as stopped:
        for memory, before, shadow in saved:
            memory.buffer[:] = before
            if shadow is not None:
                memory.shadow[:] = shadow
        reason = 0 if made.tables is None else int(made.tables.run["fault"])
        stopped.must_fail = reason in MUST_FAIL or (reason == state.RACE and not made.is_strict)
        if reason:  # what happens when all wait for each other depends on how many blocks there are at once
            for one, share in zip(launches, made.shares, strict=True):
                one.share = share
        return stopped
    finally:
        World.latest, _latest[:] = latest, [there]
        if made.tables is not None:
            made.end()


def _run(there: Any, made: Any, streams: list[Any], memories: Any) -> None:
    made.tables.generator[: state.GENERATOR_WORDS] = there.random.getstate()[1]
    made.strategy.slow_ranks = dict(there.strategy.slow_ranks)
    made.calls, made.steps, made.parks = there.calls, there.steps, there.parks
    space, numbers = made.ranks[0].space, {}
    for memory in memories:
        number = numbers[memory] = space.new_number()
        bytes_there: Any = memoryview(memory.buffer)[: memory.nbytes]
        allocation = Allocation(0, "", bytes_there, number)
        allocation.shadow, allocation.may_change = memory.shadow, False  # nobody loads it as if it were constant
        space.segments[number] = allocation

    def address_of(array: Any) -> int:
        where = array._nd.ctypes.data - array._memory.buffer.ctypes.data if array.size else 0
        return numbers[array._memory] << 32 | where

    made.there = {one: made.ranks[0].create_stream(one.name) for one in there.streams}
    made.shares, marks = [], {}

    def mark_of(mark: Any) -> Mark:
        if mark not in marks:
            new = marks[mark] = Mark(made.there[mark.stream])
            new.done = mark.done
            if mark.done:
                made.order.record(new, made.order.queued(new.stream))
        return marks[mark]

    for old, new in made.there.items():
        for what, item, _ in old.queue:
            same: Any = _launch(item, new, address_of) if what == "launch" else mark_of(item)
            new.queue.append((what, same, made.order.queued(new)))
            made.shares += [same.share] if what == "launch" else []
    made.operations.extend([_same(one, made.there) for one in there.operations])
    for one in streams:
        if made.there[one].is_busy or there.memory_model != "sc":
            made.there[one].synchronize()


def _same(operation: Any, streams: dict[Any, Any]) -> Any:
    """What a stream of the one world has to do, for the same one of the other; all else has nothing to do any more."""
    new = streams.get(getattr(operation, "__self__", None))
    return int if new is None else new.advance


def _launch(old: Any, stream: Any, address_of: Any) -> Launch:
    run = old.function
    cell = None if run.grid_cell is None else stream.space.allocate(4, GRID_CELL, zero=True)
    words = [*run.block, *run.grid, 0 if cell is None else cell.address]
    for site in run.unit.sites:
        begin = run.places.get(site, 0)
        words += [begin, (run.dynamic - begin) // site.dtype.itemsize]
    for value, t in (*zip(run.keep, run.types, strict=True), *run.unit.captured):
        words += words_of(value, t, address_of)
    new = Launch(stream, run.entry, tuple(words), old.grid, old.block, old.smem_bytes, old.name)
    new.starts_together, new.by_ptx = old.starts_together, True
    num_warps = -(-old.block // world.WARP_SIZE)
    number, fit = stream.sms.number, (state.MOST_WARPS - 1) // num_warps
    if min(number // old.share, old.grid) > fit:
        fit = SM_WARPS // num_warps  # as long as it is another run than Python's, one whose threads share a cache
    new.share = max(old.share, number // fit)
    return new


def _take_over(there: Any, made: Any) -> None:
    """The session's world is where the other one has come to. What is in its queues is done."""
    back = {new: old for old, new in made.there.items()}
    there.random.setstate((3, tuple(map(int, made.tables.generator[: state.GENERATOR_WORDS])), None))
    there.strategy.slow_ranks = made.strategy.slow_ranks
    there.calls, there.steps, there.parks, there.has_changed = made.calls, made.steps, made.parks, True
    there.operations[:] = [_same(one, back) for one in made.operations.calls()]
    for stream in there.streams:
        while stream.queue:
            what, item, queued = stream.queue.popleft()
            item.done, item.behind = True, None
            if what == "launch":
                item.function, item.args = None, ()
                item.callbacks.run()
            elif what == "record":  # what streams have waited for, the host knows by now
                there.order.record(item, queued)
        stream.latest = None
