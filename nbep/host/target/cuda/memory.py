"""Memory of one rank: on its GPU, and on the host where the CPU reads what kernels write. What peers map: peers.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import ref

import numpy as np
from cuda.bindings import driver as cu

from nbep.host.target.cuda.driver import Device, check
from nbep.host.target.libraries import as_array
from nbep.host.target.memory import Memory, PolledMemory


class Owner:
    """What all arrays of a memory hold."""


class DeviceMemory(Memory):
    """Memory of a GPU, all zeros at first. allocated_bytes is num_bytes, or more where the driver hands out more."""

    def __init__(self, device: Device, num_bytes: int, name: str):
        self.device = device
        self.num_bytes = num_bytes
        self.allocated_bytes = max(num_bytes, 1)
        self.name = name
        self._owner_of_arrays: Callable[[], Owner | None] = lambda: None  # while there are such arrays
        with ExitStack() as undo:
            self.address = self._allocate(undo)
            self._clear()
            self._undo = undo.pop_all()

    def _allocate(self, undo: ExitStack) -> int:
        """The address of new memory; undo gets what gives it back."""
        num_bytes = self.allocated_bytes
        address = int(check(f"cuMemAlloc of {num_bytes} bytes for {self.name}", cu.cuMemAlloc(num_bytes)))
        undo.callback(lambda: check("cuMemFree", cu.cuMemFree(address)))
        return address

    def _clear(self) -> None:
        check("cuMemsetD8", cu.cuMemsetD8(self.address, 0, self.allocated_bytes))
        # The call may return before the memory is set, and comm streams do not wait for the default stream.
        check("cuStreamSynchronize", cu.cuStreamSynchronize(0))

    def array(self, dtype: Any, offset: int = 0, count: int = -1) -> Any:
        owner = self._owner_of_arrays() or Owner()
        self._owner_of_arrays = ref(owner)
        return as_array(self.address + offset, self.num_bytes - offset, dtype, owner)[: count if count >= 0 else None]

    @property
    def is_shown(self) -> bool:
        """As SymmetricMemory.is_shown."""
        return self._owner_of_arrays() is not None

    def write(self, offset: int, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        check("cuMemcpyHtoD", cu.cuMemcpyHtoD(self.address + offset, values.ctypes.data, values.nbytes))
        # The copy may return with the values only staged, and comm streams do not wait for the default stream.
        check("cuStreamSynchronize", cu.cuStreamSynchronize(0))

    def read(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        values = np.empty(count, dtype)
        check("cuMemcpyDtoH", cu.cuMemcpyDtoH(values.ctypes.data, self.address + offset, values.nbytes))
        return values

    def free(self) -> None:
        self._undo.close()


class HostVisibleMemory(PolledMemory):
    """Pinned host memory that kernels see too. `array` is the host's view; `address` is the device's."""

    def __init__(self, num_bytes: int, name: str):
        self.num_bytes = num_bytes
        flags = cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_PORTABLE
        host = int(check(f"cuMemHostAlloc of {num_bytes} bytes for {name}", cu.cuMemHostAlloc(num_bytes, flags)))
        with ExitStack() as undo:
            undo.callback(lambda: check("cuMemFreeHost", cu.cuMemFreeHost(host)))
            self.address = int(check("cuMemHostGetDevicePointer", cu.cuMemHostGetDevicePointer(host, 0)))
            self._undo = undo.pop_all()
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(host))
        self._bytes[:] = 0

    def array(self, dtype: Any, offset: int = 0, count: int = -1) -> np.ndarray:
        dtype = np.dtype(dtype)
        if count < 0:
            count = (self.num_bytes - offset) // dtype.itemsize
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def write(self, offset: int, values: np.ndarray) -> None:
        self.array(values.dtype, offset, values.size)[:] = values

    def read(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        return self.array(dtype, offset, count).copy()

    def free(self) -> None:
        self._undo.close()
