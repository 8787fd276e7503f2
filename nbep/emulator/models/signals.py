"""Which thread has signalled which, for `checked`: what stores to cells take along, and where threads meet."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..machine.errors import EmulatorError, ProxyFence
from ..machine.faults import error_at
from ..machine.memory import Allocation
from ..machine.orders import ACQUIRES, RELEASES, SCOPES
from ..machine.source import Site
from ..machine.warp import Collective, Warp
from .history import Forgotten, RememberingThread, Stored
from .knowledge import (
    GRANULE_BITS,
    MAX_WARPS,
    NOTHING,
    Access,
    Epoch,
    Knowledge,
    Message,
    Numbers,
    Owner,
    Signalled,
    distance,
    join,
    join_two,
    last_to,
    later,
    latest,
    with_signals,
)

if TYPE_CHECKING:
    from greenlet import greenlet

    from ..machine.block import Block, NamedBarrier


# --- What the copy engine may read and overwrite, for `checked`: proxy fences count by order, never by time -----------
# A store by a thread and a load by the copy engine, on behalf of a thread of the same block, need a proxy fence on the
# way from the one to the other: by the one who stored, before the two meet; or by the one who starts the copy, after
# that; or by a third one of that block that has met the first and that the other meets.  A fence before the meeting by
# one who has not stored is none.  If another block has stored, only a fence counts that a thread of the block that
# starts the copy makes once it knows of the store: what a message from another block tells is no fence.
#
# A load or a store of shared memory by a thread, and a store by the copy engine that brings the next bytes there, need
# the same.  Of global memory only what the copy engine reads is checked, not what it overwrites.
#
# Source: PTX ISA, membar/fence: a fence.proxy.async takes effect within its thread, and its effect "composes with other
# forms of synchronization"; github.com/NVlabs/mixedproxy, alloy/ptx.als, proxy_preserved_cause_base, "Proxy fence for
# dst": a fence anywhere on the path of base causality, by a thread of the same block (Lustig, Cooksey, Giroux,
# ISCA 2022)


class ProxyThread(RememberingThread):
    """A thread whose proxy fences are numbered like its other signals.

    warp_known: the last signal of its warp that it also knows; lanes_known: of single threads of it
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


Cell = tuple[Allocation, int, int]  # its first byte, and the one behind it
MANY_MET = 1 << 12


