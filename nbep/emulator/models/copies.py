"""Bulk copies and mbarriers, for `checked`: a copy is checked where it starts, and known to those who wait for it."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..machine.bulk import MBarrier
from ..machine.errors import EmulatorError
from ..machine.faults import error_at
from ..machine.memory import OFFSET_BITS, OFFSET_MASK, Allocation
from ..machine.source import Site, site_of
from ..machine.warp import Warp
from .history import Waited
from .knowledge import (
    NOT_WAITED,
    NOTHING,
    Access,
    Epoch,
    Owner,
    join,
    join_two,
    remember_store,
    with_signals,
)
from .races import CheckingThread

if TYPE_CHECKING:
    from greenlet import greenlet

    from ..machine.block import Block

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

    def mbarrier_try_wait(self, address: int, parity: int) -> bool:
        done = super().mbarrier_try_wait(address, parity)
        mbarrier = self.block.mbarriers.get(address)
        if done and mbarrier is not None:
            self.hear_phase(mbarrier)
        return done

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
