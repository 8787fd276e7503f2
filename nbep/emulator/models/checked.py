"""The memory model "checked": two accesses to the same bytes, one of them a store, that nothing orders are an error.

A store is seen by all at once, as with "sc".  But a thread may only meet the bytes that another one has stored if it
can know of the store: after a release, a barrier or a syncwarp of the one who stored, and whatever takes that on to
this thread: an acquire of the released value, the same barrier, any chain of them, or what orders kernels: see
`host`.  A strong store is known, too, to whoever reads its value with a strong load, and to those who know of that
one's next release: PTX's causality order is observation, then base causality.  What came before the store is not.

And a thread may only store to bytes that another one has loaded if it can know that the load is over.  For that relaxed
stores and loads will do, as for the head of a ring: a load has returned before its thread stores anything that comes
after it.  A vote or a shuffle orders nothing, as CUDA's programming guide says.  Two accesses of which neither is weak
may meet without all that, if their scopes reach each other.

What a strong store has stored over still counts: whoever knows of that store need not know of those before it, with
which it may meet.  A weak one has been checked against all of them.

What a thread knows is a `Knowledge`: how far it knows the signals of each warp.  Signals are numbered in the order in
which they happen.  A store is known to whoever knows its warp up to its thread's first release after it, a load to
whoever knows it up to the first signal of any kind.  That is not exact, so some races are not found: who hears of one
thread knows what all of its warp have signalled before, and what an atomic passes on counts as its thread's.

The copy engine loads with what its thread knows to be behind a proxy fence: of one who stored, which its thread knows
of, or of a thread of the block that knew of the store.  A copy is checked where it starts; it is over for those who
know of a wait for it, or of its kernel's end.  A thread that leaves without a wait for what its copies read is an
error, also if they happen to have read it.

Once a wait timed out, or a kernel has reported a fault, nothing is checked any more.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..machine.access import AccessingThread, writes
from ..machine.bulk import MBarrier
from ..machine.errors import EmulatorError
from ..machine.faults import error_at
from ..machine.kinds import KINDS
from ..machine.memory import OFFSET_BITS, OFFSET_MASK, Allocation
from ..machine.orders import POLLED
from ..machine.source import Site, site_of
from ..machine.warp import Warp
from .history import Waited
from .knowledge import (
    GRANULE_BITS,
    NOT_WAITED,
    NOTHING,
    Access,
    Epoch,
    Owner,
    join,
    join_two,
    last_to,
    remember_store,
    with_signals,
)
from .races import CheckingThread

if TYPE_CHECKING:
    from greenlet import greenlet

    from ..machine.block import Block


# --- Bulk copies and mbarriers: a copy is checked where it starts, and known to those who wait for it -----------------


MBARRIER_BYTES = 8

Address = tuple[Allocation, int]


class CopyCheckingThread(CheckingThread):
    """A thread whose bulk copies are checked."""

    __slots__ = ("engine", "open_group", "groups", "issued")

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        self.engine: Owner | None = None  # of its copies, as long as the thread has not waited for them
        # What the copy engine does for bulk stores, until the thread has waited for it.
        self.open_group: list[Access] = []
        self.groups: deque[list[Access]] = deque()
        self.issued: list[tuple[Access, Access, MBarrier]] = []  # bulk loads under way: the load and the store of each

    def locate(self, address: int) -> Address:
        """What stands at a global address that has been accessed."""
        return self.segments[address >> OFFSET_BITS], address & OFFSET_MASK

    # --- mbarriers ----------------------------------------------------------------------------------------------

    def mbarrier_init(self, address: int, count: int) -> None:
        super().mbarrier_init(address, count)
        self.note_store(self.shared, address, MBARRIER_BYTES, "weak", "cta")

    def mbarrier_inval(self, address: int) -> None:
        super().mbarrier_inval(address)
        self.note_store(self.shared, address, MBARRIER_BYTES, "weak", "cta")

    def arrive_at(self, mbarrier: MBarrier, nbytes: int) -> None:
        # It must know of the initialisation.
        self.note_load(self.shared, mbarrier.address, MBARRIER_BYTES, "relaxed", "cta")
        self.signal(True)
        mbarrier.knowledge = join((mbarrier.knowledge or NOTHING, self.with_latest(self.knowledge)))
        super().arrive_at(mbarrier, nbytes)

    def hear_phase(self, mbarrier: MBarrier) -> None:
        """A phase is over: this thread knows what those knew who arrived in it, and what the copies have done."""
        address = mbarrier.address
        self.note_load(self.shared, address, MBARRIER_BYTES, "relaxed", "cta")
        self.world.signals += 1
        number = self.world.signals
        for access in mbarrier.done:
            access.epoch.number = number
        signals = {access.owner.clock: number for access in mbarrier.done}
        self.world.history.add(Waited(self.owner, address, tuple(mbarrier.done)))
        mbarrier.done = []
        mbarrier.phase_knowledge = with_signals(mbarrier.phase_knowledge or NOTHING, signals)
        mbarrier.knowledge = with_signals(mbarrier.knowledge or NOTHING, signals)
        self.knowledge = join((self.knowledge, mbarrier.phase_knowledge))

    # --- copies -------------------------------------------------------------------------------------------------

    def bulk_load(self, smem: int, gmem: int, nbytes: int, mbarrier: int) -> None:
        super().bulk_load(smem, gmem, nbytes, mbarrier)
        load, store = self.note_copy(self.locate(gmem), (self.shared, smem), nbytes)
        self.issued.append((load, store, self.block.mbarriers[mbarrier]))

    def bulk_store(self, gmem: int, smem: int, nbytes: int) -> None:
        super().bulk_store(gmem, smem, nbytes)
        self.open_group += self.note_copy((self.shared, smem), self.locate(gmem), nbytes)

    def note_copy(self, source: Address, target: Address, nbytes: int) -> tuple[Access, Access]:
        """A copy starts: check what it will do, and remember it, as the copy engine's until somebody waits for it."""
        site = site_of(sys._getframe(2))
        (read, begin), (written, to) = source, target
        now = self.world.history.now
        load = Access(self.owner, Epoch(NOT_WAITED), "load", begin, begin + nbytes, "bulk", "cta", site, now)
        store = Access(self.owner, Epoch(NOT_WAITED), "store", to, to + nbytes, "bulk", "cta", site, now)
        self.check_copy(read, load)
        self.check_copy(written, store)
        if self.engine is None:
            self.engine = replace(self.owner, clock=-self.owner.clock, own=0)
        load.owner = store.owner = self.engine
        for granule in load.granules:
            self.remember_load(read, load, granule)
        remember_store(written, store, self.is_new)
        return load, store

    def put_bytes(self, allocation: Allocation, offset: int, data: bytes, site: Site | None) -> None:
        super().put_bytes(allocation, offset, data, site)
        if allocation is self.shared:
            here = next(i for i, (_, store, _) in enumerate(self.issued) if store.begin == offset)
            load, store, mbarrier = self.issued.pop(here)
            mbarrier.copies += load, store

    def bulk_commit_group(self) -> None:
        super().bulk_commit_group()
        self.groups.append(self.open_group)
        self.open_group = []

    def bulk_wait_group(self, n: int) -> None:
        super().bulk_wait_group(n)
        while len(self.groups) > n:
            self.take_over(self.groups.popleft())

    def bulk_wait_group_read(self, n: int) -> None:
        super().bulk_wait_group_read(n)
        for group in list(self.groups)[: max(len(self.groups) - n, 0)]:
            self.take_over([access for access in group if access.verb == "load"])
            group[:] = [access for access in group if access.verb == "store"]

    def take_over(self, copies: list[Access]) -> None:
        """What the copy engine has done is as if this thread had done it."""
        for access in copies:
            access.owner = self.owner
            access.epoch = self.loading if access.verb == "load" else self.storing
            access.time = self.world.history.now

    def leave(self) -> None:
        groups = [self.open_group, *self.groups]
        if any(access.verb == "load" for group in groups for access in group):
            message = "a thread leaves the kernel without having waited until its bulk stores have read shared memory"
            raise error_at(self, EmulatorError, f"{message}: wait_group.read is missing")
        copies = [access for group in groups for access in group]
        if copies:  # no thread has waited until they are written: the end of the kernel does
            self.block.launch.callbacks.append(partial(self.end_copies, copies))
        self.storing.at_exit = True
        self.signal(True)
        launch = self.block.launch
        launch.learned = join_two(launch.learned, self.knowledge)
        super().leave()

    def end_copies(self, copies: list[Access]) -> None:
        """The kernel is done, and so are copies for which no thread has waited."""
        self.take_over(copies)
        self.signal(True)


