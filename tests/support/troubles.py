"""One thing that goes wrong in a run: a rank that stops, a word that gets lost on its way, a wait that times out.

`planted` lets it happen at the `number`-th occasion of a rank, and counts the occasions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from nbep.emulator.machine.access import AccessingThread

LOST, EXPIRED, DEAD = "lost", "expired", "dead"


@dataclass(frozen=True)
class Trouble:
    """LOST: a store or an add of scope sys to another rank's memory; EXPIRED: a look at a deadline; DEAD: a call."""

    kind: str
    rank: int
    number: int


@contextmanager
def planted(trouble: Trouble) -> Iterator[list[Trouble]]:
    """Let it happen. What is yielded fills with the occasions of its kind that there have been."""
    occasions: list[Trouble] = []

    def is_it(thread: AccessingThread, kind: str) -> bool:
        if thread.rank != trouble.rank or kind != trouble.kind:
            return False
        occasions.append(Trouble(kind, trouble.rank, len(occasions)))
        return len(occasions) - 1 == trouble.number

    def is_lost(thread: AccessingThread, address: int, scope: str) -> bool:
        allocation = thread.segments.get(address >> 32)
        goes_out = scope == "sys" and allocation is not None and allocation.rank != thread.rank
        return goes_out and is_it(thread, LOST)

    store, atomic, spin = AccessingThread.store, AccessingThread.atomic, AccessingThread.spin

    def losing_store(self, address, kind, value, order, scope):
        if not is_lost(self, address, scope):
            store(self, address, kind, value, order, scope)

    def losing_atomic(self, op, address, kind, operand, order, scope, compare=None):
        if is_lost(self, address, scope):
            return 0
        return atomic(self, op, address, kind, operand, order, scope, compare)

    def hasty_spin(self, deadline_ns):
        return True if is_it(self, EXPIRED) else spin(self, deadline_ns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AccessingThread, "store", losing_store)
        patch.setattr(AccessingThread, "atomic", losing_atomic)
        patch.setattr(AccessingThread, "spin", hasty_spin)
        yield occasions
