"""Reports in the words of Numba's users: threadIdx, blockIdx, arrays by name and index, the call that is missing.

The first line says what is wrong and with which element. The next two are the accesses: line, source, thread.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable
from typing import Any

from nbep.emulator.machine import errors
from nbep.emulator.machine.faults import AccessFault, Diverged, Hole, NeverFull, error_at, who_and_where
from nbep.emulator.machine.kinds import KINDS
from nbep.emulator.machine.memory import OFFSET_BITS, OFFSET_MASK
from nbep.emulator.machine.names import ranges
from nbep.emulator.machine.source import Site, describe_site, site_of, source_line
from nbep.emulator.models.host import HostRace
from nbep.emulator.models.races import Race
from nbep.emulator.reports.unwritten import _is_there, _who_writes

BLOCKS = (
    "two blocks of a launch run in any order: this needs an atomic, a flag or lock with cuda.threadfence() on both "
    "sides, a second launch or grid.sync()"
)
CHANGED = "several threads change it at once: this needs an atomic, such as cuda.atomic.add"
ASSIGNMENT = re.compile(r"(?:\*\*|//|<<|>>|[-+*/%&|^])?=(?!=)")
AUGMENTED = re.compile(r"(?:\*\*|//|<<|>>|[-+*/%&|^])=")
BARRIERS = {
    "syncwarp": "cuda.syncwarp()", "match_any": "cuda.match_any_sync()", "match_all": "cuda.match_all_sync()",
    "shfl.idx": "cuda.shfl_sync()", "shfl.up": "cuda.shfl_up_sync()", "shfl.down": "cuda.shfl_down_sync()",
    "shfl.xor": "cuda.shfl_xor_sync()", "vote.any": "cuda.any_sync()", "vote.all": "cuda.all_sync()",
    "vote.ballot": "cuda.ballot_sync()", "vote.eq": "cuda.eq_sync()",
}  # fmt: skip


def words_of(world: Any, fact: Any, default: Callable[[Any], Any]) -> Any:
    """The error that says what a fact means."""
    if isinstance(fact, Race):
        return race(world, fact)
    if isinstance(fact, HostRace):
        return host_race(world, fact)
    if isinstance(fact, AccessFault):
        return access_fault(fact, default)
    if isinstance(fact, Diverged):
        return diverged(fact)
    if isinstance(fact, NeverFull):
        return errors.DeadlockError(f"cuda.syncthreads() of {block_name(fact.block)} waits for threads that have left")
    return default(fact)


# --- names ------------------------------------------------------------------------------------------------------------
def three(number: int, dims: tuple[int, int, int]) -> tuple[int, int, int]:
    return number % dims[0], number // dims[0] % dims[1], number // dims[0] // dims[1]


def shown(number: int, dims: tuple[int, int, int]) -> str:
    """`(3, 1)`, or `3` where there is one dimension."""
    x, y, z = three(number, dims)
    return f"({x}, {y}, {z})" if dims[2] > 1 else f"({x}, {y})" if dims[1] > 1 else str(x)


def thread_name(dims: Any, block_idx: int, thread_idx: int) -> str:
    grid, block = dims
    return f"threadIdx {shown(thread_idx, block)}, blockIdx {shown(block_idx, grid)}"


def kernel_name(name: str, launch: int) -> str:
    return f"kernel `{name}`" + (f" (launch {launch})" if launch > 1 else "")


def describe(thread: Any) -> str:
    """A thread, as reports name it."""
    launch = thread.block.launch
    dims = thread.world.dims_of(launch.name, launch.number)
    return f"{thread_name(dims, thread.block_idx, thread.thread_idx)}, {kernel_name(launch.name, launch.number)}"


def block_name(block: Any) -> str:
    grid, _ = block.launch.world.dims_of(block.launch.name, block.launch.number)
    return f"blockIdx {shown(block.index, grid)}"


def owner_name(world: Any, owner: Any) -> str:
    if owner.is_cpu:
        return "the host"
    return thread_name(world.dims_of(owner.kernel, owner.launch), owner.block_idx, owner.thread_idx)


def cell(allocation: Any, offset: int) -> str:
    """An element, as people write it."""
    if allocation.describe is None:
        return f"{allocation.name}, byte {offset}"
    text = allocation.describe(offset)
    return text if allocation.number == 0 else f"{allocation.name}{text}"


def line(site: Site | None) -> str:
    text = source_line(site)
    where = describe_site(site).rpartition(" (")[0] or describe_site(site)
    return f"{where}: {text}" if text else where


# --- races ------------------------------------------------------------------------------------------------------------
def race(world: Any, fact: Race) -> errors.DataRace:
    """Two accesses that nothing orders."""
    _, allocation, access, earlier = fact
    name = cell(allocation, max(access.begin, earlier.begin))
    lines = [
        f"data race on {name}: {_missing(world, access, earlier, allocation.number == 0)}",
        f"  {line(earlier.site)}    <- {_done(earlier)} by {owner_name(world, earlier.owner)}",
        f"  {line(access.site)}    <- {_done(access)} by {owner_name(world, access.owner)}",
    ]
    if earlier.owner.kernel == access.owner.kernel and earlier.owner.launch == access.owner.launch:
        lines.append(f"  in {kernel_name(access.owner.kernel, access.owner.launch)}")
    elif not earlier.owner.is_cpu:
        first, second = (
            f"{kernel_name(one.kernel, one.launch)} of {_stream(one)}" for one in (earlier.owner, access.owner)
        )
        lines.append(f"  first by {first}, then by {second}")
    error = errors.DataRace("\n".join(lines))
    error.thread, error.source = owner_name(world, access.owner), describe_site(access.site)
    return error


def _stream(owner: Any) -> str:
    return owner.place.stream if owner.place else "a stream"


def _done(access: Any) -> str:
    return "changed by an atomic" if access.is_atomic else "stored" if access.verb == "store" else "loaded"


def _missing(world: Any, access: Any, earlier: Any, is_shared: bool) -> str:
    """What would order the two."""
    a, b = earlier.owner, access.owner
    if a.is_cpu:
        return "the host has accessed it while the kernel was under way: call cuda.synchronize() before"
    if (a.kernel, a.launch) != (b.kernel, b.launch):
        return "two kernels on different streams, which nothing orders: an event or stream.synchronize() is missing"
    atomics = access.is_atomic + earlier.is_atomic
    if atomics == 1:
        what = "a plain access and an atomic"
        if a.block == b.block:
            return f"{what}: cuda.syncthreads() is missing between them, or both must be atomic"
        return f"{what} of two blocks: both must be atomic"
    if access.verb == earlier.verb == "store" and line(access.site) == line(earlier.site):
        if _augments(access.site):
            return CHANGED
        return "two threads store to the same element, and nothing says which comes last"
    load, store = (access, earlier) if access.verb == "load" else (earlier, access)
    if load.verb == "load" and line(load.site) == line(store.site) and segment(load.site) == _target(store.site):
        if not _stores_several(store.site):
            return CHANGED
    if (a.kernel, a.launch) in world.cooperative and not is_shared:
        return "grid.sync() is missing between these two accesses"
    if a.block != b.block:
        return BLOCKS
    return "cuda.syncthreads() is missing between these two accesses"


def segment(site: Site | None) -> str:
    """The expression at a site, if it stands in one line."""
    if site is None:
        return ""
    line_number, end, column, end_column = list(site[0].co_positions())[site[1] // 2]
    text = source_line(site)
    whole = linecache.getline(site[0].co_filename, line_number or 0)
    if line_number is None or line_number != end or whole.strip() != text:
        return text
    return whole.encode()[column or 0 : end_column or 0].decode()


def _target(site: Site | None) -> str:
    """The element to which a line stores, as it is written."""
    return ASSIGNMENT.split(segment(site), maxsplit=1)[0].strip()


def _augments(site: Site | None) -> bool:
    """Whether a line stores what it makes of what was there."""
    parts = ASSIGNMENT.split(source_line(site), maxsplit=1)
    return len(parts) == 2 and (parts[0].strip() in parts[1] or bool(AUGMENTED.search(source_line(site))))


def _stores_several(site: Site | None) -> bool:
    """Whether a line stores to several elements, as a swap does: no atomic can stand in its place."""
    try:
        target = ast.parse(ASSIGNMENT.split(source_line(site), maxsplit=1)[0].strip(), mode="eval").body
    except SyntaxError:
        return False
    return isinstance(target, ast.Tuple)


def host_race(world: Any, fact: HostRace) -> errors.DataRace:
    """An access of the host to what a kernel has accessed."""
    allocation, access, earlier, _ = fact
    verb = "writes" if access.verb == "store" else "reads"
    name = cell(allocation, max(access.begin, earlier.begin))
    missing = "cuda.synchronize() or stream.synchronize() is missing"
    lines = [
        f"data race on {name}: the host {verb} it and has not waited for the kernel: {missing}",
        f"  {line(earlier.site)}    <- {_done(earlier)} by {owner_name(world, earlier.owner)}",
        f"  {line(_host_site())}    <- the host {verb}",
        f"  in {kernel_name(earlier.owner.kernel, earlier.owner.launch)} of {_stream(earlier.owner)}",
    ]
    return errors.DataRace("\n".join(lines), None, None)


def _host_site() -> Site | None:
    return site_of(sys._getframe(1))


# --- accesses ---------------------------------------------------------------------------------------------------------
def access_fault(fault: AccessFault, default: Callable[[Any], Any]) -> Any:
    """A failed access: of an element that was never written, or of memory that is gone."""
    thread, address, kind, storing, shared, _, polls = fault
    allocation = thread.shared if shared else thread.segments.get(address >> OFFSET_BITS)
    if allocation is None or allocation.freed or storing or kind not in KINDS:
        return default(fault)
    offset, size = address & OFFSET_MASK, KINDS[kind].size
    if allocation.first_unwritten(offset, size) < 0:
        return default(fault)
    hole = Hole(thread, allocation, offset, size, polls)
    what = f"load of {cell(allocation, offset)}, which no thread has written"
    return errors.Uninitialized(what, *who_and_where(thread), hole)


def tell_writer(error: errors.Uninitialized, world: Any) -> None:
    """Say who writes, a moment later, what a thread has loaded too early."""
    hole = error.hole
    if hole is None or hole.allocation.freed or _is_there(hole):
        return
    writer = _who_writes(hole, world)
    if writer is None or writer.thread is None:
        return
    first, *rest = str(error).splitlines()
    near = writer.thread.block is hole.thread.block
    missing = "cuda.syncthreads() is missing" if near else "nothing makes this thread wait for that"
    by = f"  {line(writer.site)}    <- stored later by {describe(writer.thread)}"
    error.args = ("\n".join([f"{first} so far, but one does later: {missing}", by, *rest]),)


def show_source(error: errors.EmulatorError) -> None:
    """Put who has done it behind the line that has done it, as reports of races have it."""
    end = f"  by {error.thread}\n  at {error.source}"
    if error.source is None or end not in str(error):
        return
    where = error.source.rpartition(" (")[0]
    filename, _, number = where.rpartition(":")
    text = linecache.getline(filename, int(number)).strip() if number.isdecimal() else ""
    done = "loaded by" if isinstance(error, errors.Uninitialized) else "by"
    shown_there = f"  {where}: {text}    <- {done} {error.thread}" if text else end
    error.args = (str(error).replace(end, shown_there), *error.args[1:])


# --- meetings ---------------------------------------------------------------------------------------------------------
def diverged(fact: Diverged) -> errors.EmulatorError:
    """Lanes of a warp at different collectives that name each other."""
    thread, name, collective = fact
    here, there = (BARRIERS.get(one.partition(" ")[0], one) for one in (name, collective.name))
    message = (
        f"{here} names lanes that are at {there}: all lanes of the mask {collective.mask:#010x} that have not left\n"
        "must come to the same call\n"
        f"  {line(collective.site)}    <- lanes {ranges(one.lane for one in collective.threads)}"
    )
    return error_at(thread, errors.Divergence, message)


def different_barriers(thread: Any, other: Any, here: Site, there: Site) -> errors.EmulatorError:
    message = (
        "threads of a warp are at different calls of cuda.syncthreads(): all threads of a block must come to the same\n"
        "one (PTX: bar.sync is .aligned)\n"
        f"  {line(there)}    <- threadIdx {other}"
    )
    return error_at(thread, errors.Divergence, message)
