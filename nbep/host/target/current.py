"""The runtime of the rank that runs now."""

from __future__ import annotations

from contextvars import ContextVar

from nbep.host.target.base import Runtime

_current: ContextVar[Runtime | None] = ContextVar("nbep_runtime", default=None)
_of_process: Runtime | None = None


def current_runtime() -> Runtime | None:
    """The runtime of the rank that calls this, None outside of a rank."""
    return _current.get() or _of_process


def set_process_runtime(runtime: Runtime) -> None:
    """Make this the runtime of every thread of the process that has none of its own, e.g. of torch's backward pass."""
    global _of_process
    _of_process = runtime


def set_current_runtime(runtime: Runtime) -> None:
    """Make this the runtime of the calling rank (its greenlet or thread)."""
    _current.set(runtime)
