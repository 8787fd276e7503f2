"""Calls a tracer at every access, wait, launch and exit.  A world without one runs threads that know nothing of it.

A tracer has any of these methods:

    on_load(thread, allocation, offset, kind, value, order, scope)      after the load
    on_store(thread, allocation, offset, kind, value, order, scope)     after the store was issued
    on_atomic(thread, allocation, offset, atomic, order, scope)         after it; atomic: see Atomic
    on_copy(thread, allocation, offset, data, site)                     a bulk copy has written; site: who asked for it
    on_park(thread, cells)      cells: list of (allocation, offset, kind, value seen)
    on_wake(thread)
    on_meet(thread, name)       it comes to a barrier, "barrier", or to a collective, and may have to wait there
    on_launch(launch)
    on_exit(thread)
    on_failure(error)           what stops the run; nothing is called afterwards
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from .machine.source import Site
from .machine.thread import Thread

HOOKS = (
    "on_load",
    "on_store",
    "on_atomic",
    "on_copy",
    "on_park",
    "on_wake",
    "on_meet",
    "on_launch",
    "on_exit",
    "on_failure",
)


class Atomic(NamedTuple):
    """What an atomic has done to a cell. For a compare-and-swap, operand is what it swaps in."""

    kind: str
    op: str
    operand: Any
    old: Any  # what was in the cell


SILENT = SimpleNamespace(**{name: lambda *_: None for name in HOOKS})


def hooks(tracer: Any) -> SimpleNamespace:
    """A tracer's methods; those it lacks do nothing. Raises: ValueError if it has none of them"""
    if isinstance(tracer, type):
        raise ValueError(f"tracer: got the class {tracer.__name__}; must be an object, as {tracer.__name__}()")
    if not any(callable(getattr(tracer, name, None)) for name in HOOKS):
        what = type(tracer).__name__
        raise ValueError(f"tracer: got {what}; must have some of {', '.join(HOOKS)}, as nbep.lab.trace.Trace() does")
    return SimpleNamespace(**{name: getattr(tracer, name, lambda *_: None) for name in HOOKS})


class TracingMixin:
    """Overrides of `Thread` that tell `world.hooks`."""

    __slots__ = ()

    def load(self: Any, address: int, kind: str, order: str, scope: str) -> Any:
        value = super().load(address, kind, order, scope)  # type: ignore[misc]
        allocation = self.segments[address >> 32]
        self.world.hooks.on_load(self, allocation, address & 0xFFFFFFFF, kind, value, order, scope)
        return value

    def store(self: Any, address: int, kind: str, value: Any, order: str, scope: str) -> None:
        super().store(address, kind, value, order, scope)  # type: ignore[misc]
        allocation = self.segments[address >> 32]
        self.world.hooks.on_store(self, allocation, address & 0xFFFFFFFF, kind, value, order, scope)

    def atomic(
        self: Any, op: str, address: int, kind: str, operand: Any, order: str, scope: str, compare: Any = None
    ) -> Any:
        old = super().atomic(op, address, kind, operand, order, scope, compare)  # type: ignore[misc]
        allocation = self.segments[address >> 32]
        done = Atomic(kind, op, operand, old)
        self.world.hooks.on_atomic(self, allocation, address & 0xFFFFFFFF, done, order, scope)
        return old

    def load_shared(self: Any, address: int, kind: str, order: str) -> Any:
        value = super().load_shared(address, kind, order)  # type: ignore[misc]
        self.world.hooks.on_load(self, self.shared, address, kind, value, order, "cta")
        return value

    def store_shared(self: Any, address: int, kind: str, value: Any, order: str) -> None:
        super().store_shared(address, kind, value, order)  # type: ignore[misc]
        self.world.hooks.on_store(self, self.shared, address, kind, value, order, "cta")

    def atomic_shared(
        self: Any, op: str, address: int, kind: str, operand: Any, order: str, compare: Any = None
    ) -> Any:
        old = super().atomic_shared(op, address, kind, operand, order, compare)  # type: ignore[misc]
        self.world.hooks.on_atomic(self, self.shared, address, Atomic(kind, op, operand, old), order, "cta")
        return old

    def put_bytes(self: Any, allocation: Any, offset: int, data: bytes, site: Site | None) -> None:
        super().put_bytes(allocation, offset, data, site)  # type: ignore[misc]
        self.world.hooks.on_copy(self, allocation, offset, data, site)

    def watch(self: Any, cells: list, deadline_ns: int) -> bool:
        self.world.hooks.on_park(self, cells)
        expired = super().watch(cells, deadline_ns)  # type: ignore[misc]
        self.world.hooks.on_wake(self)
        return expired

    def collect(self: Any, name: str, mask: int, value: Any, site: Site | None) -> Any:
        self.world.hooks.on_meet(self, name)
        return super().collect(name, mask, value, site)  # type: ignore[misc]

    def meet(self: Any, barrier_id: int, num_threads: int, predicate: bool) -> Any:
        self.world.hooks.on_meet(self, "barrier")
        return super().meet(barrier_id, num_threads, predicate)  # type: ignore[misc]

    def leave(self: Any) -> None:
        self.world.hooks.on_exit(self)
        super().leave()  # type: ignore[misc]


def traced(thread_class: type[Thread]) -> type[Thread]:
    """`thread_class` with tracing."""
    return type(f"Traced{thread_class.__name__}", (TracingMixin, thread_class), {"__slots__": ()})
