"""The runtime of the rank that runs now."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from nbep.host.target.base import Runtime

_current: ContextVar[Runtime | None] = ContextVar("nbep_runtime", default=None)
_of_process: Runtime | None = None


SHARED = (
    "ranks of nbep.spawn share the globals of a module: keep the buffer in a variable of the rank's own function, or "
    "start a process for each rank, with mpiexec or torchrun"
)


def is_rank_of_spawn() -> bool:
    """Whether the caller is one of several ranks in one process."""
    return _current.get() is not None


def check_rank(verb: str, its: Any) -> None:
    """Raises: RuntimeError if the caller is another rank of the same spawn than the one whose runtime this is"""
    here: Any = _current.get()
    if here is not None and here is not its and here.world is its.world:
        raise RuntimeError(f"{verb}: rank {here.rank} calls it of the buffer of rank {its.rank}; {SHARED}")


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
