"""What the copy engine may read and overwrite, for `checked`: proxy fences count by order, never by time.

A store by a thread and a load by the copy engine, on behalf of a thread of the same block, need a proxy fence on the
way from the one to the other: by the one who stored, before the two meet; or by the one who starts the copy, after
that; or by a third one of that block that has met the first and that the other meets.  A fence before the meeting by
one who has not stored is none.  If another block has stored, only a fence counts that a thread of the block that starts
the copy makes once it knows of the store: what a message from another block tells is no fence.

A load or a store of shared memory by a thread, and a store by the copy engine that brings the next bytes there, need
the same.  Of global memory only what the copy engine reads is checked, not what it overwrites.

Source: PTX ISA, membar/fence: a fence.proxy.async takes effect within its thread, and its effect "composes with other
forms of synchronization"; github.com/NVlabs/mixedproxy, alloy/ptx.als, proxy_preserved_cause_base, "Proxy fence for
dst": a fence anywhere on the path of base causality, by a thread of the same block (Lustig, Cooksey, Giroux, ISCA 2022)
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from ..machine.errors import EmulatorError, ProxyFence
from ..machine.faults import error_at
from ..machine.memory import Allocation
from ..machine.warp import Warp
from .history import RememberingThread
from .knowledge import Access, Knowledge, Numbers, Owner, Signalled, later, latest

if TYPE_CHECKING:
    from greenlet import greenlet

    from ..machine.block import Block


class ProxyThread(RememberingThread):
    """A thread whose proxy fences are numbered like its other signals.

    warp_known: the last signal of its warp that it knows besides; lanes_known: of single threads of it
    """

    __slots__ = ("knowledge", "warp_known", "lanes_known", "shared_fences", "global_fences")
    knowledge: Knowledge
    warp_known: int
    lanes_known: Numbers

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        self.shared_fences: list[int] = []  # the signals at its proxy fences
        self.global_fences: list[int] = []

    def signal(self, releases: bool) -> None:
        raise NotImplementedError

    def fence_proxy_async(self) -> None:
        super().fence_proxy_async()
        self.shared_fences.append(self.fence_proxy())
        known, own = self.known_stores(), {self.owner.clock: self.warp_known}
        self.knowledge = self.knowledge._replace(shared=known, read=later(self.knowledge.loads, own))

    def fence_proxy_async_global(self) -> None:
        super().fence_proxy_async_global()
        self.global_fences.append(self.fence_proxy())
        self.knowledge = self.knowledge._replace(engine=self.known_stores())

    def fence_proxy(self) -> int:
        """The signal of a proxy fence: the stores before it have no later number."""
        self.signal(True)
        return self.world.signals

    def proxy_fences_of(self, allocation: Allocation) -> list[int]:
        """The signals at its proxy fences for a kind of memory."""
        return self.shared_fences if allocation is self.shared else self.global_fences

    def known_stores(self) -> Numbers:
        return later(self.knowledge.stores, self.known_of_warp())

    def known_of_warp(self) -> Numbers:
        """What it knows of its warp, by clock. Without clocks of single threads that is more than it knows."""
        owner, lanes = self.owner, self.lanes_known
        if not owner.own:
            return {owner.clock: max(self.warp_known, *lanes.values()) if lanes else self.warp_known}
        first = owner.own - owner.thread_idx
        return {owner.clock: self.warp_known} | {first + lane: number for lane, number in lanes.items()}

    def has_met(self, owner: Owner, signal: int) -> bool:
        """Whether it knows of a signal because it has met a thread of its own warp."""
        if owner.clock != self.owner.clock:
            return False
        return signal <= self.warp_known or signal <= self.lanes_known.get(owner.thread_idx, 0)

    def is_hidden(self, allocation: Allocation, access: Access) -> bool:
        """Whether no proxy fence is between an access that this thread knows of and the copy engine."""
        if access.owner.block == self.owner.block and access.order == "bulk":  # no change of proxy
            return False
        if access.verb == "load":
            return self.is_unfenced(self.knowledge.read, access)
        known = self.knowledge.shared if allocation is self.shared else self.knowledge.engine
        return self.is_unfenced(known, access) and all(self.is_unfenced(known, one) for one in access.observations())

    def is_unfenced(self, known: Numbers, one: Signalled) -> bool:
        """The same of an access, or of one who has read a store's value. known: at proxy fences"""
        if one.owner.block == self.owner.block:
            here = bisect_left(one.proxy_fences, one.number)
            if here < len(one.proxy_fences) and (
                one.owner is self.owner or self.knows(one.owner, one.proxy_fences[here])
            ):
                return False
        return one.is_beyond(known)

    def knows(self, owner: Owner, signal: int) -> bool:
        stores = self.knowledge.stores
        if signal <= latest(stores, owner.clock) or (owner.own and signal <= stores.get(owner.own, 0)):
            return True
        return self.has_met(owner, signal)

    def no_proxy_fence(self, access: Access, earlier: Access) -> EmulatorError:
        byte = max(access.begin, earlier.begin)
        copy = "bulk store" if access.verb == "load" else "bulk load"
        done = "loaded" if earlier.verb == "load" else "stored"
        message = f"{copy} of {access.end - access.begin} bytes at shared byte {access.begin}: byte {byte} was {done}"
        message += (
            f" by thread {earlier.owner.thread_idx}, with no fence.proxy.async between the two: by that thread before"
        )
        return error_at(self, ProxyFence, f"{message} they meet, or by one that has met it")
