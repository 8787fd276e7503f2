"""The report of a hang: who loops or waits where, on which element, what it holds, and who is left to change it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from nbep.emulator.machine import errors
from nbep.emulator.machine.names import ranges
from nbep.emulator.machine.source import line_number, site_of, source_line
from nbep.emulator.machine.warp import lanes_of
from nbep.emulator.reports.expected import condition, quiet

from .reports import BARRIERS, cell, kernel_name, line, owner_name, shown, thread_name

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
        head = f"endless loop: each turn is as the one before, and nothing changes any more, in {kernels}"
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
        return ["nothing ends this loop: it looks at no memory, and its variables decide the same in each turn"]
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
