"""Memory of another process that only messages reach: what the software NIC sees of other nodes under MPI.

 lanes of the NIC     st, weak --> bytes that wait
 one of them          st, relaxed or release; atomic --> put ... put, flush; then the atomic, which is there on return
                                                         |
 the other process                                       its memory

A store of more than weak order takes along all bytes that wait, and returns when they are there. Before a release and
before an atomic all are there that were stored earlier, so that neither is ever seen before them. Nothing can be
loaded, and of the atomics there is fetch-and-add alone: a NIC of RDMA writes and fetch-and-adds needs no more.

While a message is under way, the kernels of this process stand still. The other process has to look after what comes:
see `ProcessWorld.add_poke`. One that is killed lets those wait for ever that send to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .access import FAULTS
from .faults import explain
from .kinds import KINDS, encode, wrap
from .memory import AddressSpace, Allocation
from .thread import Thread

if TYPE_CHECKING:
    from .memory import Describe

ADDABLE = ("s32", "s64")


class Channel(Protocol):
    """How bytes get to the memory of one other process."""

    def put(self, offset: int, data: bytes) -> None:
        """Start to write bytes."""

    def flush(self) -> None:
        """Wait until all that was put is there."""

    def fetch_and_add(self, offset: int, size: int, value: int) -> int:
        """Add to a signed number of 4 or 8 bytes, which wraps. Returns what it was, and the new one is there."""


class NoLoads(dict):
    """In place of an allocation's views for loads."""

    __slots__ = ()

    def __missing__(self, kind: str) -> NoReturn:
        raise TypeError("only stores and fetch-and-adds reach memory of another process")


class RemoteStores(dict):
    """kind -> what `Views` has for it: here a function that keeps the bytes until they are sent."""

    __slots__ = ("nbytes", "waiting")

    def __init__(self, nbytes: int):
        super().__init__()
        self.nbytes = nbytes
        self.waiting: dict[int, int] = {}  # offset -> byte

    def __missing__(self, kind: str) -> tuple:
        size = KINDS[kind].size

        def keep(_: Any, offset: int, value: Any) -> None:
            if offset + size > self.nbytes:
                raise IndexError
            self.waiting.update(enumerate(encode(value, kind), offset))

        entry = self[kind] = (None, 0, size - 1, keep, None, None)
        return entry


class RemoteAllocation(Allocation):
    """A run of bytes of another process."""

    __slots__ = ("channel", "waiting")

    def __init__(self, rank: int, name: str, nbytes: int, number: int, channel: Channel, describe: Describe | None):
        super().__init__(rank, name, memoryview(b""), number, describe=describe)
        self.nbytes = nbytes
        self.channel = channel
        self.loads = NoLoads()
        stores = RemoteStores(nbytes)
        self.stores = stores
        self.waiting = stores.waiting

    def flush(self) -> None:
        """Send what waits, and wait until it is there."""
        if self.waiting:
            for offset, data in runs(self.waiting):
                self.channel.put(offset, data)
            self.waiting.clear()
            self.channel.flush()

    def fetch_and_add(self, offset: int, kind: str, value: int) -> int:
        size = KINDS[kind].size
        if kind not in ADDABLE:
            raise TypeError(f"of the atomics, only fetch-and-adds of {' and '.join(ADDABLE)} reach another process")
        if offset % size or offset + size > self.nbytes:
            raise IndexError
        return self.channel.fetch_and_add(offset, size, wrap(value, kind))


def runs(waiting: dict[int, int]) -> Iterator[tuple[int, bytes]]:
    """Bytes side by side become one run: its offset and its bytes."""
    offsets = sorted(waiting)
    first = 0
    for i, offset in enumerate(offsets):
        if i + 1 == len(offsets) or offsets[i + 1] != offset + 1:
            yield offsets[first], bytes(waiting[at] for at in offsets[first : i + 1])
            first = i + 1


def map_remote(
    space: AddressSpace, rank: int, name: str, nbytes: int, channel: Channel, describe: Describe | None
) -> RemoteAllocation:
    """Give memory of rank `rank`, in another process, an address in a space. `space.free` undoes it."""
    allocation = RemoteAllocation(rank, name, nbytes, space.new_number(), channel, describe)
    space.enter(allocation)
    space.remotes[allocation] = allocation.flush
    return allocation


class ReachingThread(Thread):
    """A thread whose space may hold memory of other processes. Its memory model is "sc", but for what waits there."""

    __slots__ = ()

    def flush(self) -> None:
        flushes: dict[Any, Callable[[], None]] = self.block.launch.space.remotes
        for flush in flushes.values():
            flush()

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        if order == "release":
            self.flush()
        super().store(address, kind, value, order, scope)
        if order != "weak":
            self.flush()

    def modify(
        self, op: str, allocation: Allocation, offset: int, kind: str, operand: Any, compare: Any, address: int
    ) -> Any:
        self.flush()
        if not isinstance(allocation, RemoteAllocation):
            return super().modify(op, allocation, offset, kind, operand, compare, address)
        try:
            if op != "add":
                raise TypeError(f"of the atomics, only fetch-and-adds reach another process; this is {op}")
            old = allocation.fetch_and_add(offset, kind, operand)
        except FAULTS as fault:
            raise explain(self, address, kind, False, False, fault) from None
        self.world.has_changed = True
        return old
