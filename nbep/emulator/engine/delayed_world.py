"""A run whose threads are compiled, and whose stores are late: what Python does of `models.delayed`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..machine.block import WARP_SIZE
from ..machine.memory import WORD_BYTES, Allocation
from . import state
from .stand_ins import SharedRandom
from .state import DELAYED_TABLES, address_of
from .world import ROUND, CompiledWorld, HostMemory, field

GRANULES = DELAYED_TABLES["granules"].dtype


class DelayedMemory(HostMemory):
    """The CPU as a writer: a word of its own tells all that has arrived. has_read: has it read since this was False?"""

    _world: DelayedWorld
    has_read = False

    def read(self, allocation: Any, offset: int, nbytes: int, polls: bool) -> None:
        super().read(allocation, offset, nbytes, polls)
        self.has_read = True

    def has_written(self, allocation: Any, offset: int, nbytes: int) -> None:
        super().has_written(allocation, offset, nbytes)
        if nbytes <= WORD_BYTES:
            self._world.notes_of(allocation)["signal"][offset // ROUND] = 1


class DelayedWorld(CompiledWorld):
    """See `World`; for the model "delayed" alone."""

    cpu: Any
    model = "delayed"
    host_class = DelayedMemory
    num_sides = 5  # with what strong stores to shared memory tell
    moment, unfinished = field("moment"), field("unfinished")

    def __init__(self, num_ranks: int, seed: int = 0, **options: Any):
        self._notes: dict[int, tuple[np.ndarray, dict]] = {}  # by the id of what all mappings share
        super().__init__(num_ranks, seed, **options)
        self.early = SharedRandom(self.tables, self._machine, self.early.getstate(), early=True)
        self.tables.run["early_rate"] = self.early_rate

    def start_block(self, launch: Any) -> None:
        super().start_block(launch)
        tables, block = self.tables, launch.blocks[-1]
        first = block.number * WARP_SIZE
        tables.blocks["serial"][block.number] = self.count_block()
        knowing = tables.knowing[first : first + launch.block]
        knowing[:] = 0
        for name in ("floor", "block_floor", "first_moment"):
            knowing[name] = self.moment

    def notes_of(self, allocation: Allocation) -> np.ndarray:
        """The versions of an allocation's bytes, and those on their way, the same for all mappings of them."""
        key = id(allocation.pending)
        if key not in self._notes:
            number = len(allocation.memory) // ROUND + 1
            self._notes[key] = state.new_zeros(number * GRANULES.itemsize).view(GRANULES), allocation.pending
        return self._notes[key][0]

    def notes_at(self, allocation: Allocation) -> int:
        return address_of(self.notes_of(allocation))

    def _forget(self, allocation: Allocation) -> None:
        super()._forget(allocation)
        notes, _ = self._notes.pop(id(allocation.pending), (None, None))
        if notes is not None and self.call("forget_granules", address_of(notes), len(notes)):
            self._notes[id(notes)] = notes, {}  # stores are on their way there

    def _poll_hosts(self) -> None:
        if self.moment >> 30:
            self._give_up("more stores became visible than the engine counts")
        self.cpu.has_read = False
        super()._poll_hosts()

    def _operate(self, how: str = "operate") -> None:
        """Nobody can run: stores arrive one by one. Hosts that wait for no memory need not look after each."""
        super()._operate(how if self.cpu.has_read else "drain")

    def _handle(self, event: int) -> None:
        super()._handle(event)
        store, self.unfinished = self.unfinished, 0
        if store:  # which has ended a launch while it arrived
            self.tables.run["event"] = 0
            self.call("come", state.MOST_OPERATIONS + store)
            if self.tables.run["event"]:
                self._handle(int(self.tables.run["event"]))
