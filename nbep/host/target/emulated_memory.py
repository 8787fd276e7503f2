"""Memory of the emulator, as the host sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbep.host.target.base import Array
from nbep.host.target.cpu_arrays import CpuTensors, is_torch_dtype
from nbep.host.target.libraries import numpy_dtype
from nbep.host.target.memory import HostWords, Memory, PolledMemory, SymmetricMemory


class EmulatedMemory(Memory):
    """An allocation of this rank's address space."""

    def __init__(self, space: Any, allocation: Any):
        self.space = space
        self.allocation = allocation
        self.address = allocation.address
        self.num_bytes = allocation.nbytes

    def array(self, dtype: Any, offset: int = 0, count: int = -1) -> Array:
        if is_torch_dtype(dtype):
            name = CpuTensors.name_of(dtype)
            return CpuTensors.wrap(self._array(numpy_dtype(name), offset, count), name)
        return self._array(dtype, offset, count)

    def _array(self, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
        return self.allocation.array(dtype, offset, count)

    def span(self, num_bytes: int) -> tuple[int, int]:
        begin = np.ndarray((1,), np.uint8, self.allocation.memory).ctypes.data
        return begin, begin + num_bytes

    def write(self, offset: int, values: np.ndarray) -> None:
        self.space.write(self.allocation, offset, values)

    def writes(self, array: np.ndarray) -> None:
        if not array.flags.c_contiguous:
            for part in array:
                self.writes(part)
        elif array.size > 0:
            self.space.cpu.write(self.allocation, array.ctypes.data - self.span(0)[0], array.nbytes)

    def read(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        return self.array(dtype, offset, count).copy()

    def free(self) -> None:
        self.space.free(self.allocation)


class EmulatedHostWords(HostWords):
    """Words whose reads are checked if the memory model asks for it; see nbep.emulator.models.host."""

    def __init__(self, memory: EmulatedMemory, offset: int, count: int):
        super().__init__(memory.array(np.int32, offset, count))
        self._memory = memory
        self._offset = offset

    def poll(self, begin: int, end: int) -> np.ndarray:
        offset, count = self._offset + 4 * begin, end - begin
        return self._memory.space.read(self._memory.allocation, np.int32, offset, count, polls=True)

    def poller(self, index: int) -> Callable[[], int]:
        return lambda: int(self.poll(index, index + 1)[0])

    def read(self) -> np.ndarray:
        return self._memory.space.read(self._memory.allocation, np.int32, self._offset, self._array.size)

    def fill(self, value: int) -> None:
        self._memory.write(self._offset, np.full_like(self._array, value))


class EmulatedPolledMemory(EmulatedMemory, PolledMemory):
    def words(self, offset: int, count: int) -> HostWords:
        return EmulatedHostWords(self, offset, count)


class EmulatedSymmetricMemory(EmulatedMemory, SymmetricMemory):
    """An allocation that the other ranks of the process map into their own address spaces."""

    def __init__(self, space: Any, allocation: Any):
        super().__init__(space, allocation)
        self.handle = allocation.handle
        self._mappings: list[Any] = []
        self._parts: list[Any] = []

    def open_peers(self, handles: list[Any], rank: int) -> list[int]:
        addresses = []
        for peer, handle in enumerate(handles):
            if peer == rank:
                addresses.append(self.address)
            elif handle is None:
                addresses.append(0)
            else:
                mapping = self._map(handle, peer)
                self._mappings.append(mapping)
                addresses.append(mapping.address)
        return addresses

    def cut(self, addresses: list[int], num_bytes: int) -> list[int]:
        parts = [self.space.part_at(address, num_bytes) if address else None for address in addresses]
        self._parts += [part for part in parts if part is not None]
        return [0 if part is None else part.address for part in parts]

    def close_peers(self) -> None:
        for part in self._parts:
            self.space.close(part)
        self._parts.clear()
        for mapping in self._mappings:
            self._unmap(mapping)
        self._mappings.clear()

    def _map(self, handle: Any, peer: int) -> Any:
        return self.space.open(handle)

    def _unmap(self, mapping: Any) -> None:
        self.space.close(mapping)
