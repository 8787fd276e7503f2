"""The memory model "checked": two accesses to the same bytes, one of them a store, that nothing orders are an error.

A store is seen by all at once, as with "sc".  But a thread may only meet the bytes that another one has stored if it
can know of the store: after a release, a barrier or a syncwarp of the one who stored, and whatever takes that on to
this thread: an acquire of the released value, the same barrier, any chain of them, or what orders kernels: see
`streams`.  A strong store is known, too, to whoever reads its value with a strong load, and to those who know of that
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

from typing import Any

from ..machine.access import AccessingThread
from ..machine.kinds import KINDS
from ..machine.memory import Allocation
from ..machine.orders import POLLED
from .copies import CopyCheckingThread
from .knowledge import GRANULE_BITS, last_to

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
        self._modified(allocation, offset, kind, order, scope)
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
        self._modified(self.shared, address, kind, order, "cta")
        return old

    def _modified(self, allocation: Allocation, offset: int, kind: str, order: str, scope: str) -> None:
        nbytes = SIZES[kind]
        before = last_to(allocation.last_stores.get(offset >> GRANULE_BITS, ()), offset, offset + nbytes)
        self.receive(allocation, offset, nbytes, order, scope)
        store = self.note_store(allocation, offset, nbytes, order, scope, is_atomic=True)
        self.send(allocation, store, modifies=before is not None)

    def spin(self, deadline_ns: int) -> bool:
        """A wait that times out ends the checks: what threads do then, they do to bytes that are not there."""
        is_over = super().spin(deadline_ns)
        self.world.has_failed |= is_over
        return is_over
