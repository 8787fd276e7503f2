"""Memory of another process that only messages reach: what the software NIC sees of other ranks.

 lanes of a warp      st, weak --> bytes that wait
 one of them          a release, or an atomic  --> put ... put, flush; then the release or the atomic itself
                                                   |
 the other process                                 its memory

A block's stores to such memory are there before a release or an atomic of the same block is seen. A store of more than
weak order leaves at once, with all before it, and no thread waits for it. Nothing can be loaded, there are no bulk
copies, and of the atomics there is fetch-and-add alone: a NIC of RDMA writes and fetch-and-adds needs no more.

A message is an *errand*: a thread of its own for each peer, the *wire*, runs it, and who has sent it is parked until it
is done. So other kernels go on, and other blocks of the same one, also if it is never done, because the peer has been
killed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .access import FAULTS, wake_watchers
from .kinds import KINDS, encode, wrap
from .memory import AddressSpace, Allocation
from .orders import RELEASES
from .thread import Thread, current_thread
from .world import NEVER

if TYPE_CHECKING:
    from .block import Block
    from .memory import Describe

ADDABLE = ("s32", "s64")
Submit = Callable[[Callable[[], object]], None]


class Channel(Protocol):
    """How bytes get to the memory of one other process. It is called by the wire."""

    def put(self, offset: int, data: bytes) -> None:
        """Start to write bytes."""

    def flush(self) -> None:
        """Wait until all that was put is there."""

    def fetch_and_add(self, offset: int, size: int, value: int) -> int:
        """Add to a signed number of 4 or 8 bytes, which wraps. Returns what it was, when the new one is there."""
        ...


class Errand:
    """Something that is under way to another process.

    It passes for an Allocation of one cell, whether it is done, so that threads wait for it as for any polled cell.
    """

    freed = False
    number = 0
    pending: dict[int, list[Any]] = {}  # noqa: RUF012 - never filled

    def __init__(self, name: str, work: Callable[[], Any]):
        self.name = name
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.watchers: dict[int, dict[Thread, None]] = {}
        self.writers: dict[int, Any] = {}

    def run(self) -> None:
        """By the wire."""
        try:
            self.result = self.work()
        except BaseException as error:  # raised where the errand is waited for
            self.error = error

    def finish(self) -> None:
        """By the kernel thread, afterwards."""
        self.is_done = True
        wake_watchers(self, 0)  # type: ignore[arg-type]

    def read(self, offset: int, kind: str) -> bool:
        return self.is_done

    def cell(self, offset: int) -> str:
        return self.name


class Wire:
    """Runs errands in their order, in a thread of its own. submit: how the kernel thread learns that one is done."""

    def __init__(self, submit: Submit):
        self._submit = submit
        self._errands: SimpleQueue[Errand | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="nbep-wire", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (errand := self._errands.get()) is not None:
            errand.run()
            with suppress(BaseException):  # a world that has failed takes nothing any more
                self._submit(errand.finish)

    def send(self, errand: Errand) -> None:
        self._errands.put(errand)

    def close(self) -> None:
        """End the thread. Nothing is under way."""
        self._errands.put(None)
        self._thread.join()


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
        self.waiting: dict[Block, dict[int, int]] = {}  # who stored -> offset -> byte

    def __missing__(self, kind: str) -> tuple:
        size = KINDS[kind].size

        def keep(_: Any, offset: int, value: Any) -> None:
            if offset + size > self.nbytes:
                raise IndexError
            bytes_of_block = self.waiting.setdefault(current_thread().block, {})
            bytes_of_block.update(enumerate(encode(value, kind), offset))

        entry = self[kind] = (None, 0, size - 1, keep, None, None)
        return entry


class RemoteAllocation(Allocation):
    """A run of bytes of another process. `latest`: the errand that a block sent last; when it is done, all are."""

    __slots__ = ("channel", "latest", "waiting", "wire")

    def __init__(
        self, rank: int, name: str, nbytes: int, number: int, channel: Channel, wire: Wire, describe: Describe | None
    ):
        super().__init__(rank, name, memoryview(b""), number, describe=describe)
        self.nbytes = nbytes
        self.channel = channel
        self.wire = wire
        self.loads = NoLoads()
        stores = RemoteStores(nbytes)
        self.stores = stores
        self.waiting = stores.waiting
        self.latest: dict[Block, Errand] = {}

    def send_stores(self, block: Block) -> None:
        """Send what a block has stored."""
        waiting = self.waiting.pop(block, None)
        if waiting is not None:

            def put() -> None:
                for offset, data in runs(waiting):
                    self.channel.put(offset, data)
                self.channel.flush()

            self._send(block, "stores", put)

    def send_add(self, block: Block, offset: int, kind: str, value: int) -> Errand:
        """Send a fetch-and-add."""
        size = KINDS[kind].size
        if kind not in ADDABLE:
            raise TypeError(f"of the atomics, only fetch-and-adds of {' and '.join(ADDABLE)} reach another process")
        if offset % size or offset + size > self.nbytes:
            raise IndexError
        number = wrap(value, kind)
        return self._send(block, "a fetch-and-add", lambda: self.channel.fetch_and_add(offset, size, number))

    def _send(self, block: Block, what: str, work: Callable[[], Any]) -> Errand:
        errand = self.latest[block] = Errand(f"{what} on the way to `{self.name}` of rank {self.rank}", work)
        self.wire.send(errand)
        return errand

    def release(self) -> None:
        self.wire.close()
        super().release()


def runs(waiting: dict[int, int]) -> Iterator[tuple[int, bytes]]:
    """Bytes side by side become one run: its offset and its bytes."""
    offsets = sorted(waiting)
    first = 0
    for i, offset in enumerate(offsets):
        if i + 1 == len(offsets) or offsets[i + 1] != offset + 1:
            yield offsets[first], bytes(waiting[at] for at in offsets[first : i + 1])
            first = i + 1


def map_remote(
    space: AddressSpace, rank: int, name: str, nbytes: int, channel: Channel, submit: Submit, describe: Describe | None
) -> RemoteAllocation:
    """Give memory of rank `rank`, in another process, an address in a space. `space.free` undoes it."""
    allocation = RemoteAllocation(rank, name, nbytes, space.new_number(), channel, Wire(submit), describe)
    space.enter(allocation)
    space.remotes.append(allocation)
    return allocation


class ReachingThread(Thread):
    """A thread whose space may hold memory of other processes. Its memory model is "sc", but for what waits there."""

    __slots__ = ()

    def send_stores(self) -> None:
        """Send what the block has stored in memory of other processes."""
        for allocation in self.block.launch.space.remotes:
            allocation.send_stores(self.block)

    def flush(self) -> None:
        """Wait until all of it is there. Other blocks' stores that it knows of came with a release: they are there."""
        self.send_stores()
        for allocation in self.block.launch.space.remotes:
            if self.block in allocation.latest:
                self.wait_for(allocation.latest[self.block])

    def wait_for(self, errand: Errand) -> Any:
        """Park until an errand is done; its result."""
        while not errand.is_done:
            cell: Any = (errand, 0, "done", False)
            self.watch([cell], NEVER)
        if errand.error is not None:
            raise errand.error
        return errand.result

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        if order == "release":
            self.flush()
        super().store(address, kind, value, order, scope)
        if order != "weak":
            self.send_stores()

    def fence(self, order: str, scope: str) -> None:
        if order in RELEASES:
            self.flush()
        super().fence(order, scope)

    def modify(
        self, op: str, allocation: Allocation, offset: int, kind: str, operand: Any, compare: Any, address: int
    ) -> Any:
        self.flush()
        if not isinstance(allocation, RemoteAllocation):
            return super().modify(op, allocation, offset, kind, operand, compare, address)
        try:
            if op != "add":
                raise TypeError(f"of the atomics, only fetch-and-adds reach another process; this is {op}")
            errand = allocation.send_add(self.block, offset, kind, operand)
        except FAULTS as fault:
            raise self.fault(address, kind, False, False, fault) from None
        return self.wait_for(errand)
