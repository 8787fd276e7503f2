"""A thread under the strategy `every`: it stands still before each access that is not weak, until it is chosen.

Weak accesses are no choices: "checked" looks for races of theirs in every run, and a program that has none has no other
results. Neither are shuffles and votes: they wait for all whom they name, in whatever order these come. Of barriers,
see `every_copies`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ..machine.access import writes
from ..machine.kinds import KINDS
from ..machine.memory import OFFSET_BITS, OFFSET_MASK, Allocation
from ..machine.orders import ACQUIRES, SCOPES
from ..machine.stream import MAX_BLOCK
from ..machine.world import NEVER
from ..models.checked import CheckedThread
from ..models.knowledge import OF_THREAD, Knowledge, Numbers, Signalled, later, latest
from ..models.knowledge import Access as CheckedAccess
from .every_loops import (
    MANY_LOOKS,
    OF_CHOICES,
    Frames,
    frames_above,
    is_in_loop,
    is_nested,
    last_turn,
    still_running,
)  # fmt: skip
from .every_seen import INTEGERS, UNSIGNED, Cell, Entry, Question, Reading, Seen, settled, signed
from .every_step import Access, Step, Words, joined, load_of, name_of, store_of, words_of
from .every_turns import TurningThread
from .strategies import ALONE

MAX_POLLED = 64  # loads of a turn that are remembered; what is forgotten counts as a load like others
WEAK = ("weak", "nc", "na")


class EveryThread(TurningThread, CheckedThread):
    """A thread of a run of a tree: see `schedule.every`.

    pending: the access that it stands before
    frames: those in which it has stood last, before an access or a meeting
    before_load: what it knew before its last load; observed: the stores whose values that has read
    deeds: weak stores and meetings so far
    kind, words: of the step that it makes now, and which words it meets
    is_add: whether that is an add that may commute with others; is_lazy: or an exchange, whose old value may not matter
    is_skipped: whether its access is a load that is no step, since nobody stores there
    latest: what it has read last, by cell
    looked: by words, what it has read since the last turn of a loop
    refused: where it looked in a turn that has failed since its last step, and what it was told there
    unfenced: what it has read with an order that does not acquire, since its last fence
    """

    __slots__ = (
        "pending", "frames", "deeds", "before_load", "observed", "kind", "words", "is_add", "is_lazy", "is_skipped",
        "looked", "latest", "refused", "unfenced", *OF_CHOICES,
    )  # fmt: skip

    def __init__(self, block: Any, thread_idx: int, warp: Any, hub: Any):
        super().__init__(block, thread_idx, warp, hub)
        self.owner.own = block.launch.place.clock + OF_THREAD + block.serial * MAX_BLOCK + thread_idx
        self.pending: Access | None = None
        self.frames: Frames = []
        self.deeds = 0
        self.before_load: Any = None
        self.observed: list[tuple[CheckedAccess, Signalled]] = []
        self.kind = ""
        self.words: frozenset = frozenset()
        self.is_add = self.is_lazy = self.is_skipped = False
        self.looked: dict[Words, Reading] = {}
        self.latest: dict[Cell, Reading] = {}
        self.refused: tuple[Words, list[dict[Question, bool]]] = frozenset(), []
        self.unfenced: list[Reading] = []

    @property
    def is_standing(self) -> bool:
        return self.pending is not None

    def stand_before(self, allocation: Allocation, name: tuple, offset: int, kind: str, is_store: bool) -> None:
        """Wait until it is this thread's turn to access a cell."""
        self.kind = kind
        words = words_of(name, offset, KINDS[kind].size)
        self.stand((store_of if is_store else load_of)(words), partial(self.look, allocation, offset))

    def stand(self, access: Access, look: Callable[[], Cell]) -> None:
        """Wait until it is this thread's turn. look: gives the cell as it is then"""
        tree = self.world.strategy.tree
        is_store = access.is_store
        self.let_go()
        self.frames = frames_above(sys._getframe(2))
        turns = self.loop.comes_back(sys._getframe(2), len(tree.steps))
        if turns is not None:
            first = [poll for poll in self.polled_here if turns[0] <= poll[0] < turns[1]]
            looks = [poll for poll in self.polled_here if poll[0] >= turns[1]]
            if not self.end_turn(looks, self.frames, False, first):
                super().spin(NEVER)
        self.left = ALONE
        self.words, self.at = access.words, None
        self.is_add = self.is_lazy = False
        self.is_skipped = not is_store and tree.skips(self.who, access.words)
        if self.is_skipped:
            look()
            self.loop.count(self, access.words, tree.stores, MANY_LOOKS)
            return
        self.wake_for(access)
        self.does_more = False
        if not is_store:
            self.before_load = self.knowledge, dict(self.heard)
            self.observed = []
        polled = dict(self.polled)
        self.pending = access
        self.runnable.append(self)
        self.park()
        self.pending = None
        self.left = ALONE
        cell = look()
        clock = self.clock
        step = Step(self.who, access, clock, cell)
        words, refused = self.refused
        if words == access.words and not is_store:
            step.refused = refused
        self.refused = frozenset(), []
        if self.loop.state is not None:
            step.state = self.who, access.words, self.loop.state
        self.at = tree.step(step)
        self.clock = {self.who: self.at}
        if not is_store:
            before = self.before_load, self.observed, self.deeds, polled
            self.polled_here.append((self.at, access, clock, self.frames, before))
            del self.polled_here[:-MAX_POLLED]
            self.loop.count(self, access.words, tree.stores, MANY_LOOKS)

    def let_go(self) -> None:
        """The thread is about to give way, or about to end: what it has left behind asks nothing any more."""
        self.frames = still_running(self.frames)

    def leave(self) -> None:
        self.let_go()
        self.wake_for(None)
        super().leave()
        self.forget_itself()

    def end(self) -> None:
        super().end()
        self.forget_itself()

    def forget_itself(self) -> None:
        """It goes no further: drop what refers back to it, so that it is freed with no search for garbage."""
        self.frames, self.polled_here, self.unfenced = [], [], []
        self.reading, self.looked, self.latest = None, {}, {}
        self.loop.forget()

    def cell_of(self, allocation: Allocation, offset: int) -> Cell:
        """The cell of the access under way."""
        return self.world.strategy.cells.of(allocation, offset, KINDS[self.kind].size, self.words)

    def look(self, allocation: Allocation, offset: int) -> Cell:
        """The same, as it is now."""
        cell = self.cell_of(allocation, offset)
        if not allocation.freed:
            cell.look(allocation.read(offset, cell.kind))
        return cell

    def stand_global(self, address: int, kind: str, is_store: bool) -> None:
        allocation, offset = self.segments.get(address >> OFFSET_BITS), address & OFFSET_MASK
        size = KINDS[kind].size
        if allocation is None or allocation.freed or not allocation.lowest <= offset <= allocation.nbytes - size:
            raise self.fault(address, kind, is_store, False, IndexError())
        self.stand_before(allocation, name_of(allocation), offset, kind, is_store)
        if allocation.freed:
            raise self.fault(address, kind, is_store, False, KeyError())

    def stand_shared(self, address: int, kind: str, is_store: bool) -> None:
        self.stand_before(self.shared, self.who[:4], address, kind, is_store)

    def load(self, address: int, kind: str, order: str, scope: str) -> Any:
        address = settled(address)
        if order not in WEAK:
            self.stand_global(address, kind, False)
        self.left = ALONE
        value = super().load(address, kind, order, scope)
        return self.loaded(self.segments[address >> 32], address & 0xFFFFFFFF, kind, value, order)

    def loaded(self, allocation: Allocation, offset: int, kind: str, value: Any, order: str) -> Any:
        """What a thread gets that has loaded a value.

        A weak load is no choice. A thread that makes many may be in a loop that only a store of others can end, which
        races with it.
        """
        if order not in WEAK:
            return self.seen(value, kind)
        if self.loop.has_many(self.world.strategy.tree):
            self.note_polled(allocation, offset, kind, value)
            if self.loop.comes_back(sys._getframe(1), 0) is not None:
                self.loop.forget()
                super().spin(NEVER)
        return value

    def store(self, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        address, value = settled(address), settled(value)
        if order not in WEAK:
            self.stand_global(address, kind, True)
        self.about_to_store(value, kind, order)
        super().store(address, kind, value, order, scope)
        self.at = None

    def atomic(
        self, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        address, operand = settled(address), settled(operand)
        self.stand_global(address, kind, True)
        self.begin_atomic(op, operand, kind, order)
        old = super().atomic(op, address, kind, operand, order, scope, settled(compare))
        return self.end_atomic(old, kind, writes(op, old, settled(compare)))

    def load_shared(self, address: int, kind: str, order: str) -> Any:
        address = settled(address)
        if order not in WEAK:
            self.stand_shared(address, kind, False)
        self.left = ALONE
        return self.loaded(self.shared, address, kind, super().load_shared(address, kind, order), order)

    def store_shared(self, address: int, kind: str, value: Any, order: str) -> None:
        address, value = settled(address), settled(value)
        if order not in WEAK:
            self.stand_shared(address, kind, True)
        self.about_to_store(value, kind, order)
        super().store_shared(address, kind, value, order)
        self.at = None

    def atomic_shared(self, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None) -> Any:
        address, operand = settled(address), settled(operand)
        self.stand_shared(address, kind, True)
        self.begin_atomic(op, operand, kind, order)
        old = super().atomic_shared(op, address, kind, operand, order, settled(compare))
        return self.end_atomic(old, kind, writes(op, old, settled(compare)))

    # --- what it reads and stores ---------------------------------------------------------------------------------

    def about_to_store(self, value: Any, kind: str, order: str) -> None:
        """A store that is not weak is a step; what it stores says which loads it commutes with."""
        if order in WEAK:
            self.do_more()
            self.loop.has_many(self.world.strategy.tree)
        elif self.made is not None:
            self.made.number = signed(value, kind) if kind in INTEGERS else None
        self.loop.forget()
        self.left = ALONE

    def begin_atomic(self, op: str, operand: Any, kind: str, order: str) -> None:
        assert self.made is not None
        self.is_lazy = op in ("add", "exch") and kind in INTEGERS and order not in ACQUIRES
        self.is_add = self.made.is_add = self.is_lazy and op == "add"
        if self.is_lazy:
            self.made.number = signed(operand, kind)

    def end_atomic(self, old: Any, kind: str, has_written: bool) -> Any:
        if not has_written:
            assert self.at is not None
            self.world.strategy.tree.has_only_read(self.at)
        self.at = None
        if not self.is_lazy:
            return old
        self.is_add = self.is_lazy = False
        return self.seen(old, kind)

    def seen(self, value: Any, kind: str) -> Any:
        """What a thread gets that has read a value."""
        reading = self.reading
        self.at = None
        assert reading is not None
        if kind in INTEGERS:
            return Seen(reading, int(value), UNSIGNED.get(kind, ()))
        reading.settle()
        return value

    def receive(self, allocation: Allocation, offset: int, nbytes: int, order: str, scope: str) -> None:
        """A load acquires nothing until the thread compares the loaded value."""
        cell = self.cell_of(allocation, offset)
        reading = self.reading = Reading(self, cell, self.earliest(cell), order, scope, self.is_lazy)
        self.note_looked()
        if self.made is not None:
            self.made.reading = reading
            reading.grows = self.made.is_add and self.made.number is not None and self.made.number >= 0
        if order not in ACQUIRES:
            self.unfenced.append(reading)
        if self.is_lazy:
            return
        self.hear_entry(reading)
        if self.made is not None and self.made.access.is_store:  # an atomic
            reading.settle()
        self.latest[cell] = reading

    def note_looked(self) -> None:
        """The load under way may be a poll."""
        if not self.is_skipped and self.reading is not None:
            self.looked[self.words] = self.reading

    def with_latest(self, knowledge: Knowledge) -> Knowledge:
        """What a thread tells: its own signals, and those of its warp's other lanes that it has met, not all so far.

        The order in which lanes signal between two choices is not explored.
        """
        return knowledge._replace(stores=self.latest_of(knowledge.stores), loads=self.latest_of(knowledge.loads))

    def latest_of(self, numbers: Numbers) -> Numbers:
        owner = self.owner
        of_warp = max(latest(numbers, owner.clock), self.warp_known)
        sent = {**numbers, owner.clock: of_warp, owner.own: self.world.signals}
        return later(sent, self.known_of_warp()) if self.lanes_known else sent

    def earliest(self, cell: Cell) -> int:
        """The entry before which this thread cannot have read a cell."""
        at = len(cell.entries) - 1
        least = self.latest[cell].position if cell in self.latest else 0
        while at > least:
            entry = cell.entries[at]
            if entry.is_wall or entry.who == self.who or not any(self.is_new(store) for store in entry.stores):
                break
            at -= 1
        return at

    def hear_entry(self, reading: Reading) -> None:
        entry, cell = reading.cell.entries[reading.position], reading.cell
        where = cell.allocation, cell.offset, cell.offset + cell.size
        storing, self.storing = self.storing, reading.storing
        self.hear(where, entry.stores, entry.message, reading.order, reading.scope)
        if reading.fence:
            self.hear(where, entry.stores, entry.message, "acquire", reading.fence)
        self.storing = storing

    def check(self, allocation: Allocation, access: CheckedAccess) -> None:
        if (parts := self.world.strategy.tree.parts) is not None and allocation is not self.shared:
            parts.note(self.who[:4], allocation, access)
        super().check(allocation, access)

    def check_copy(self, allocation: Allocation, access: CheckedAccess) -> None:
        if (parts := self.world.strategy.tree.parts) is not None and allocation is not self.shared:
            parts.note(self.who[:4], allocation, access)
        super().check_copy(allocation, access)

    def put_bytes(self, allocation: Allocation, offset: int, data: bytes, site: Any) -> None:
        super().put_bytes(allocation, offset, data, site)
        if (parts := self.world.strategy.tree.parts) is not None and allocation is not self.shared:
            parts.note_left(self.who[:4], allocation, offset, offset + len(data))

    def observe(self, allocation: Allocation, store: CheckedAccess) -> Signalled:
        observation = super().observe(allocation, store)
        self.observed.append((store, observation))
        return observation

    def fence(self, order: str, scope: str) -> None:
        """What has been read before counts as acquired, also if its number is asked for later."""
        super().fence(order, scope)
        for reading in self.unfenced:
            reading.fence = min(reading.scope, scope, key=SCOPES.__getitem__)
        self.unfenced = []

    def send(self, allocation: Allocation, store: CheckedAccess, modifies: bool) -> None:
        super().send(allocation, store, modifies)
        step = self.made
        if step is None or step.cell is None:
            return
        entry = Entry(allocation.read(store.begin, step.cell.kind), allocation.messages.get(store.begin), (store,))
        entry.step, entry.who, entry.is_add = self.at, self.who, self.is_add
        step.entry = step.cell.add(entry)

    # --- loops that poll ------------------------------------------------------------------------------------------

    def spin(self, deadline_ns: int) -> bool:
        here = frames_above(sys._getframe(1))
        looks = [poll for poll in self.polled_here if is_in_loop(poll[3], here)]
        if self.world.overdue(self, deadline_ns):
            self.forget_looks()
        elif self.end_turn(looks[last_turn([look[3] for look in looks], here) :], here, is_nested(here)):
            return False
        return super().spin(deadline_ns)

    def arrive(self, barrier_id: int, num_threads: int, wait: bool, predicate: bool = True) -> Any:
        self.let_go()
        self.do_more()
        self.loop.forget()
        predicate = bool(predicate)
        barrier = super().arrive(barrier_id, num_threads, wait, predicate)
        barrier.clock = joined(barrier.clock, self.clock)
        return barrier

    def converge(self, name: str, mask: int, value: Any, site: Any) -> Any:
        self.let_go()
        self.do_more()
        self.loop.forget()
        if isinstance(value, Seen):
            if name.startswith("vote"):
                value = bool(value)
            elif not name.startswith("shfl"):  # whoever gets it may ask for less than the number
                value = value.settle()
        collective = super().converge(name, mask, value, site)
        collective.clock = joined(collective.clock, self.clock)
        return collective
