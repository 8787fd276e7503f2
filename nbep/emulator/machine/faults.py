"""What threads do wrong, as facts. One that takes more than a sentence is worded in `reports`: see `error_of`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from .carrier import CURRENT
from .errors import EmulatorError
from .source import describe_site, site_of

if TYPE_CHECKING:
    from .block import Block, NamedBarrier
    from .memory import Allocation
    from .thread import Thread
    from .warp import Collective


class AccessFault(NamedTuple):
    """An access failed.

    shared: the access was made through a shared-memory primitive
    cause: the Python exception that the fast path met
    polls: it may be a wait, or an atomic, which takes what was there before
    """

    thread: Thread
    address: int
    kind: str
    storing: bool
    shared: bool
    cause: Exception
    polls: bool = False


class NoSegment(NamedTuple):
    """An address names no segment of the thread's rank, or one that is freed; access: how it was to be accessed."""

    thread: Thread
    address: int
    access: str


class Hole(NamedTuple):
    """Bytes that a thread has tried to load before any store; polls: it may have waited, or is an atomic."""

    thread: Thread
    allocation: Allocation
    offset: int
    nbytes: int
    polls: bool = False


class Diverged(NamedTuple):
    """A lane came to one collective and is named by the mask of another one; name: where it came to."""

    thread: Thread
    name: str
    collective: Collective


class LaneLeft(NamedTuple):
    """A lane has returned from the kernel while others of its warp are inside a collective that names it."""

    thread: Thread
    collective: Collective


class NeverFull(NamedTuple):
    """The threads still alive cannot fill a barrier of a block."""

    block: Block
    barrier: NamedBarrier


def error_at(thread: Thread, kind: type[EmulatorError], message: str) -> EmulatorError:
    """An error of class `kind` blamed on `thread` at the line of kernel code that it executes."""
    return kind(message, *who_and_where(thread))


def who_and_where(thread: Thread) -> tuple[str, str]:
    """A thread, and the line of kernel code that it executes."""
    frame = sys._getframe(1) if thread is CURRENT.get() else thread.gr_frame
    return thread.describe(), describe_site(site_of(frame))
