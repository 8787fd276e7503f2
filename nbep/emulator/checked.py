"""The memory model "checked": an access that nothing orders behind a store to the same bytes is an error.

A store is seen by all at once, as with "sc". But a thread may only meet the bytes that another one has stored if it can
know of the store: after a release, a barrier or a syncwarp of the one who stored, and whatever takes that on to this
thread: an acquire of the released value, the same barrier, any chain of them, or the start of a kernel. Two accesses
of which neither is weak (relaxed, volatile, release, acquire, atomic) may meet without that.

What a thread knows is a `Knowledge`: how far it knows the releases of each block. Releases are numbered in the order in
which they happen; a store is known to whoever knows its block up to the first release after it. So knowledge is exact
between blocks; inside a block, a thread that has synchronised with one other knows what all have released.

The copy engine reads global memory with the knowledge that its thread had at its last fence.proxy.async.global. What it
writes there counts as its thread's once that has waited for it; what it writes to shared memory is known to those who
have waited on the mbarrier.

A store that comes too early for another thread's load before it is not found.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from . import errors
from .access import POLLED, describe_thread
from .faults import error_at
from .kinds import KINDS
from .memory import OFFSET_MASK, Allocation
from .source import Site, describe_site, site_of
from .thread import FULL_MASK, Thread
from .warp import Warp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from greenlet import greenlet

    from .block import Block

SCOPES = {"cta": 1, "gpu": 2, "sys": 3}
WEAK = frozenset(("weak", "nc", "bulk"))
RELEASES = frozenset(("release", "acq_rel"))
ACQUIRES = frozenset(("acquire", "acq_rel"))
NOT_YET = 1 << 62  # the number of a release that has not happened
NOT_WAITED = NOT_YET + 1  # nor can it, before the thread has waited for its bulk copy
GRANULE_BITS = 4  # writes are looked up by 16 aligned bytes

Numbers = dict[int, int]  # block -> its latest release that is known. Never changed once made.


class Knowledge(NamedTuple):
    """What a thread knows by its own accesses, and what the copy engine knows when the thread starts a copy."""

    plain: Numbers
    engine: Numbers


class Owner(NamedTuple):
    """Who stored. Compared by identity: there is one for each thread of each launch."""

    rank: int
    kernel: str
    block: int  # a number that no other block of the run has
    block_idx: int
    thread_idx: int


class Message(NamedTuple):
    """What the last store to a cell tells those who acquire it."""

    knowledge: Knowledge
    scope: int
    rank: int
    block: int


class Write:
    """The last store to some bytes.

    released: the number of the first release of its thread after it; at_exit: that was the end of the kernel
    """

    __slots__ = ("owner", "begin", "end", "order", "site", "released", "at_exit")

    def __init__(self, owner: Owner, begin: int, end: int, order: str, site: Site | None):
        self.owner = owner
        self.begin = begin
        self.end = end
        self.order = order
        self.site = site
        self.released = NOT_YET
        self.at_exit = False


def join(knowledge: Iterable[Knowledge]) -> Knowledge:
    """What those who meet know together."""
    plain: Numbers = {}
    engine: Numbers = {}
    for one in {id(one): one for one in knowledge}.values():
        plain = _later(plain, one.plain)
        engine = _later(engine, one.engine)
    return Knowledge(plain, engine)


def _later(a: Numbers, b: Numbers) -> Numbers:
    if not a or a is b:
        return b
    new = {block: number for block, number in b.items() if a.get(block, 0) < number}
    return {**a, **new} if new else a


NOTHING = Knowledge({}, {})


class CheckedThread(Thread):
    """A thread whose accesses are checked against the stores of others."""

    __slots__ = (
        "owner", "engine", "start", "knowledge", "fence_message", "heard", "unreleased", "unwaited", "last_poll",
    )  # fmt: skip

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        launch = block.launch
        self.owner = Owner(self.rank, launch.name, block.serial, block.index, thread_idx)
        self.engine = Owner(*self.owner)  # the copy engine, as long as this thread has not waited for it
        self.start = self.world.releases  # whatever was released before is known
        self.knowledge = NOTHING
        self.fence_message: Message | None = None  # what a store takes along that no release orders
        self.heard = NOTHING  # what relaxed loads have met, for a fence to acquire
        self.unreleased: list[Write] = []
        self.unwaited: list[Write] = []  # of bulk copies
        self.last_poll: tuple[Allocation, int, str] | None = None

    # --- releases and acquires ----------------------------------------------------------------------------------

    def release(self) -> None:
        """Number the stores since the last release."""
        self.world.releases += 1
        for write in self.unreleased:
            write.released = self.world.releases
        self.unreleased.clear()

    def with_latest_release(self, knowledge: Knowledge) -> Knowledge:
        return knowledge._replace(plain={**knowledge.plain, self.owner.block: self.world.releases})

    def message(self, scope: str) -> Message:
        """Release, and say what whoever acquires this may know."""
        self.release()
        return Message(self.with_latest_release(self.knowledge), SCOPES[scope], self.rank, self.owner.block)

    def reaches(self, message: Message, scope: int) -> bool:
        """Whether a message comes to this thread, by the scopes of both ends."""
        needed = 1 if message.block == self.owner.block else 2 if message.rank == self.rank else 3
        return message.scope >= needed and scope >= needed

    def receive(self, allocation: Allocation, offset: int, order: str, scope: str) -> None:
        """A strong access has read a cell."""
        self.last_poll = allocation, offset, order
        message = allocation.messages.get(offset)
        if message is None or not self.reaches(message, SCOPES[scope]):
            return
        if order in ACQUIRES:
            self.knowledge = join((self.knowledge, message.knowledge))
        else:
            self.heard = join((self.heard, message.knowledge))

    def send(self, allocation: Allocation, offset: int, order: str, scope: str, modifies: bool) -> None:
        """A store to a cell; one that modifies it, as atomics do, passes on what the cell said before."""
        message = None
        if order != "weak":
            message = self.message(scope) if order in RELEASES else self.fence_message
        before = allocation.messages.get(offset) if modifies else None
        if message is not None and before is not None:
            widest = max(message, before, key=lambda one: one.scope)
            message = widest._replace(knowledge=join((before.knowledge, message.knowledge)))
        if message is not None or before is not None:
            allocation.messages[offset] = message or before
        elif offset in allocation.messages:
            del allocation.messages[offset]

    def fence(self, order: str, scope: str) -> None:
        super().fence(order, scope)
        if order in RELEASES:
            self.knowledge = join((self.knowledge, self.heard))
            self.fence_message = self.message(scope)

    def fence_proxy_async_global(self) -> None:
        super().fence_proxy_async_global()
        self.knowledge = self.knowledge._replace(engine=self.knowledge.plain)

    def syncwarp(self, mask: int = FULL_MASK) -> None:
        self.release()
        collective = self._collect("syncwarp", mask, self.knowledge)
        if collective.result is None:
            collective.result = self.with_latest_release(join(collective.values.values()))
        self.knowledge = collective.result

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> Any:
        self.release()
        barrier = super().meet(barrier_id, num_threads, predicate)
        if barrier.result is None:
            barrier.result = self.with_latest_release(join(barrier.knowledge))
        self.knowledge = barrier.result
        return barrier

    def barrier_arrive(self, barrier_id: int, num_threads: int) -> None:
        self.release()
        super().barrier_arrive(barrier_id, num_threads)

    def mbarrier_arrive(self, address: int) -> None:
        self._arrive(address)
        super().mbarrier_arrive(address)

    def mbarrier_arrive_expect_tx(self, address: int, nbytes: int) -> None:
        self._arrive(address)
        super().mbarrier_arrive_expect_tx(address, nbytes)

    def _arrive(self, address: int) -> None:
        mbarrier = self.block.mbarriers.get(address)
        if mbarrier is not None:
            self.release()
            mbarrier.knowledge = self.with_latest_release(join((mbarrier.knowledge or NOTHING, self.knowledge)))

    def mbarrier_try_wait(self, address: int, parity: int) -> bool:
        done = super().mbarrier_try_wait(address, parity)
        if done:
            arrived = self.block.mbarriers[address].knowledge or NOTHING
            self.knowledge = self.with_latest_release(join((self.knowledge, arrived)))
        return done

    def leave(self) -> None:
        self.unreleased += self.unwaited
        for write in self.unreleased:
            write.at_exit = True
        self.release()
        super().leave()

    # --- accesses -----------------------------------------------------------------------------------------------

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        value = super().load(address, kind, order, scope)
        allocation, offset = self.segments[address >> 32], address & OFFSET_MASK
        self.check(allocation, offset, KINDS[kind].size, order, self.knowledge.plain)
        if order in POLLED:
            self.receive(allocation, offset, order, scope)
        return value

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        super().store(address, kind, value, order, scope)
        allocation, offset = self.segments[address >> 32], address & OFFSET_MASK
        self.send(allocation, offset, order, scope, modifies=False)
        self.note(allocation, offset, KINDS[kind].size, order)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        old = super().atomic(op, address, kind, operand, order, scope, compare)
        self._modified(self.segments[address >> 32], address & OFFSET_MASK, kind, order, scope)
        return old

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        value = super().load_shared(address, kind, order)
        self.check(self.shared, address, KINDS[kind].size, order, self.knowledge.plain)
        if order in POLLED:
            self.receive(self.shared, address, order, "cta")
        return value

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        super().store_shared(address, kind, value, order)
        self.send(self.shared, address, order, "cta", modifies=False)
        self.note(self.shared, address, KINDS[kind].size, order)

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        old = super().atomic_shared(op, address, kind, operand, order, compare)
        self._modified(self.shared, address, kind, order, "cta")
        return old

    def _modified(self, allocation: Allocation, offset: int, kind: str, order: str, scope: str) -> None:
        self.receive(allocation, offset, order, scope)
        self.send(allocation, offset, order, scope, modifies=True)
        self.note(allocation, offset, KINDS[kind].size, order if order != "weak" else "relaxed")

    # --- bulk copies --------------------------------------------------------------------------------------------

    def bulk_load(self, smem: int, gmem: int, nbytes: int, mbarrier: int) -> None:
        super().bulk_load(smem, gmem, nbytes, mbarrier)
        allocation = self.segments[gmem >> 32]
        self.check(allocation, gmem & OFFSET_MASK, nbytes, "bulk", self.knowledge.engine)

    def bulk_store(self, gmem: int, smem: int, nbytes: int) -> None:
        super().bulk_store(gmem, smem, nbytes)
        self.check(self.shared, smem, nbytes, "bulk", self.knowledge.plain)
        allocation = self.segments[gmem >> 32]
        self.check(allocation, gmem & OFFSET_MASK, nbytes, "bulk", self.knowledge.plain, "store to")

    def put_bytes(self, allocation: Allocation, offset: int, data: bytes, site: Site | None) -> None:
        super().put_bytes(allocation, offset, data, site)
        write = Write(self.engine, offset, offset + len(data), "bulk", site)
        if allocation is self.shared or self.exited:  # there will be no waiting for a bulk group
            self.world.releases += 1
            write.released = self.world.releases
        else:
            write.released = NOT_WAITED
            self.unwaited.append(write)
        self.enter(allocation, write)

    def bulk_wait_group(self, n: int) -> None:
        super().bulk_wait_group(n)
        if n == 0:
            for write in self.unwaited:
                write.owner = self.owner
                write.released = NOT_YET
            self.unreleased += self.unwaited
            self.unwaited.clear()

    # --- the check ----------------------------------------------------------------------------------------------

    def note(self, allocation: Allocation, offset: int, nbytes: int, order: str) -> None:
        """A store of at most 16 aligned bytes: check it, and remember it."""
        self.check(allocation, offset, nbytes, order, self.knowledge.plain, "store to")
        write = Write(self.owner, offset, offset + nbytes, order, site_of(sys._getframe(2)))
        if order in RELEASES:
            write.released = self.world.releases
        else:
            self.unreleased.append(write)
        self.enter(allocation, write)

    def enter(self, allocation: Allocation, write: Write) -> None:
        """Make a write the last one to its bytes."""
        writes = allocation.last_writes
        for granule in range(write.begin >> GRANULE_BITS, (write.end + 15) >> GRANULE_BITS):
            low, high = granule << GRANULE_BITS, (granule + 1) << GRANULE_BITS
            older = [
                old
                for old in writes.get(granule, ())
                if max(old.begin, low) < write.begin or write.end < min(old.end, high)
            ]
            writes[granule] = [*older, write]

    def check(
        self, allocation: Allocation, offset: int, nbytes: int, order: str, known: Numbers, verb: str = "load of"
    ) -> None:
        """Stop the run if this access meets a store that the thread does not know of."""
        writes = allocation.last_writes
        end = offset + nbytes
        for granule in range(offset >> GRANULE_BITS, (end + 15) >> GRANULE_BITS):
            for write in writes.get(granule, ()):
                if (
                    write.owner is not self.owner
                    and write.released > self.start
                    and write.released > known.get(write.owner.block, 0)
                    and write.begin < end
                    and offset < write.end
                    and (order in WEAK or write.order in WEAK)
                ):
                    raise self.race(allocation, max(offset, write.begin), nbytes, order, write, verb)

    def race(
        self, allocation: Allocation, offset: int, nbytes: int, order: str, write: Write, verb: str
    ) -> errors.EmulatorError:
        if write.released == NOT_WAITED:
            why = "its thread has not waited for that copy"
        elif write.released == NOT_YET or write.at_exit:
            why = "its thread has released nothing since"
        elif write.released <= self.knowledge.plain.get(write.owner.block, 0):
            why = "this thread knows of it, but the copy engine does not: there is no fence.proxy.async.global"
        else:
            why = "the store has been released, but this thread has acquired nothing that says so"
        lines = [
            f"{order} {verb} {nbytes} bytes that another thread has stored: nothing orders the two",
            f"  in {allocation.cell(offset)}",
            *_stored(write),
            f"  {why}",
        ]
        if self.last_poll is not None:
            cell, at, how = self.last_poll
            writes = [w for w in cell.last_writes.get(at >> GRANULE_BITS, ()) if w.begin <= at < w.end]
            if writes:
                lines.append(f"  this thread last polled {cell.cell(at)}, with {how} order")
            lines += [line for w in writes if w.owner is not self.owner for line in _stored(w)]
        return error_at(self, errors.DataRace, "\n".join(lines))


def _stored(write: Write) -> list[str]:
    owner = write.owner
    thread = describe_thread(owner.rank, owner.kernel, owner.block_idx, owner.thread_idx)
    how = "by a bulk copy of" if write.order == "bulk" else f"with {write.order} order by"
    return [f"    stored {how} {thread}", f"      at {describe_site(write.site)}"]
