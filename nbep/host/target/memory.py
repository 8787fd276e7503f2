"""Memory of a target, as the host layer sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from nbep.host.target.arrays import Array

Describe = Callable[[int], str]
HandleType = Literal["ipc", "posix_fd", "fabric", "host"]  # see Buffer


class Reach(NamedTuple):
    """Who reaches symmetric memory besides its rank.

    node_size: ranks of a node, which are consecutive in the communicator: their kernels open each other's memory
    by_nics: the NICs of all other ranks reach it, too
    """

    node_size: int
    by_nics: bool


class WantedMemory(NamedTuple):
    """Symmetric memory that is to be made. describe(offset) names its cells in reports.

    handle_type: what a GPU's driver makes for peers in other processes; the emulator has only its own way, and takes no
    atomics of scope sys on memory of the host
    zero: its bytes begin as zeros; otherwise they are unspecified
    """

    num_bytes: int
    name: str
    describe: Describe
    handle_type: HandleType
    zero: bool


class Memory(ABC):
    """Device memory of this rank. `address` is what kernels get."""

    address: int
    num_bytes: int

    @abstractmethod
    def array(self, dtype: Any, offset: int = 0, count: int = -1) -> Array:
        """A 1-D array over the memory: `count` elements from byte `offset` on; -1 means all that fit."""

    def span(self, num_bytes: int) -> tuple[int, int]:
        """From where to where its first bytes lie, as View.address counts."""
        return self.address, self.address + num_bytes

    @abstractmethod
    def write(self, offset: int, values: np.ndarray) -> None:
        """Copy values to byte `offset` from the host; it is done on return."""

    def writes(self, array: np.ndarray) -> None:  # noqa: B027 - a GPU does not check its host
        """The caller is about to store to an array over the memory: whether it may is seen here."""

    @abstractmethod
    def read(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        """A copy of `count` elements from byte `offset` on, as they are now; the host gets them."""

    @abstractmethod
    def free(self) -> None:
        """Give the memory back. Nothing may use it any more."""


class Span:
    """A part of a memory, from where to where an array may begin."""

    def __init__(self, runtime: Any, memory: Memory, begin: int, num_bytes: int):
        self._runtime, self._begin, self._num_bytes = runtime, memory.span(0)[0] + begin, num_bytes

    def offset_of(self, array: Any) -> int:
        """How many bytes behind its begin an array begins, or an address is, a multiple of 16; or else -1."""
        address = array if array.__class__ is int else self._runtime.view(array).address
        offset = address - self._begin
        return offset if 0 <= offset < self._num_bytes and offset % 16 == 0 else -1


class HostWords:
    """Words of memory that kernels write while the CPU reads them."""

    def __init__(self, array: np.ndarray):
        self._array = array

    def poll(self, begin: int, end: int) -> np.ndarray:
        """Some words as they are now. What was released with them is there for a `read` that follows."""
        return self._array[begin:end]

    def poller(self, index: int) -> Callable[[], int]:
        """What polls one of them."""
        return partial(self._array.item, index)

    def read(self) -> np.ndarray:
        """A copy of all: of words that a poll has announced, or the end of their kernel."""
        return self._array.copy()

    def fill(self, value: int) -> None:
        """Set all, while no kernel writes them."""
        self._array[:] = value


class PolledMemory(Memory):
    """Memory that kernels write and that the CPU reads while they run."""

    def words(self, offset: int, count: int) -> HostWords:
        """`count` words of 32 bits from byte `offset` on."""
        return HostWords(self.array(np.int32, offset, count))


class SymmetricMemory(Memory):
    """Memory that peers of the node can open.

    Life cycle: allocate_symmetric (collective) -> `handle` goes to the peers -> open_peers -> use -> close_peers
    -> free (collective). `handle` can be sent over the communicator that the memory was allocated with.

    is_kept: `free` comes later, see shared_memory.KeptMemory
    """

    handle: Any
    is_kept = False

    @property
    def is_shown(self) -> bool:
        """Whether somebody holds an array of it that would lose its memory with `free`."""
        return False

    @abstractmethod
    def open_peers(self, handles: list[Any], rank: int) -> list[int]:
        """Addresses at which this rank sees each peer's memory, its own included. handles[rank] is its own.

        0 for a peer whose handle is None.
        """

    def cut(self, addresses: list[int], num_bytes: int) -> list[int]:
        """Where kernels see the same memories and no more than their first bytes, if the target can do that."""
        return addresses

    @abstractmethod
    def close_peers(self) -> None:
        """Undo open_peers and cut."""
