"""Reports in the words of Numba's users: threadIdx, blockIdx, arrays by name and index, the call that is missing.

The first line says what is wrong and with which element. The next two are the accesses: line, source, thread.
What a kernel does wrong with an array is said in Numba's words.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from typing import Any

from nbep.emulator.machine import errors
from nbep.emulator.machine.faults import AccessFault, Diverged, Hole, error_at, who_and_where
from nbep.emulator.machine.kinds import KINDS
from nbep.emulator.machine.memory import OFFSET_BITS, OFFSET_MASK
from nbep.emulator.machine.names import ranges
from nbep.emulator.machine.source import Site, describe_site, site_of, source_line
from nbep.emulator.models.host import HostRace
from nbep.emulator.models.races import Race
from nbep.emulator.reports.unwritten import _is_there, _who_writes

from . import remedies

LOCK = "lock of atomics with cuda.threadfence() on both sides"
STORES = "several threads store to it, and nothing says which comes last: only one of them may"
CHANGE = f"several threads change it at once: this needs an atomic, such as cuda.atomic.{{}}, or a {LOCK}"
ADVICE = {  # a test has for each a program that gets it, and that program as it is told to be
    "host first": "the host has accessed it while the kernel was under way: call cuda.synchronize() before",
    "host later": "and has not waited for the kernel: cuda.synchronize() or stream.synchronize() is missing",
    "streams": "two kernels on different streams, which nothing orders: an event or stream.synchronize() is missing",
    "atomic and plain": (
        "a plain access and an atomic: cuda.syncthreads() is missing between them, or both must be atomic"
    ),
    "atomic and plain of two blocks": "a plain access and an atomic of two blocks: both must be atomic",
    "several stores": f"{STORES}, or cuda.syncthreads() is missing between them",
    "several stores of two blocks": STORES,
    "changed": f"{CHANGE}, or cuda.syncthreads() between the two if they do it one after the other",
    "changed by two blocks": CHANGE,
    "grid": "grid.sync() is missing between these two accesses",
    "blocks": (
        "two blocks of a launch run in any order: this needs a flag or "
        f"{LOCK}, an atomic in place of each, a second launch or grid.sync()"
    ),
    "block": "cuda.syncthreads() is missing between these two accesses",
    "early": "so far, but one does later: cuda.syncthreads() is missing",
    "early in another block": "so far, but one of another block does later: nothing makes this thread wait for that",
    "collective": "that have not left must come to the same call",
    "barrier": "all threads of a block must come to the same one",
}
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
    name, advice = cell(allocation, max(access.begin, earlier.begin)), _missing(world, access, earlier, allocation)
    lines = [
        f"data race on {name}: {advice}",
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
    remedy = _remedy(advice, access, earlier)
    lines += [f"  {remedy}"] if remedy else []
    error = errors.DataRace("\n".join(lines))
    error.thread, error.source = owner_name(world, access.owner), describe_site(access.site)
    return error


def _remedy(advice: str, access: Any, earlier: Any) -> str | None:
    """What to write where."""
    if advice == ADVICE["block"]:
        return remedies.barrier(earlier.site, describe_site(access.site))
    if "change it at once" in advice:
        return remedies.atomic_call((access if access.verb == "store" else earlier).site)
    return None


def _stream(owner: Any) -> str:
    return owner.place.stream if owner.place else "a stream"


def _done(access: Any) -> str:
    return "changed by an atomic" if access.is_atomic else "stored" if access.verb == "store" else "loaded"


def _missing(world: Any, access: Any, earlier: Any, allocation: Any) -> str:
    """What would order the two."""
    a, b = earlier.owner, access.owner
    if a.is_cpu:
        return ADVICE["host first"]
    if (a.kernel, a.launch) != (b.kernel, b.launch):
        return ADVICE["streams"]
    of_two, by_two = ("", "") if a.block == b.block else (" of two blocks", " by two blocks")
    if access.is_atomic + earlier.is_atomic == 1:
        return ADVICE["atomic and plain" + of_two]
    if access.verb == earlier.verb == "store" and line(access.site) == line(earlier.site):
        atomic = remedies.atomic_of(access.site)
        return ADVICE["several stores" + of_two] if atomic is None else ADVICE["changed" + by_two].format(atomic)
    load, store = (access, earlier) if access.verb == "load" else (earlier, access)
    if load.verb == "load" and (atomic := remedies.atomic_of(store.site, load.site)) is not None:
        return ADVICE["changed" + by_two].format(atomic)
    if (a.kernel, a.launch) in world.cooperative and allocation.number != 0:
        return ADVICE["grid"]
    return ADVICE["blocks" if a.block != b.block else "block"]


def host_race(world: Any, fact: HostRace) -> errors.DataRace:
    """An access of the host to what a kernel has accessed."""
    allocation, access, earlier, _ = fact
    verb = "writes" if access.verb == "store" else "reads"
    name = cell(allocation, max(access.begin, earlier.begin))
    lines = [
        f"data race on {name}: the host {verb} it {ADVICE['host later']}",
        f"  {line(earlier.site)}    <- {_done(earlier)} by {owner_name(world, earlier.owner)}",
        f"  {line(site_of(sys._getframe()))}    <- the host {verb}",
        f"  in {kernel_name(earlier.owner.kernel, earlier.owner.launch)} of {_stream(earlier.owner)}",
    ]
    return errors.DataRace("\n".join(lines), None, None)


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
    advice = ADVICE["early" if near else "early in another block"]
    by = f"  {line(writer.site)}    <- stored later by {describe(writer.thread)}"
    remedy = remedies.barrier(writer.site, error.source or "") if near else None
    error.args = ("\n".join([f"{first} {advice}", by, *rest, *([f"  {remedy}"] if remedy else [])]),)


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
        f"{here} names lanes that are at {there}: all lanes of the mask {collective.mask:#010x} "
        f"{ADVICE['collective']}\n"
        f"  {line(collective.site)}    <- lanes {ranges(one.lane for one in collective.threads)}"
    )
    return error_at(thread, errors.Divergence, message)


def different_barriers(thread: Any, other: Any, here: Site, there: Site) -> errors.EmulatorError:
    message = (
        f"threads of a warp are at different calls of cuda.syncthreads(): {ADVICE['barrier']} "
        "(PTX: bar.sync is .aligned)\n"
        f"  {line(there)}    <- threadIdx {other}"
    )
    return error_at(thread, errors.Divergence, message)


# --- what a kernel does wrong with an array ---------------------------------------------------------------------------
class Undefined:
    """What a shuffle returns that reads a lane which is not there: any value, which must decide nothing."""

    __array_ufunc__ = None

    def _same(self, *_: Any) -> Undefined:
        return self

    def _decides(self, *_: Any) -> Any:
        from nbep.emulator.machine.thread import current_thread

        raise error_at(
            current_thread(),
            errors.Divergence,
            "this depends on a value that a shuffle has read from a lane which has left the kernel, or which the block "
            "does not have: CUDA leaves open what it is",
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = _same
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = __invert__ = __pow__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _same
    __eq__ = __ne__ = _same  # type: ignore[assignment]
    __bool__ = __index__ = __int__ = __float__ = __complex__ = _decides
    __hash__ = None  # type: ignore[assignment]


UNDEFINED = Undefined()


def raised(who: Any, exception: type, where: tuple[str, str], line: int, *args: Any) -> BaseException:
    """What a kernel raises: Numba's message says where and by which thread, as far as the class takes one."""
    thread, block = [who.tx, who.ty, who.tz], [who.bx, who.by, who.bz]
    name, filename = where
    text = f"In function {name!r}, file {filename}, line {line}, tid={thread} ctaid={block}"
    try:
        return exception(f"{text}: {args[0]}" if args else text, *args[1:])
    except TypeError:
        return exception(*args)


