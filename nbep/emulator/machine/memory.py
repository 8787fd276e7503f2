"""Memory as the kernels see it: bytes at addresses, one address space per rank.

An address is a number: the high 32 bits name a segment, the low 32 bits are a byte offset.  Segment numbers are never
reused and never shared by two ranks, so a stale address or another rank's address is always found out.  A peer's
allocation has a different address in every rank that opens it, as with CUDA IPC.

    rank 0's space              rank 1's space
      0x400001 -> `buffer` <------ 0x800002 (opened by its handle)
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from copy import copy
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import numpy as np

from .arrays import OFFSET_BITS, OFFSET_MASK, History, address_of, owner_of, span_of
from .cpu import Cpu
from .errors import EmulatorError, UseAfterFree
from .kinds import Views
from .names import name_of
from .source import Site

if TYPE_CHECKING:
    from ..process_lock import ProcessLock

NUMBER_BITS = 22  # segments a rank may ever have: 4 million
_POISON = 0xCB  # what never-written bytes look like to the host
WORD_BYTES = 8  # at most, of what the CPU stores as one
MOST_RETIRED = 1 << 12  # some hundred steps of a training loop; more would only look like a leak
_PAGED_BYTES = 1 << 20  # a shadow of so many bytes takes memory only where it is written

# Who stored: the block's name, the thread's index, the line.  Not the Thread or the Block: an allocation may outlive
# them.  And to the garbage collector a running greenlet is no container, so it stops tracking a tuple or dict that
# holds nothing else; a cycle through one is never freed, unless somebody breaks it.
Writer = tuple[str, int, Site | None]


class Lost(NamedTuple):
    """A value of a cell, and who wrote it; the smaller one that somebody has stored there since, or the same one."""

    value: int
    writer: Writer
    new: int
    by: Writer


Describe = Callable[[int], str]


class Allocation:
    """A run of bytes that several address spaces may map.

    Attributes:
        rank: the owner; name: for reports
        identity: the same object for all that map the same bytes; first_name, lineage: the same name and number for
            them, and in each run
        memory: the bytes; lowest, nbytes: the first that may be accessed, and the end of those
        address: of byte `base` in the owner's space
        loads, stores: typed views by access kind; empty once freed, `stores` empty when read-only
        may_change: whether a thread can store there, be it by another mapping
        watchers: 8-byte granule -> parked threads that poll a cell in it (a dict as an ordered set)
        writers: offset -> who stored last and where, for cells written with more than weak order
        wrapped: offset -> the first value too large or too small for such a cell that was stored there, and by whom
        lost: offset -> the highest value of such a cell that a store has not left there; see `Lost`
        shared: other processes write here too; lock: what they hold during an atomic, None if they make none
        unfenced: in shared memory, 16-byte granule -> last ordinary store: by which thread, after how many proxy fences
        nc_reads: 16-byte granule -> the kernel that last read it as constant, and which bytes
        pending: 16-byte granule -> stores on their way; see `delayed`
        versions: 16-byte granule -> the latest stores in memory, oldest first; see `delayed`
        last_stores, last_loads: 16-byte granule -> who stored last, and who has loaded since; see `checked`
        most_loads: 16-byte granule -> how many of those loads are kept; likewise
        overwritten: 16-byte granule -> what strong stores have stored over; likewise
        messages: offset -> what the last store to a cell tells; see `checked`
        parts: number of bytes -> its beginning, see `part`; viewed: the bytes of arrays that the host has had
    """

    __slots__ = (
        "rank", "name", "first_name", "lineage", "identity", "lowest", "nbytes", "memory", "number", "base", "describe",
        "loads", "stores", "writable",
        "watchers", "writers", "lost", "wrapped", "shared", "lock", "freed", "shadow", "unfenced", "nc_reads",
        "is_hidden", "may_change",
        "pending", "versions", "last_stores", "last_loads", "most_loads", "overwritten", "messages", "on_host",
        "signals", "parts", "viewed",
    )  # fmt: skip

    def __init__(
        self,
        rank: int,
        name: str,
        memory: memoryview,
        number: int = 0,
        *,
        base: int = 0,
        writable: bool = True,
        initialized: bool = True,
        describe: Describe | None = None,
        shared: bool = False,
        lowest: int = 0,
        end: int | None = None,
    ):
        self.rank = rank
        self.name = self.first_name = name
        self.identity = object()
        self.lowest = lowest
        self.nbytes = len(memory) if end is None else end
        self.memory = memory
        self.number = self.lineage = number
        self.base = base
        self.describe = describe
        self.writable = self.may_change = writable
        self.shared = shared
        self.lock: ProcessLock | None = None
        self.on_host = False
        self.signals: set[int] = set()  # the 16 bytes with a word that the CPU has written while kernels may run
        self.freed = False
        self.shadow: bytearray | mmap.mmap | None = None  # a zero for each byte that was never written
        if not initialized:
            is_large = self.nbytes >= _PAGED_BYTES
            self.shadow = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE) if is_large else bytearray(self.nbytes)
        self.is_hidden = False  # rows that no call has written: see `hide`
        self._view()
        self.watchers: dict[int, dict[Any, None]] = {}
        self.writers: dict[int, Writer] = {}
        self.lost: dict[int, Lost] = {}
        self.wrapped: dict[int, tuple[int, Writer]] = {}
        self.unfenced: dict[int, tuple[int, int]] = {}
        self.nc_reads: dict[int, tuple[Any, int]] = {}
        self.pending: dict[int, list[Any]] = {}
        self.versions: dict[int, list[Any]] = {}
        self.last_stores: dict[int, list[Any]] = {}
        self.last_loads: dict[int, dict[Any, Any]] = {}
        self.most_loads: dict[int, int] = {}
        self.overwritten: dict[int, Any] = {}
        self.messages: dict[int, Any] = {}
        self.parts: dict[int, Allocation] = {}
        self.viewed: set[tuple[int, int]] = set()

    def part(self, nbytes: int) -> Allocation:
        """Its first bytes, for a mapping that ends there: what lies behind them is out of bounds."""
        if nbytes not in self.parts:
            part = self.parts[nbytes] = copy(self)
            part.nbytes, part.memory, part.parts = nbytes, self.memory[:nbytes], {}
            part._view()
        return self.parts[nbytes]

    def _view(self) -> None:
        memory = self.memory[: self.nbytes]
        self.loads: dict[str, tuple] = Views(memory, self.shadow, False, self.lowest)
        self.stores: dict[str, tuple] = Views(memory, self.shadow, True, self.lowest) if self.writable else {}

    @classmethod
    def scratch(cls, rank: int, name: str, nbytes: int, describe: Describe | None = None) -> Allocation:
        """Memory outside every address space, as a block's shared memory is."""
        return cls(rank, name, _new_memory(nbytes), initialized=False, describe=describe)

    @property
    def address(self) -> int:
        return self.number << OFFSET_BITS | self.base

    @property
    def handle(self) -> Allocation:
        """What another rank of this process passes to `AddressSpace.open`."""
        return self

    def array(self, dtype: Any, offset: int = 0, count: int = -1, *, writable: bool = True) -> np.ndarray:
        """A 1-D NumPy view of `count` elements at byte `offset` (-1: as many as fit).

        The host may write a writable view at any time, so its bytes count as initialised from here on. Those that
        were never written look wrong to it rather than like zeros.
        """
        self.check_there()
        dtype = np.dtype(dtype)
        if count < 0:
            count = (self.nbytes - offset) // dtype.itemsize
        view = np.ndarray((count,), dtype, buffer=self.memory, offset=offset)
        self.viewed.add((offset, offset + view.nbytes))
        if self.shadow is not None:  # until the host looks, large memory takes no pages
            end = offset + count * dtype.itemsize
            for begin in range(offset, end, _PAGED_BYTES):
                size = min(_PAGED_BYTES, end - begin)
                memory, shadow = (np.ndarray(size, np.uint8, part, begin) for part in (self.memory, self.shadow))
                np.putmask(memory, shadow == 0, _POISON)
        if writable:
            self.mark_written(offset, count * dtype.itemsize)
        else:
            view.flags.writeable = False
        return view

    def check_there(self) -> None:
        """Stop a host that is about to access it once it is freed."""
        if self.freed:
            raise UseAfterFree(f"`{self.name}` of rank {self.rank} is freed")

    def mark_written(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Count bytes as initialised."""
        if self.shadow is None:
            return
        end = self.nbytes if nbytes is None else offset + nbytes
        if offset == 0 and end >= self.nbytes:
            self.shadow = None
            self._view()
        else:
            self.shadow[offset:end] = b"\1" * (end - offset)

    def hide(self, shadow: bytearray) -> None:
        """Count as initialised what is not 0 in a shadow, for loads through this mapping."""
        self.shadow = shadow
        self.is_hidden = True
        self.loads = Views(self.memory[: self.nbytes], self.shadow, False, self.lowest)

    def first_unwritten(self, offset: int, nbytes: int) -> int:
        """Offset of the first byte never written in a range, or -1."""
        if self.shadow is None:
            return -1
        found = self.shadow[offset : offset + nbytes].find(b"\0")  # on a copy: the search of mmap is slow
        return found if found < 0 else offset + found

    def read(self, offset: int, kind: str) -> Any:
        """The value in memory now, unchecked: for reports and for comparing polled cells."""
        view, shift, _, convert, _, _ = self.loads[kind]
        return view[offset >> shift] if convert is None else convert(view, offset)

    def cell(self, offset: int) -> str:
        """Names a byte for people: owner, allocation, the owner's own name for the cell, and the offset."""
        owner = f"`{self.name}`" if self.number == 0 else f"`{self.name}` of {name_of(self.rank)}"
        if self.describe is not None and self.lowest <= offset < self.nbytes:
            return f"{owner}: {self.describe(offset)} (byte {offset})"
        return f"{owner}: byte {offset}" + (f" (element 0 is byte {self.base})" if self.base else "")

    def release(self) -> None:
        """Forget the bytes; every later access through any mapping is a fault."""
        for part in self.parts.values():
            part.release()
        self.freed = True
        self.loads = {}
        self.stores = {}
        self.memory = memoryview(b"")
        self.shadow = None
        self.last_stores, self.last_loads, self.overwritten, self.messages, self.versions = {}, {}, {}, {}, {}


class Mapping:
    """An address range that one rank has for an array of the host or for a peer's allocation."""

    __slots__ = ("address", "number", "allocation", "uses", "keep")

    def __init__(self, address: int, number: int, allocation: Allocation, keep: Any = None):
        self.address = address
        self.number = number  # -1: the array lies in an allocation of this space, which is mapped anyway
        self.allocation = allocation
        self.uses = 1
        self.keep = keep


class AddressSpace:
    """What the addresses of one rank mean."""

    def __init__(self, rank: int, cpu: Cpu | None = None):
        self.rank = rank
        self.cpu = cpu or Cpu()
        self.segments: dict[int, Allocation] = {}
        self.retired: dict[int, str] = {}  # number -> what was there
        self.remotes: list[Any] = []  # memory of other processes; see `remote`
        self._next = 0
        self._arrays: dict[tuple, Mapping] = {}
        self._histories: dict[tuple[int, int], History] = {}
        self._num_histories = 0
        self._by_buffer: dict[int, tuple[Allocation, int]] = {}  # id of an allocation's buffer -> it, machine address
        self._lock = Lock()  # under MPI a launch's arrays are unmapped by another thread than maps them

    def new_number(self) -> int:
        """A segment number that was never used."""
        self._next += 1
        if self._next >> NUMBER_BITS:
            raise EmulatorError(f"rank {self.rank} has used up its {1 << NUMBER_BITS} segments")
        return (self.rank + 1) << NUMBER_BITS | self._next

    def allocate(self, nbytes: int, name: str, *, zero: bool = False, describe: Describe | None = None) -> Allocation:
        """`nbytes` of this rank's memory; unless `zero`, a kernel must write a byte before any kernel reads it."""
        if not 0 <= nbytes <= OFFSET_MASK:
            raise ValueError(f"nbytes: {nbytes} is outside 0 .. {OFFSET_MASK}")
        memory = _new_memory(nbytes)
        allocation = Allocation(self.rank, name, memory, self.new_number(), initialized=zero, describe=describe)
        self.enter(allocation)
        return allocation

    def read(self, allocation: Allocation, dtype: Any, offset: int, count: int, polls: bool = False) -> np.ndarray:
        """What the host reads: a copy of `count` elements as they are now. polls: while kernels write them."""
        there = allocation.array(dtype, offset, count, writable=False)
        if not polls:
            self.cpu.read(allocation, offset, there.nbytes, polls)
            return there.copy()
        values = np.empty(there.size, there.dtype)
        for i in range(there.size):  # one after the other: others may store between them
            self.cpu.read(allocation, offset + i * there.itemsize, there.itemsize, polls)
            values[i] = there[i]
        return values

    def write(self, allocation: Allocation, offset: int, values: np.ndarray) -> None:
        """What the host stores, maybe while kernels run; at most 8 bytes are a word, which they may poll."""
        allocation.check_there()
        self.cpu.write(allocation, offset, values.nbytes)
        allocation.array(values.dtype, offset, values.size)[:] = values.reshape(-1)
        if values.nbytes <= WORD_BYTES:
            allocation.signals.add(offset // 16)
        self.cpu.has_written(allocation, offset, values.nbytes)

    def adopt(
        self, memory: memoryview, name: str, *, shared: bool = True, describe: Describe | None = None
    ) -> Allocation:
        """An allocation over bytes that exist already; `shared`: other processes read and write them too."""
        memory = memory.cast("B") if memory.nbytes else memoryview(bytearray())
        allocation = Allocation(self.rank, name, memory, self.new_number(), describe=describe, shared=shared)
        self.enter(allocation)
        return allocation

    def enter(self, allocation: Allocation) -> None:
        """Let the addresses of its segment mean an allocation."""
        self.segments[allocation.number] = allocation
        if allocation.memory.nbytes:
            start = address_of(np.ndarray((1,), np.uint8, buffer=allocation.memory))
            self._by_buffer[id(allocation.memory.obj)] = allocation, start

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back; accesses through any rank's mapping fail from now on."""
        self.cpu.frees(allocation)
        self._retire(allocation.number, f"`{allocation.name}` of rank {allocation.rank}, {allocation.nbytes} bytes")
        if allocation.nbytes:
            self._by_buffer.pop(id(allocation.memory.obj), None)
        if allocation in self.remotes:
            self.remotes.remove(allocation)
        allocation.release()

    def open(self, handle: Allocation) -> Mapping:
        """Map a peer's allocation; its address here differs from its owner's."""
        if handle.freed:
            raise EmulatorError(f"`{handle.name}` of rank {handle.rank} is freed: rank {self.rank} cannot open it")
        number = self.new_number()
        self.segments[number] = handle
        return Mapping(number << OFFSET_BITS | handle.base, number, handle)

    def part_at(self, address: int, nbytes: int) -> Mapping:
        """Map the first bytes of what lies at an address of this space a second time."""
        return self.open(self.segments[address >> OFFSET_BITS].part(nbytes))

    def close(self, mapping: Mapping) -> None:
        """Undo `open`, or `part_at`."""
        allocation = mapping.allocation
        self.cpu.unmaps(allocation, self.rank)
        self._retire(mapping.number, f"the mapping of `{allocation.name}` of rank {allocation.rank}")

    def map_array(self, array: np.ndarray, name: str, writable: bool) -> Mapping:
        """Give a NumPy array an address: that of its element 0; strides may be any.

        The segment begins with the memory that the array is a view of, so all views of it have the same offsets and one
        history, and a misaligned view is found out here as on the device. Accesses outside the span of the array's
        elements are errors.
        """
        owner = owner_of(array)
        inside = self._inside(array, owner)
        if inside is not None:
            return inside
        span = span_of(array, owner)
        key = (address_of(array), *span[1:], writable)
        with self._lock:
            mapping = self._arrays.get(key)
            if mapping is not None:
                mapping.uses += 1
                return mapping
            number = self.new_number()
            memory, base, lowest, end = span
            allocation = Allocation(
                self.rank, name, memory, number, base=base, writable=writable, lowest=lowest, end=end
            )
            if array.size:
                self._history(owner, key[0] - base, name).enter(allocation)
            self.segments[number] = allocation
            mapping = self._arrays[key] = Mapping(allocation.address, number, allocation, (key, array))
            return mapping

    def _history(self, owner: np.ndarray, begin: int, name: str) -> History:
        """That of all mappings of an array's views, also of those that come later; begin: where their segments do."""
        key = id(owner), begin
        history = self._histories.get(key)
        if history is None:
            self._num_histories += 1
            dies = ref(owner, lambda _: self._histories.pop(key, None))
            history = self._histories[key] = History(name, -self._num_histories, dies)
        return history

    def _inside(self, array: np.ndarray, owner: np.ndarray) -> Mapping | None:
        """The address that an array has already, when it is a view of one of this space's allocations."""
        root: Any = owner if owner.base is None else owner.base
        found = self._by_buffer.get(id(root.obj if isinstance(root, memoryview) else root))
        if found is None:
            return None
        allocation, start = found
        return Mapping(allocation.number << OFFSET_BITS | (address_of(array) - start), -1, allocation)

    def unmap(self, mapping: Mapping) -> None:
        """Undo one `map_array`."""
        with self._lock:
            mapping.uses -= 1
            if mapping.number < 0 or mapping.uses:
                return
            del self._arrays[mapping.keep[0]]
            self._retire(mapping.number, f"the mapping of the array `{mapping.allocation.name}`")
            history = mapping.allocation.identity
            if isinstance(history, History):
                history.mapped.remove(mapping.allocation)
            mapping.allocation.release()
            mapping.keep = None

    def _retire(self, number: int, what: str) -> None:
        if number not in self.segments:
            raise EmulatorError(f"{what}: freed or closed twice")
        del self.segments[number]
        self.retired[number] = sys.intern(what)  # each launch maps arrays of the same names
        if len(self.retired) > MOST_RETIRED:  # the oldest lose their names
            del self.retired[next(iter(self.retired))]


def _new_memory(nbytes: int) -> memoryview:
    """Zeros, which take pages where they are touched."""
    words: Any = np.zeros(max(1, (nbytes + 15) // 16 * 2), np.uint64)
    return memoryview(words).cast("B")[:nbytes]
