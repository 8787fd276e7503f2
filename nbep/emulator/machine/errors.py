"""What stops an emulated run.

Every error is an `EmulatorError`.  One raised by a thread's own act says what happened, which thread did it
(rank, kernel, block, warp, lane) and at which line of the kernel; the same facts are attributes, for tests and tools.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class EmulatorError(RuntimeError):
    """A fault in the emulated program.

    Attributes:
        thread: text naming rank, kernel, block, warp and lane, or None when no single thread is at fault
        source: `file:line` of the kernel code, or None
    """

    def __init__(self, message: str, thread: str | None = None, source: str | None = None):
        self.thread = thread
        self.source = source
        lines = [message]
        if thread:
            lines.append(f"  by {thread}")
        if source:
            lines.append(f"  at {source}")
        super().__init__("\n".join(lines))


class OutOfBounds(EmulatorError):
    """An access reaches past the end of an allocation."""


class UseAfterFree(EmulatorError):
    """An access to an allocation or mapping that has been given back."""


class Unmapped(EmulatorError):
    """An address that means nothing in this rank's address space: null, invented, or another rank's."""


class Misaligned(EmulatorError):
    """An address that is no multiple of the access size."""


class Uninitialized(EmulatorError):
    """A read of bytes that were never written. hole: which, and who has read them; see `faults`."""

    def __init__(self, message: str, thread: str | None = None, source: str | None = None, hole: Any = None):
        super().__init__(message, thread, source)
        self.hole = hole


class ReadOnly(EmulatorError):
    """A write to an array that the host passed as input."""


class HostAtomic(EmulatorError):
    """An atomic of scope sys on memory of the host, where CUDA promises none that other GPUs see in one step."""


class Divergence(EmulatorError):
    """Threads that should execute one collective together do not."""


class ProxyFence(EmulatorError):
    """A bulk copy reads shared memory whose last ordinary store no `fence.proxy.async` has published."""


class NonCoherent(EmulatorError):
    """A write to bytes that a running kernel has read as constant (`ld.global.nc`), or such a read after the write."""


class DataRace(EmulatorError):
    """An access to bytes that another thread has stored, with no release and acquire in between.

    Attributes:
        causes: what is wrong, in `reports.causes`: most often one thing
    """

    causes: tuple[Any, ...] = ()


class DeadlockError(EmulatorError):
    """Nothing can run any more; the message says why, and lists who waits for what.

    Attributes:
        full: the message, with all of the list
    """

    def __init__(self, message: str, thread: str | None = None, source: str | None = None, full: str = ""):
        super().__init__(message, thread, source)
        self.full = full or str(self)


class Trap(EmulatorError):
    """A kernel executed `trap`."""


@contextmanager
def explaining(error: BaseException) -> Iterator[None]:
    """Within, somebody finds out what to say of an error. What fails there is a note of it, and not raised instead."""
    try:
        yield
    except Exception as failure:
        error.add_note(f"its explanation is missing, for that failed: {type(failure).__name__}: {failure}")