class SignallingThread(ProxyThread):
    """A thread whose releases, fences and meetings pass on what it knows."""

    __slots__ = ("owner", "fences", "released", "heard", "loading", "storing", "met", "polled_last")

    def __init__(self, block: Block, thread_idx: int, warp: Warp, hub: greenlet):
        super().__init__(block, thread_idx, warp, hub)
        launch = block.launch
        place = launch.place
        clock = place.clock + block.serial * MAX_WARPS + self.warp
        self.owner = Owner(self.rank, launch.name, block.serial, clock, block.index, thread_idx, launch.number, place)
        self.knowledge: Knowledge = launch.known
        self.warp_known = 0
        self.lanes_known = {}
        # What a store takes along that no release orders: what was known at the last fence of each reach, and at this
        # thread's last release of each reach to the same cell.
        self.fences: dict[int, Knowledge] = {}
        self.released: dict[Cell, dict[int, Knowledge]] = {}
        # What relaxed loads have met, for a later acquire or fence that reaches as far.
        self.heard: dict[tuple[Cell, int], Knowledge] = {}
        self.loading = Epoch()  # of the loads that no signal tells of yet
        self.storing = Epoch()  # of the stores, and of observed ones by others, that no release tells of yet
        # Of others, epochs that it knows, and stores that it has observed: what is known once stays known.
        self.met: set[Epoch | Access] = set()
        self.polled_last: tuple[Any, ...] = ()  # what its last strong access has read, and how

    def signal(self, releases: bool) -> None:
        """Number the loads since the last signal, and the stores since the last release."""
        self.world.signals += 1
        self.loading.number = self.world.signals
        self.loading = Epoch()
        if releases:
            self.storing.number = self.world.signals
            self.storing = Epoch()

    def forget_met(self) -> None:
        """It knows less than before, or remembers too much."""
        self.met.clear()
        self.polled_last = ()
        self.world.observed = None, set()

    def with_latest(self, knowledge: Knowledge) -> Knowledge:
        """The knowledge, and all that the warp has signalled."""
        return with_signals(knowledge, {self.owner.clock: self.world.signals})

    def send(self, allocation: Allocation, store: Access, modifies: bool) -> None:
        """A store to a cell; one that modifies what another store of its size has left passes on what that says."""
        offset, order, reach = store.begin, store.order, store.reach
        if not reach:
            if allocation.messages.pop(offset, None) is not None:
                self.world.history.add(Forgotten(allocation, offset))
            return
        self.world.history.add(Stored(allocation, store))
        cell = allocation, offset, store.end
        self.signal(order in RELEASES)
        now = self.with_latest(self.knowledge)
        if order in RELEASES:
            self.released.setdefault(cell, {})[reach] = now
        else:
            now = NOTHING.with_loads(now.loads)
        earlier = [*self.fences.items(), *self.released.get(cell, {}).items()]
        before = allocation.messages.get(offset) if modifies else None
        passes_on = False
        if before is not None and reach >= distance(self.owner, before.owner):
            passes_on = True
            earlier += before.parts.items()
        parts = {reach: now}
        for its_reach, knowledge in earlier:
            least = min(its_reach, reach)
            parts[least] = join_two(parts.get(least, NOTHING), knowledge)
        allocation.messages[offset] = Message(self.owner, parts, passes_on)

    def receive(self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str) -> None:
        """A strong access has read a cell."""
        stores = allocation.last_stores.get(offset >> GRANULE_BITS, ())
        message = allocation.messages.get(offset)
        last = self.polled_last
        if last and last[0] is stores and last[1] is message and last[2:] == (allocation, offset, nbytes, order, scope):
            return  # a poll that finds what the last one has found
        self.polled_last = stores, message, allocation, offset, nbytes, order, scope
        self.hear((allocation, offset, offset + nbytes), stores, message, order, scope)

    def hear(self, cell: Cell, stores: Iterable[Access], message: Message | None, order: str, scope: str) -> None:
        """A strong access has read what these stores have left in a cell, and this is what it tells.

        It observes a store of the same size alone: others are not morally strong with it, and tell it nothing.
        """
        reach = SCOPES[scope]
        store = last_to(stores, cell[1], cell[2])
        needed = 0 if message is None else distance(message.owner, self.owner)
        if store is None or reach < needed:
            message = None
        if order in ACQUIRES:
            if message is not None:
                self.knowledge = message.known_by(self.knowledge, needed)
            for near in range(1, reach + 1) if self.heard else ():
                self.knowledge = join_two(self.knowledge, self.heard.get((cell, near), NOTHING))
        elif message is not None and any(said := message.heard_by_thread(needed)):
            self.heard[cell, needed] = join_two(self.heard.get((cell, needed), NOTHING), said)
            self.knowledge = self.knowledge.with_loads(later(self.knowledge.loads, said.loads))
        if store is not None and min(store.reach, reach) >= distance(store.owner, self.owner) and self.is_new(store):
            self.observe(cell[0], store)

    def observe(self, allocation: Allocation, store: Access) -> Signalled:
        """It has read the value of a strong store: from its next release on it tells of that store, too."""
        observation = Signalled(self.owner, self.storing, self.proxy_fences_of(allocation))
        store.observed_by += (observation,)
        return observation

    def is_new(self, access: Access) -> bool:
        """Whether this thread cannot know of an access."""
        met = self.met
        if access.owner is self.owner or access.epoch in met or access in met:
            return False
        if len(met) > MANY_MET:
            met.clear()
        return not self.meets(access)

    def meets(self, access: Access) -> bool:
        """Whether it knows of an access by another thread. If so, it knows of the whole epoch, or has observed it."""
        is_store, owner = access.verb == "store", access.owner
        known = self.knowledge.stores if is_store else self.knowledge.loads
        of_warp = owner.clock == self.owner.clock and self.has_met(owner, access.epoch.number)
        if of_warp or not access.is_beyond(known):
            self.met.add(access.epoch)
            return True
        if is_store and access.reach and self.has_observed(access):
            self.met.add(access)
            return True
        return False

    def has_observed(self, store: Access) -> bool:
        """Whether one who has read the value of a strong store is this thread, or is known to it."""
        asker, found = self.world.observed  # what it has observed once it has for good
        if asker is not self.owner:
            found = set()
            self.world.observed = self.owner, found
        passed: list[Access] = []
        one: Access | None = store
        while one is not None:
            passed.append(one)
            if one in found or any(
                reader.owner is self.owner or self.knows(reader.owner, reader.number) for reader in one.observed_by
            ):
                found.update(passed)
                return True
            one = one.successor
        return False

    def fence(self, order: str, scope: str) -> None:
        super().fence(order, scope)
        if order in RELEASES:
            reach = SCOPES[scope]
            heard = (knowledge for (_, needed), knowledge in self.heard.items() if needed <= reach)
            self.knowledge = join((self.knowledge, *heard))
            self.signal(True)
            self.fences[reach] = self.with_latest(self.knowledge)

    def converge(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        if name == "syncwarp":
            self.signal(True)
        signal = self.world.signals
        collective = super().converge(name, mask, value, site)
        if name == "syncwarp":  # a vote or a shuffle orders no memory
            collective.signals[self.thread_idx] = signal
            if not collective.knowledge or collective.knowledge[-1] is not self.knowledge:
                collective.knowledge.append(self.knowledge)
        if not collective.missing:
            self.conclude(collective)
        return collective

    def conclude(self, collective: Collective) -> None:
        """All are there that a collective waits for: what they know."""
        self.remember_collective(collective)
        orders_memory = collective.name == "syncwarp"
        collective.known = (join(collective.knowledge), *self.known_of_lanes(collective)) if orders_memory else ()

    def known_of_lanes(self, collective: Collective) -> tuple[int, Numbers]:
        """What lanes that meet know of their warp: of all threads, and also of single ones."""
        lanes = self.warp_state.lanes
        if collective.mask == (1 << len(lanes)) - 1:
            return self.world.signals, {}
        there = [lane for lane in lanes if collective.mask >> lane.lane & 1]
        known = dict(collective.signals)
        for lane in there:
            for other, number in lane.lanes_known.items():
                known[other] = max(known.get(other, 0), number)
        return max(lane.warp_known for lane in there), known

    def collect(self, name: str, mask: int, value: Any, site: Site | None) -> Collective:
        collective = super().collect(name, mask, value, site)
        if collective.known is None:  # the last for whom it waited has left
            self.conclude(collective)
        if name == "syncwarp":
            self.knowledge, self.warp_known, self.lanes_known = collective.known
        return collective

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> NamedBarrier:
        self.signal(True)
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        # A warp that waits does nothing before its last lane is there.
        clock = self.owner.clock if wait or not self.owner.own else self.owner.own
        barrier.signals[clock] = self.world.signals
        if not barrier.knowledge or barrier.knowledge[-1] is not self.knowledge:
            barrier.knowledge.append(self.knowledge)
        if barrier.is_full:
            self.conclude_barrier(barrier)
        return barrier

    def conclude_barrier(self, barrier: NamedBarrier) -> None:
        """All are there for whom a barrier waits: what they know."""
        signals = NOTHING._replace(stores=barrier.signals, loads=barrier.signals)  # bar.arrive: some know more by now
        barrier.known = join((*barrier.knowledge, signals))

    def meet(self, barrier_id: int, num_threads: int, predicate: bool) -> NamedBarrier:
        barrier = super().meet(barrier_id, num_threads, predicate)
        if barrier.known is None:  # the last for whom it waited has left
            self.conclude_barrier(barrier)
        self.knowledge = barrier.known
        self.warp_known, self.lanes_known = latest(self.knowledge.stores, self.owner.clock), {}
        return barrier
