"""Loads, stores and atomics of one GPU thread, and waiting by polling.

Each method is one primitive call, and so a point where the scheduler may let another thread go first.  `left` counts
how many calls remain before it does.  All checks of an access are on its only path: a missing segment, a bad offset
or a read-only array shows as a Python exception there, and `reports` explains it.
"""

from __future__ import annotations

import struct
import sys
from numbers import Integral
from types import FrameType
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, greenlet

from . import errors
from .carrier import OF_CARRIERS, carrier_for
from .faults import AccessFault, error_at
from .kinds import KINDS, wrap
from .memory import Allocation, Lost
from .names import name_of, title_of
from .orders import POLLED
from .source import Site, site_of

if TYPE_CHECKING:
    from .block import Block
    from .warp import Warp

    Base = Any  # there is none that is not a `Thread`
else:
    Base = object

FAULTS = (KeyError, IndexError, TypeError, ValueError, OverflowError, struct.error)
OPS = {
    "add": lambda old, operand, _: old + operand,
    "exch": lambda old, operand, _: operand,
    "cas": lambda old, operand, compare: operand if old == compare else old,
    "max": lambda old, operand, _: max(old, operand),
    "min": lambda old, operand, _: min(old, operand),
    "or": lambda old, operand, _: old | operand,
    "and": lambda old, operand, _: old & operand,
}
MAX_EMPTY_SPINS = 100_000
NO_READER = None, 0  # has read 16 bytes as constant
COUNTS = {"s32": 4, "s64": 8}  # kinds of cells that say how far somebody is

# What a thread polled: the allocation, the offset, the kind and the value seen.
Cell = tuple[Allocation, int, str, Any]


def writes(op: str, old: Any, compare: Any) -> bool:
    """Whether an atomic has written. A compare-and-swap that fails has only read: it releases nothing.

    Source: PTX ISA, Memory Consistency Model, Operation types: atomics are writes "if they result in a write"
    """
    return op != "cas" or bool(old == compare)


