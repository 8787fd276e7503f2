"""Memory on a GPU: this rank's own, what peers open, and what the CPU reads while kernels run.

peer in this process      its plain address
peer in another process   cuIpcOpenMemHandle of its handle
"""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cu

from nbep.host.runtime.base import Memory, SymmetricMemory
from nbep.host.runtime.cuda.arrays import as_array
from nbep.host.runtime.cuda.driver import Device, check


class DeviceMemory(Memory):
    """Memory from cuMemAlloc, all zeros at first."""

    def __init__(self, device: Device, num_bytes: int, name: str):
        self.device = device
        self.num_bytes = num_bytes
        self.name = name
        self.address = int(check(f"cuMemAlloc of {num_bytes} bytes for {name}", cu.cuMemAlloc(max(num_bytes, 1))))
        check("cuMemsetD8", cu.cuMemsetD8(self.address, 0, max(num_bytes, 1)))

    def array(self, dtype: Any, offset: int = 0, count: int = -1) -> Any:
        return as_array(self.address + offset, self.num_bytes - offset, dtype)[: count if count >= 0 else None]

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
        check("cuMemFree", cu.cuMemFree(self.address))


class PeerHandle(NamedTuple):
    """What a rank sends so that others can open its memory."""

    host: str
    pid: int
    bus_id: str
    address: int
    num_bytes: int
    ipc: bytes


class CudaSymmetricMemory(DeviceMemory, SymmetricMemory):
    """Device memory that peers of the node map."""

    def __init__(self, device: Device, num_bytes: int, name: str):
        super().__init__(device, num_bytes, name)
        ipc = check("cuIpcGetMemHandle", cu.cuIpcGetMemHandle(self.address))
        self.handle = PeerHandle(
            socket.gethostname(), os.getpid(), device.bus_id, self.address, num_bytes, bytes(ipc.reserved)
        )
        self._opened: list[int] = []

    def open_peers(self, handles: list[PeerHandle], rank: int) -> list[int]:
        """Raises: RuntimeError that names the two GPUs if they cannot reach each other"""
        return [self.address if peer == rank else self._open(handle, peer) for peer, handle in enumerate(handles)]

    def _open(self, handle: PeerHandle, peer: int) -> int:
        own = self.handle
        if handle.host != own.host:
            raise RuntimeError(f"rank {peer} is on host {handle.host}, this rank on {own.host}: not one node")
        if not self.device.can_reach(handle.bus_id):
            raise RuntimeError(f"GPU {own.bus_id} cannot reach GPU {handle.bus_id} of rank {peer}: no peer access")
        if handle.pid == own.pid:
            return handle.address
        ipc = cu.CUipcMemHandle()
        ipc.reserved = handle.ipc
        flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(check(f"cuIpcOpenMemHandle of rank {peer}", cu.cuIpcOpenMemHandle(ipc, flags)))
        self._opened.append(address)
        return address

    def close_peers(self) -> None:
        for address in self._opened:
            check("cuIpcCloseMemHandle", cu.cuIpcCloseMemHandle(address))
        self._opened.clear()


class HostVisibleMemory(Memory):
    """Pinned host memory that kernels see too. `array` is the host's view; `address` is the device's."""

    def __init__(self, num_bytes: int, name: str):
        self.num_bytes = num_bytes
        flags = cu.CU_MEMHOSTALLOC_DEVICEMAP | cu.CU_MEMHOSTALLOC_PORTABLE
        self._host = int(check(f"cuMemHostAlloc of {num_bytes} bytes for {name}", cu.cuMemHostAlloc(num_bytes, flags)))
        self.address = int(check("cuMemHostGetDevicePointer", cu.cuMemHostGetDevicePointer(self._host, 0)))
        self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self._host))
        self._bytes[:] = 0

    def array(self, dtype: Any, offset: int = 0, count: int = -1) -> np.ndarray:
        dtype = np.dtype(dtype)
        if count < 0:
            count = (self.num_bytes - offset) // dtype.itemsize
        return self._bytes[offset : offset + count * dtype.itemsize].view(dtype)

    def write(self, offset: int, values: np.ndarray) -> None:
        self.array(values.dtype, offset, values.size)[:] = values

    def free(self) -> None:
        check("cuMemFreeHost", cu.cuMemFreeHost(self._host))