SIZES = {name: kind.size for name, kind in KINDS.items()}


class CheckedThread(CopyCheckingThread):
    """A thread whose accesses are checked against those of others: see `signals`, `races` and `copies`.

    Each is made as with `sc`, which no class in between changes, and then noted.
    """

    __slots__ = ()

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        value = AccessingThread.load(self, address, kind, order, scope)
        allocation, offset = self.segments[address >> 32], address & 0xFFFFFFFF
        load = self.note_load(allocation, offset, SIZES[kind], order, scope)
        if order in POLLED:
            self.receive(allocation, offset, SIZES[kind], order, scope)
            self.remember_polled(allocation, load)
        return value

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        AccessingThread.store(self, address, kind, value, order, scope)
        allocation, offset = self.segments[address >> 32], address & 0xFFFFFFFF
        store = self.note_store(allocation, offset, SIZES[kind], order, scope)
        self.send(allocation, store, modifies=False)

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        old = AccessingThread.atomic(self, op, address, kind, operand, order, scope, compare)
        allocation, offset = self.locate(address)
        self._modified(allocation, offset, kind, order, scope, writes(op, old, compare))
        return old

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        value = AccessingThread.load_shared(self, address, kind, order)
        load = self.note_load(self.shared, address, SIZES[kind], order, "cta")
        if order in POLLED:
            self.receive(self.shared, address, SIZES[kind], order, "cta")
            self.remember_polled(self.shared, load)
        return value

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        AccessingThread.store_shared(self, address, kind, value, order)
        store = self.note_store(self.shared, address, SIZES[kind], order, "cta")
        self.send(self.shared, store, modifies=False)

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        old = AccessingThread.atomic_shared(self, op, address, kind, operand, order, compare)
        self._modified(self.shared, address, kind, order, "cta", writes(op, old, compare))
        return old

    def _modified(
        self, allocation: Allocation, offset: int, kind: str, order: str, scope: str, has_written: bool
    ) -> None:
        nbytes = SIZES[kind]
        if not has_written:
            self.note_load(allocation, offset, nbytes, order, scope)
            self.receive(allocation, offset, nbytes, order, scope)
            return
        before = last_to(allocation.last_stores.get(offset >> GRANULE_BITS, ()), offset, offset + nbytes)
        self.receive(allocation, offset, nbytes, order, scope)
        store = self.note_store(allocation, offset, nbytes, order, scope, is_atomic=True)
        self.send(allocation, store, modifies=before is not None)

    def spin(self, deadline_ns: int) -> bool:
        """A wait that times out ends the checks: what threads do then, they do to bytes that are not there."""
        is_over = super().spin(deadline_ns)
        self.world.has_failed |= is_over
        return is_over