def held(who: Any, value: Any, where: tuple[str, str], line: int, what: str) -> Any:
    """What an Optional holds."""
    if value is None:
        raise raised(who, TypeError, where, line, what)
    return value


def element(array: Any, index: tuple) -> str:
    return f"{array.name}[{', '.join(map(str, index))}]"


def bad_index(thread: Any, array: Any, index: tuple, storing: bool) -> errors.EmulatorError:
    shape = array.nd.shape
    why = f"out of bounds, the shape of `{array.name}` is {shape}"
    if len(index) > len(shape):
        why = f"`{array.name}` has {len(shape)} axes"
    what = f"{'store to' if storing else 'load of'} {element(array, index)}: {why}"
    return error_at(thread, errors.OutOfBounds, what)


def bad_store(thread: Any, array: Any, index: tuple, value: Any) -> errors.EmulatorError:
    if value is UNDEFINED:
        return error_at(
            thread,
            errors.Divergence,
            f"store to {element(array, index)} of a value that a shuffle has read from a lane which has left the "
            "kernel, or which the block does not have: CUDA leaves open what it is",
        )
    return bad_index(thread, array, index, True)


def unwritten(thread: Any, array: Any, index: tuple) -> errors.EmulatorError:
    """A load of an element that no thread has written."""
    what = f"load of {element(array, index)}, which no thread has written"
    allocation = array.space.allocation
    hole = None
    if allocation is not None:
        hole = Hole(thread, allocation, array.offset(thread, index, False), array.nd.itemsize)
    else:
        what += ": a local array has no values at first"
    return errors.Uninitialized(what, *who_and_where(thread), hole)


def read_only(thread: Any, array: Any, index: tuple) -> errors.EmulatorError:
    return error_at(thread, errors.ReadOnly, f"store to {element(array, index)}: the array is constant in kernels")