class AccessingThread(Base):
    """A thread with an address space.  Its memory model is "sc": every store is visible to all at once.

    Attributes:
        rank, block_idx, thread_idx, lane, warp, grid_dim, block_dim: who it is (1-D)
        switch: have it run until it parks or has left
        waits_for: while parked, what for: a list of cells, a barrier, a collective or a text
    """

    __slots__ = (
        "rank", "block_idx", "thread_idx", "lane", "warp", "grid_dim", "block_dim",
        "world", "block", "warp_state", "segments", "shared", "runnable", "park",
        "left", "polled", "waits_for", "deadline", "fault_deadline", "may_time_out", "num_time_outs", "expired",
        "waited_once", "has_looked_again",
        "exited", "empty_spins", "has_news", "bulk", "fenced", "reluctance", "serving",
        "carrier", "switch", "__weakref__",
    )  # fmt: skip

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        self.carrier: Any = carrier_for(self, hub)  # None once it has left
        self.switch: Any = self.carrier.switch
        launch = block.launch
        self.world = launch.world
        self.block = block
        self.rank = launch.rank
        self.block_idx = block.index
        self.thread_idx = thread_idx
        self.lane = thread_idx & 31
        self.warp = thread_idx >> 5
        self.grid_dim = launch.grid
        self.block_dim = launch.block
        self.warp_state = warp
        self.segments = launch.space.segments
        self.shared: Allocation = block.shared
        self.runnable = launch.world.runnable
        self.park = hub.switch
        self.left = 0
        self.polled: dict[tuple[Allocation, int], Cell] = {}
        self.waits_for: Any = None
        self.deadline = 0
        self.fault_deadline: int | None = None  # the deadline of a wait that reports a fault if it times out
        self.may_time_out = False  # its wait ends at its deadline where nothing else can go on: that is no fault
        self.num_time_outs = 0  # of such waits since a cell changed that it waited for
        self.expired = False
        self.waited_once = False
        self.has_looked_again = False  # since a cell changed that it waited for; see the scheduler
        self.exited = False
        self.empty_spins = 0
        self.has_news = False  # its last turn of a polling loop ended because a cell had changed, or the time was over
        self.bulk: Any = None
        self.fenced = 0
        self.reluctance = warp.reluctance
        self.serving: tuple[int, int] | None = None  # the queue pair and the entry that a NIC's thread is about

    def describe(self) -> str:
        launch = self.block.launch
        return describe_thread(self.rank, launch.name, launch.number, self.block_idx, self.thread_idx)

    @property
    def gr_frame(self) -> FrameType | None:
        """Where it stands, as a greenlet says it; None if it has not started, has left, or runs now."""
        frame = None if self.carrier is None else self.carrier.gr_frame
        return frame if frame is not None and frame.f_code is not OF_CARRIERS else None

    def end(self) -> None:
        """Have it go no further."""
        if self.carrier:
            self.carrier.throw(GreenletExit)
        self.carrier = self.switch = None  # which refer back to it

    def run(self) -> None:
        """The thread's life: the kernel, then the bookkeeping of leaving."""
        launch = self.block.launch
        launch.function(*launch.args)
        self.leave()

    def leave(self) -> None:
        self.exited = True
        self.waits_for = None
        self.polled.clear()
        self.world.has_changed = True
        self.block.thread_left(self)

    def fault(
        self, address: int, kind: str, storing: bool, shared: bool, cause: Exception, polls: bool = False
    ) -> Exception:
        """The error for an access that has failed; see `AccessFault`."""
        return self.world.error_of(AccessFault(self, address, kind, storing, shared, cause, polls))

    def pause(self) -> None:
        """Let another thread go first."""
        self.runnable.append(self)
        self.park()

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        """The value at a global address; an int, an np.float32 or a tuple of u32, by kind."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        try:
            allocation = self.segments[address >> 32]
            offset = address & 0xFFFFFFFF
            view, shift, misfit, convert, shadow, written = allocation.loads[kind]
            if offset & misfit:
                raise IndexError
            if convert is None:
                value = view[offset >> shift]
                if shadow is not None and shadow[offset >> shift] != written:
                    raise IndexError
            else:
                value = convert(view, offset)
                if shadow is not None and shadow.find(b"\0", offset, offset + misfit + 1) >= 0:
                    raise IndexError
        except FAULTS as fault:
            raise self.fault(address, kind, False, False, fault, order in POLLED) from None
        if order in POLLED:
            self.note_polled(allocation, offset, kind, value)
        elif order == "nc" and allocation.may_change:
            self.note_nc(allocation, offset, misfit + 1)
        return value

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        """Write `value` at a global address; integers wrap."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        try:
            allocation = self.segments[address >> 32]
            offset = address & 0xFFFFFFFF
        except FAULTS as fault:
            raise self.fault(address, kind, True, False, fault) from None
        if order != "weak":
            self.note_writer(allocation, offset, kind, value, site_of(sys._getframe(1)))
        self.write(allocation, offset, kind, value, address)
        self.world.has_changed = True
        if allocation.watchers:
            self.notify(allocation, offset, KINDS[kind].size)

    def write(self, allocation: Allocation, offset: int, kind: str, value: Any, address: int) -> None:
        """The bytes of a store, checked."""
        if allocation.nc_reads:
            self.check_nc(allocation, offset, KINDS[kind].size)
        try:
            view, shift, misfit, convert, shadow, written = allocation.stores[kind]
            if offset & misfit or offset < 0:
                raise IndexError
            if convert is None:
                index = offset >> shift
                try:
                    view[index] = value
                except (ValueError, OverflowError):
                    view[index] = wrap(value, kind)
                if shadow is not None:
                    shadow[index] = written
            else:
                convert(view, offset, value)
                if shadow is not None:
                    shadow[offset : offset + misfit + 1] = written
        except FAULTS as fault:
            raise self.world.error_of(
                AccessFault(self, address, kind, True, allocation is self.shared, fault)
            ) from None

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        """Replace the value at a global address in one step; the old value."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        try:
            allocation = self.segments[address >> 32]
        except FAULTS as fault:
            raise self.fault(address, kind, False, False, fault) from None
        if allocation.on_host and scope == "sys":
            cell = allocation.cell(address & 0xFFFFFFFF)
            raise error_at(self, errors.HostAtomic, f"atomic {op} of scope sys on {cell}: memory of the host")
        return self.modify(op, allocation, address & 0xFFFFFFFF, kind, operand, compare, address)

    def modify(
        self, op: str, allocation: Allocation, offset: int, kind: str, operand: Any, compare: Any, address: int
    ) -> Any:
        """The read, the arithmetic and the write of an atomic."""
        lock = allocation.lock
        if lock is not None:
            lock.acquire()
        try:
            view, shift, misfit, convert, _, _ = allocation.loads[kind]
            if offset & misfit or offset < 0 or allocation.first_unwritten(offset, misfit + 1) >= 0:
                raise IndexError
            old = view[offset >> shift] if convert is None else convert(view, offset)
            new = OPS[op](old, operand, compare)
            self.write(allocation, offset, kind, new, address)
        except FAULTS as fault:
            raise self.world.error_of(
                AccessFault(self, address, kind, False, allocation is self.shared, fault, True)
            ) from None
        finally:
            if lock is not None:
                lock.release()
        now = allocation.read(offset, kind)
        if now == old:
            self.polled[allocation, offset] = (allocation, offset, kind, old)  # a failed compare-and-swap is a poll
        else:
            self.world.has_changed = True
            allocation.writers[offset] = writer = (self.block.name, self.thread_idx, site_of(sys._getframe(1)))
            if kind in COUNTS and now != new:
                allocation.wrapped.setdefault(offset, (int(new), writer))
            if allocation.watchers:
                self.notify(allocation, offset, misfit + 1)
        return old

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        """`load` from the block's shared memory, whose addresses start at 0."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        allocation = self.shared
        try:
            view, shift, misfit, convert, shadow, written = allocation.loads[kind]
            if address & misfit or address < 0:
                raise IndexError
            if convert is None:
                value = view[address >> shift]
                if shadow is not None and shadow[address >> shift] != written:
                    raise IndexError
            else:
                value = convert(view, address)
                if shadow is not None and shadow.find(b"\0", address, address + misfit + 1) >= 0:
                    raise IndexError
        except FAULTS as fault:
            raise self.fault(address, kind, False, True, fault, order in POLLED) from None
        if order in POLLED:
            self.note_polled(allocation, address, kind, value)
        return value

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        """`store` to the block's shared memory."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        allocation = self.shared
        if order != "weak":
            self.note_writer(allocation, address, kind, value, site_of(sys._getframe(1)))
        self.write(allocation, address, kind, value, address)
        self.world.has_changed = True
        allocation.unfenced[address >> 4] = (self.thread_idx, self.block.proxy_fences)
        if allocation.watchers:
            self.notify(allocation, address, KINDS[kind].size)

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        """`atomic` on the block's shared memory."""
        self.left -= 1
        if self.left < 0:
            self.pause()
        return self.modify(op, self.shared, address, kind, operand, compare, address)

    def note_writer(self, allocation: Allocation, offset: int, kind: str, value: Any, site: Site | None) -> None:
        """This thread is about to store to a cell with more than weak order: note who, and what is lost by it."""
        writer = self.block.name, self.thread_idx, site
        before = allocation.writers.get(offset)
        if kind in COUNTS and isinstance(value, Integral) and (int(value) >> 8 * COUNTS[kind] - 1) not in (0, -1):
            allocation.wrapped.setdefault(offset, (int(value), writer))
        if before is not None and kind in COUNTS and isinstance(value, Integral) and not allocation.freed:
            old = int.from_bytes(allocation.memory[offset : offset + COUNTS[kind]], sys.byteorder, signed=True)
            if value < old or (value == old and before[:2] != writer[:2]):
                kept = allocation.lost.get(offset)
                if kept is None or kept.value <= old or kept.by[0] != writer[0]:
                    allocation.lost[offset] = Lost(old, before, int(value), writer)
        allocation.writers[offset] = writer

    def note_polled(self, allocation: Allocation, offset: int, kind: str, value: Any) -> None:
        """Remember what a load has seen that may be a wait's. The latest comes last, also if it is looked at again."""
        cell = allocation, offset
        self.polled.pop(cell, None)
        self.polled[cell] = allocation, offset, kind, value

    def note_nc(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        """Remember that this thread's kernel takes some bytes (inside 16 aligned ones) for constant."""
        launch = self.block.launch
        reader, before = allocation.nc_reads.get(offset >> 4, NO_READER)
        mask = ((1 << nbytes) - 1) << (offset & 15)
        if reader is not launch:
            allocation.nc_reads[offset >> 4] = launch, mask
        elif mask & ~before:
            allocation.nc_reads[offset >> 4] = launch, before | mask

    def check_nc(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        """Stop the run when bytes change that a kernel still running takes for constant."""
        reads = allocation.nc_reads
        for granule in range(offset >> 4, (offset + nbytes + 15) >> 4):
            if granule in reads:
                launch, mask = reads[granule]
                low = max(offset - 16 * granule, 0)
                if launch.done:
                    del reads[granule]
                elif mask >> low & ((1 << min(offset + nbytes - 16 * granule, 16) - low) - 1):
                    reader = f"kernel `{launch.name}` of {name_of(launch.rank)}, which still runs,"
                    message = f"a store changes {allocation.cell(offset)}, which {reader} has read with ld.global.nc"
                    raise error_at(self, errors.NonCoherent, message)

    def not_constant(self, allocation: Allocation, offset: int) -> errors.EmulatorError:
        """The error for bytes that this thread reads as constant, and that have changed since its kernel began."""
        message = f"ld.global.nc of {allocation.cell(offset)}, to which a store has come since this kernel began"
        return error_at(self, errors.NonCoherent, message)

    def notify(self, allocation: Allocation, offset: int, nbytes: int, site: Site | None = None) -> None:
        """Bytes have changed: note who did it (`site`: where, if not here) and wake those who poll them."""
        watchers = allocation.watchers
        for granule in range(offset >> 3, (offset + nbytes + 7) >> 3):
            if granule in watchers:
                allocation.writers[offset] = (self.block.name, self.thread_idx, site or site_of(sys._getframe(1)))
                wake_watchers(allocation, granule)

    def spin(self, deadline_ns: int) -> bool:
        """One turn of a polling loop.  True: the wait times out.

        Parks until a cell polled since the last spin() holds another value; if one does already, only yields. Lanes
        that poll cells of their own and meet at a collective in each turn: one with news brings the others there.
        """
        polled = self.polled
        self.left -= 1
        self.waited_once = False
        self.has_news = True
        if self.world.overdue(self, deadline_ns):
            polled.clear()
            return True
        if not polled:  # another lane polls for this one, and they will meet at a collective
            self.empty_spins += 1
            if self.empty_spins > MAX_EMPTY_SPINS:
                message = "a loop waits without polling: only volatile, relaxed and acquire loads count"
                raise error_at(self, errors.EmulatorError, message)
            self.has_news = False
            self.pause()
            return False
        self.empty_spins = 0
        cells = list(polled.values())
        polled.clear()
        if self.changed(cells):
            self.pause()
            return False
        if self.warp_state.is_missed(self):
            self.has_news = False
            self.pause()
            return False
        return self.watch(cells, deadline_ns)

    def watch(self, cells: list[Cell], deadline_ns: int) -> bool:
        """Park until a cell changes; True when time ran out instead."""
        for allocation, offset, _, _ in cells:
            allocation.watchers.setdefault(offset >> 3, {})[self] = None
        self.waits_for = cells
        self.deadline = deadline_ns
        self.expired = False
        self.world.parks += 1
        self.world.polling[self] = None
        self.park()
        return self.expired

    def unwatch(self) -> None:
        """Leave the watch lists and become runnable."""
        for allocation, offset, _, _ in self.waits_for:
            watchers = allocation.watchers
            there = watchers.get(offset >> 3)
            if there is not None:
                there.pop(self, None)
                if not there:
                    del watchers[offset >> 3]
        del self.world.polling[self]
        self.runnable.append(self)

    def changed(self, cells: list[Cell]) -> bool:
        """Whether a polled cell holds another value than the thread saw (or is freed: looking again reports that)."""
        return any(
            allocation.freed or self.peek(allocation, offset, kind) != value
            for allocation, offset, kind, value in cells
        )

    def peek(self, allocation: Allocation, offset: int, kind: str) -> Any:
        """What this thread would load from a cell now."""
        return allocation.read(offset, kind)


def describe_thread(rank: int, kernel: str, launch: int, block_idx: int, thread_idx: int) -> str:
    warp, lane = divmod(thread_idx, 32)
    where = f"block {block_idx}, warp {warp}, lane {lane} (thread {thread_idx})"
    return f"{name_of(rank)}, {title_of(kernel, launch)}, {where}"


def wake_watchers(allocation: Allocation, granule: int) -> None:
    """Wake the threads that poll a cell of an 8-byte granule and have not seen its present value."""
    threads = allocation.watchers.get(granule)
    if threads:
        for thread in list(threads):
            if thread.changed(thread.waits_for):
                thread.has_looked_again = False
                thread.num_time_outs = 0
                thread.unwatch()
