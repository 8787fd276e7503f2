"""Which `while` loops of kernels never end: a turn that begins as the one before, and looks at what has not changed.

The compiler finds the variables that decide how a turn goes: those of tests, of indices and of calls, and what these
are made of. What is only stored does not count, so a loop that counts its turns is known again. A loop whose variables
are the same in two turns has its next turn noted: what it loads, stores and where it meets others. That turn comes
again as long as what it has loaded stays, and nobody else is there to change it if all others are in such a loop, too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from nbep.emulator.machine import errors
from nbep.emulator.machine.errors import EmulatorError
from nbep.emulator.machine.kinds import KINDS
from nbep.emulator.machine.names import ranges
from nbep.emulator.machine.source import line_number, site_of, source_line
from nbep.emulator.machine.warp import lanes_of
from nbep.emulator.reports.expected import Seen, condition, quiet
from nbep.emulator.schedule.strategies import Alone

from .code import build
from .env import Env, calls
from .reports import BARRIERS, cell, kernel_name, line, owner_name, shown, thread_name
from .types import Known

MOST_LOOKS = 1000  # of a turn that is noted


class Look(NamedTuple):
    """An access of a turn, or a meeting. verb: load, atomic, store or meet; cell: see `machine.access`"""

    verb: str
    cell: Any = None


# --- compiled ---------------------------------------------------------------------------------------------------------
def deciding(loop: ast.While) -> list[str]:
    """The variables that a loop changes and that decide how its turns go."""
    makes: dict[str, set[str]] = {}  # variable -> what it is made of
    decide = set(_names([loop.test]))
    for node in (one for statement in loop.body for one in ast.walk(statement)):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for one in (part for target in targets for part in ast.walk(target)):
                if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                    made = makes.setdefault(one.id, set())
                    made.update(_names([node.value]), [one.id] if isinstance(node, ast.AugAssign) else ())
        elif isinstance(node, ast.For):
            bound = _names([node.iter])
            decide.update(bound)
            for name in _names([node.target]):
                makes.setdefault(name, set()).update(bound)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            decide.update(_names([node.test]))
        elif isinstance(node, (ast.Call, ast.Return, ast.Raise, ast.BoolOp, ast.Subscript, ast.Attribute)):
            decide.update(_names([node]))
    while more := {name for one in decide & makes.keys() for name in makes[one]} - decide:
        decide |= more
    return sorted(decide & makes.keys())


SILENT = {"ld": "ld_silently", "atomic": "change"}


def silence(c: Any, code: ast.expr) -> None:
    """In a loop, note no loads of a value that is only stored: no turn depends on it, but for functions it calls."""
    waiting: list[ast.AST] = [code] if any(one.is_while for one in c.loops) else []
    while waiting:
        node = waiting.pop()
        if not calls(node, "run"):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Attribute):
            node.attr = SILENT.get(node.attr, node.attr)


def watched(c: Any, node: ast.While, head: Env) -> tuple[ast.stmt, ast.stmt]:
    """What stands before a loop, and at the beginning of each turn."""
    turns_of_loop = c.temporary()
    begin = c.named(turns_of_loop, build(f"{c.keep(turns)}(_t)"))
    state = [name for name in deciding(node) if name in head and not isinstance(head[name].t, Known)]
    turn = ast.Expr(build(f"{turns_of_loop}({', '.join(state)})"))
    unbound = build("UnboundLocalError")
    nothing = ast.ExceptHandler(unbound, None, [ast.Pass()])
    return begin, ast.Try([turn], [nothing], [], [])


def _names(nodes: Iterable[ast.AST | None]) -> list[str]:
    return [one.id for node in nodes if node is not None for one in ast.walk(node) if isinstance(one, ast.Name)]


# --- running ----------------------------------------------------------------------------------------------------------
def turns(thread: Any) -> Callable[..., None]:
    """What a loop that begins calls at each turn, with the variables that decide how it goes."""
    return _same_turns if isinstance(thread.world.strategy, Alone) else Turns(thread)


def _same_turns(*state: Any) -> None:
    """Where all schedules are run, loops that wait are found there."""


class Turns:
    """The turns of a loop. state: of the variables that decide, as its latest turn began; site: where that was"""

    __slots__ = ("site", "state", "thread")

    def __init__(self, thread: Any):
        self.thread = thread
        self.state: Any = None

    def __call__(self, *state: Any) -> None:
        thread = self.thread
        thread.left -= 1
        if thread.left < 0:
            thread.pause()
        try:
            is_same = state == self.state
        except EmulatorError:  # a value of which CUDA leaves open what it is
            is_same = False
        if not is_same:
            self.state = state
            if thread.looker is self:
                thread.forget_turn()
            return
        frame = sys._getframe(1)
        self.site = frame.f_code, frame.f_lasti
        thread.turn = thread.looks if thread.looker is self else None
        thread.looker, thread.looks = self, []


class LoopingThread:
    """A thread of a kernel whose loops are watched.

    looks: in the turn that is being noted, None if none is; looker: its loop; turn: the looks of its turn before
    is_silent: what it loads now is only stored; notes: what the values that it has loaded are compared with, if asked
    """

    if not TYPE_CHECKING:
        __slots__ = ()
    looks: list[Look] | None
    looker: Turns | None
    turn: list[Look] | None

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.notes: Any = None
        self.is_silent = False
        self.forget_turn()

    def forget_turn(self) -> None:
        self.looker = self.looks = self.turn = None

    def note(self, verb: str, *cell: Any) -> Any:
        """An access in a turn that is noted. Returns: the value that it has loaded, as the kernel is to have it"""
        value = cell[3]
        if self.is_silent and verb != "store":
            return value
        assert self.looks is not None
        self.looks.append(Look(verb, cell))
        if len(self.looks) > MOST_LOOKS:
            self.forget_turn()
        return Seen.of(value, self.notes, cell[:2]) if self.notes is not None and type(value) is int else value

    def converge(self, *args: Any) -> Any:
        if self.looks is not None:
            self.looks.append(Look("meet"))
        return super().converge(*args)  # type: ignore[misc]

    def arrive(self, *args: Any, **given: Any) -> Any:
        if self.looks is not None:
            self.looks.append(Look("meet"))
        return super().arrive(*args, **given)  # type: ignore[misc]

    @property
    def cells(self) -> list[Any]:
        """What its loop looks at."""
        return list(dict.fromkeys(one.cell for one in self.turn or () if one.verb in ("load", "atomic")))

    def loops_in_vain(self) -> bool:
        """Whether the next turn of its loop goes as the one before, unless another thread changes what it looks at."""
        if self.turn is None or self.looks is None or self.looks != self.turn[: len(self.looks)]:
            return False
        return not self.changed(self.cells)  # type: ignore[attr-defined]


def is_endless(world: Any) -> bool:
    """Whether all threads that can run loop, and none of them changes what ends the loop of another one."""
    threads = [*world.runnable, *world.slow]
    if world.operations or not threads or not all(one.loops_in_vain() for one in threads):
        return False
    meeting = [one.block.launch for one in threads if Look("meet") in one.turn]  # at grid.sync() all of a launch
    for launch in dict.fromkeys(meeting):
        if not all(one.exited or one.loops_in_vain() for block in launch.blocks for one in block.threads):
            return False
    looked_at = [cell for one in threads for cell in one.cells]
    looked_at += [cell for one in world.polling for cell in one.waits_for]
    stored = [look.cell for one in threads for look in one.turn if look.verb == "store"]
    return not _bytes(looked_at) & _bytes(stored) and not world._look_again()


def _bytes(cells: list[Any]) -> set[Any]:
    return {(cell[0], cell[1] + i) for cell in cells for i in range(KINDS[cell[2]].size)}


# --- the report of a hang: who loops or waits where, on what, and who is left to change it ----------------------------
NOBODY = "no other thread is left that could change what they look at"
WAITING = "all other threads wait, or have not started: none of them can change what these look at"
GRID_CELL = "the barrier of the grid"
MOST_PLACES = 12
MOST_ASKED = 4  # threads of a place


def hang(world: Any, limit: str = "") -> errors.DeadlockError:
    """Nothing goes on, or all that goes on are loops whose turns stay the same; or a limit is over, as `limit` says."""
    places: dict[tuple, list[Any]] = {}
    for launch in world.launches:
        for block in launch.blocks:
            for thread in block.threads:
                if not thread.exited:
                    site = None if thread.gr_frame is None else site_of(thread.gr_frame)
                    places.setdefault((launch, *_what(thread, site)), []).append(thread)
    are_looping = [one.loops_in_vain() for threads in places.values() for one in threads]
    lines: list[str] = []
    writers: list[Any] = []  # the sites of those who have changed last what loops look at
    for (launch, where, what), threads in list(places.items())[:MOST_PLACES]:
        lines.append(f"  {where}    <- {_who(launch, threads)} {what}")
        lines += [f"    {text}" for text in _looked_at(world, threads, writers)]
    if len(places) > MOST_PLACES:
        lines.append(f"  ... and {len(places) - MOST_PLACES} more places")
    lines += [f"  {text}" for launch in world.launches for text in _absent(world, launch, writers)]
    kernels = ", ".join(sorted({kernel_name(one.name, one.number) for one in world.launches})) or "no kernel"
    head = f"{limit or 'deadlock: nothing goes on any more in '}{kernels}"
    if any(are_looping) and not limit:
        head = f"endless loop: each iteration is as the one before, and nothing changes any more, in {kernels}"
        are_all = all(are_looping) and all(len(one.blocks) == one.grid for one in world.launches)
        lines.append(f"  {NOBODY if are_all else WAITING}")
    return errors.DeadlockError("\n".join([head, *lines]))


def _what(thread: Any, site: Any) -> tuple[str, str]:
    """Where a thread is, and what it does there."""
    waits_for = thread.waits_for
    if thread.loops_in_vain():
        return line(thread.looker.site), "loop"
    if thread in thread.world.runnable or waits_for is None:
        return line(site), "run"
    if hasattr(waits_for, "expected"):
        return line(site), "wait for the others at cuda.syncthreads()"
    if hasattr(waits_for, "mask"):
        lanes = ranges(lanes_of(waits_for.missing))
        return line(site), f"wait at {BARRIERS.get(waits_for.name, waits_for.name)} for lanes {lanes}"
    if isinstance(waits_for, list):
        return line(site), "wait for the other blocks at grid.sync()" if _is_at_grid(thread) else "loop"
    return line(site), f"wait for {waits_for}"


def _is_at_grid(thread: Any) -> bool:
    return isinstance(thread.waits_for, list) and thread.waits_for[0][0].name == GRID_CELL


def _who(launch: Any, threads: Sequence[Any]) -> str:
    """`3 of 32 threads (threadIdx 0-2) of blockIdx 0-4`"""
    grid, dims = launch.world.dims_of(launch.name, launch.number)
    of_block: dict[int, list[Any]] = {}
    for one in threads:
        of_block.setdefault(one.block_idx, []).append(one)
    same: dict[str, list[int]] = {}
    for block, them in of_block.items():
        same.setdefault(f"{len(them)} of {launch.block} threads (threadIdx {some(them, dims)})", []).append(block)
    shown_first = [f"{who} of blockIdx {_blocks(blocks, grid)}" for who, blocks in same.items()][:MOST_ASKED]
    return "; ".join(shown_first) + ("; ..." if len(same) > MOST_ASKED else "")


def _blocks(numbers: Sequence[int], grid: tuple[int, int, int]) -> str:
    if grid[1] == grid[2] == 1:
        return ranges(numbers)
    first = ", ".join(shown(one, grid) for one in numbers[:4])
    return first + (f", ... ({len(numbers)} blocks)" if len(numbers) > 4 else "")


def some(threads: Iterable[Any], dims: tuple[int, int, int]) -> str:
    """The first threads of a group, by threadIdx."""
    threads = list(threads)
    if dims[1] == dims[2] == 1:
        return ranges(one.thread_idx for one in threads)
    names = [shown(one.thread_idx, dims) for one in threads[:4]]
    return f"{', '.join(names)}{', ...' if len(threads) > 4 else ''}"


# --- what loops look at -----------------------------------------------------------------------------------------------
def _looked_at(world: Any, threads: Sequence[Any], writers: list[Any]) -> list[str]:
    """What each element holds that some threads look at, what they want there, and who has stored it."""
    parked = [cell for one in threads if isinstance(one.waits_for, list) for cell in one.waits_for]
    if _is_at_grid(threads[0]) or not (parked or threads[0].loops_in_vain()):
        return []
    seen: dict[Any, tuple[str, Any]] = {cell[:2]: ("atomic", cell) for cell in parked}
    for one in () if parked else threads:
        for verb, at in one.turn:
            if verb in ("load", "atomic"):
                seen.setdefault(at[:2], (verb, at))
    if not seen:
        return ["nothing ends this loop: it looks at no memory, and its variables decide the same in each iteration"]
    with quiet(world):
        wanted = {} if parked else _wanted(world, threads)
    lines = []
    for place, (_, (allocation, offset, _, value)) in list(seen.items())[:MOST_ASKED]:
        wants = f"; wanted: {wanted[place]}" if place in wanted else ""
        last = _last_writer(world, allocation, offset, writers)
        lines.append(f"{cell(allocation, offset)} holds {value}{wants}; {last}")
    if len(seen) > MOST_ASKED:
        lines.append(f"... and {len(seen) - MOST_ASKED} more elements")
    plain = [cell(*place) for place, (verb, _) in seen.items() if verb == "load"]
    if plain:
        array, _, index = plain[0].partition(" (")[0].removesuffix("]").rpartition("[")
        atomic = f"cuda.atomic.add({array}, {f'({index})' if ',' in index else index}, 0)"
        lines.append(f"a compiler may load {plain[0]} once, before the loop: {atomic} looks each time")
    return lines


def _wanted(world: Any, threads: Sequence[Any]) -> dict[Any, str]:
    """What the first threads of a place want to see, found out by one more turn. The run has ended."""
    kinds, found = {}, {}
    for one in threads[:MOST_ASKED]:
        kinds.update({at[:2]: at[2] for verb, at in one.turn if verb != "meet"})
        notes: list[Any] = []
        one.notes = notes
        for _ in range(2 * len(one.turn) + 2):
            world.runnable.clear()
            one.left = 0
            world.current = one
            with suppress(Exception):
                one.switch()
            world.current = None
            if one not in world.runnable:
                break
        one.notes = None
        for place in dict.fromkeys(note.cell for note in notes):
            text = condition([note for note in notes if note.cell == place], kinds[place])
            if text is not None:
                found[place] = text
    return found


def _last_writer(world: Any, allocation: Any, offset: int, writers: list[Any]) -> str:
    """Who has stored an element last, as far as the memory model keeps it."""
    stores = [one for one in allocation.last_stores.get(offset >> 4, ()) if one.begin <= offset < one.end]
    writer = allocation.writers.get(offset)
    if stores or writer is not None:
        writers.append(stores[-1].site if writer is None else writer[2])
    if stores and not stores[-1].is_atomic:
        return f"stored last by {owner_name(world, stores[-1].owner)} at {line(stores[-1].site)}"
    if writer is not None:
        block = next((one for launch in world.launches for one in launch.blocks if one.name == writer[0]), None)
        launch = None if block is None else block.launch
        dims = None if launch is None else world.dims_of(launch.name, launch.number)
        by = "an earlier kernel" if block is None else thread_name(dims, block.index, writer[1])
        return f"changed last by {by} at {line(writer[2])}"
    is_known = world.memory_model == "checked"
    return "no thread has changed it" if is_known else "under `checked` a report says who has stored it"


def _missed(returns: set[int], writers: Sequence[Any]) -> str:
    """By which `return` blocks have left, and what they have not come to."""
    behind = {line_number(site): site for site in writers if site is not None and line_number(site) > max(returns)}
    text = f" by the `return` in line {', '.join(map(str, sorted(returns)))}"
    for number, site in behind.items():
        text += f", before line {number}: {source_line(site)}"
    return text + ("; let them do that before they return, or do not wait for them" if behind else "")


# --- who is not there -------------------------------------------------------------------------------------------------
def _absent(world: Any, launch: Any, writers: Sequence[Any]) -> list[str]:
    """The blocks that have left, and those that have not started. writers: sites of what others wait for"""
    grid, _ = world.dims_of(launch.name, launch.number)
    lines = []
    left = [block.index for block in launch.blocks if not block.live]
    if left:
        early = {block: launch.function.returned[block] for block in left if block in launch.function.returned}
        for blocks in ([one for one in left if one not in early], list(early)):
            if blocks:
                text = f"blockIdx {_blocks(blocks, grid)} {'has' if len(blocks) == 1 else 'have'} left"
                lines.append(text + (_missed(set().union(*early.values()), writers) if blocks[0] in early else ""))
    started = len(launch.blocks)
    if started < launch.grid:
        waiting = range(started, launch.grid)
        count = f"{len(waiting)} of {launch.grid} blocks wait{'s' * (len(waiting) == 1)} for an SM"
        number = launch.stream.sms.number // launch.share
        lines.append(f"{count}: blockIdx {_blocks(waiting, grid)}; {number} blocks of this size run at once")
    return lines
