"""Memory of one rank: on its GPU, on the host where the CPU reads what kernels write, and a class for each handle type
of what peers map.

peer in this process      its plain address: virtual ranks share a card, which may access all of its own memory
peer in another process   "ipc"       cuIpcOpenMemHandle of 64 bytes that came with the handles of all ranks
                          "posix_fd"  a file descriptor that came into this rank's mailbox, imported and mapped
                          "fabric"    64 bytes that came with the handles of all ranks, imported and mapped
                          "host"      a file descriptor that came into the mailbox, mapped and registered

The driver's virtual memory management: memory of a GPU, and addresses of this process at which it appears.

cuMemCreate, or import of a peer's -> memory handle -> reserve addresses -> map -> set access -> use
-> unmap -> free the addresses -> release

Each step leaves its undoing in the caller's ExitStack, so a failure half-way gives back what was made.

Memory of the host that processes share and their GPUs map.

new memory, or a peer's file descriptor -> map -> register: pages stay where they are, and all GPUs of the process see
them -> the device's address -> use -> unregister -> unmap

That memory has no name. When the last process that has it mapped ends, however it ends, it is free: nothing is left in
/dev/shm, and how large that is does not matter.

Source: DeepEP csrc/utils/shared_memory.hpp, SharedMemoryAllocator; memfd_create(2), proc_meminfo(5); CUDA Driver API,
"Virtual Memory Management" and "Memory Management" (cuMemHostRegister)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
from cuda.bindings import driver as cu

from nbep.device.alignment import align_up
from nbep.host.target.cuda.driver import CudaError, Device, check
from nbep.host.target.cuda.mailbox import Mailbox
from nbep.host.target.libraries import as_array
from nbep.host.target.memory import HandleType, Memory, PolledMemory, SymmetricMemory


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


# What peers map


# What a driver answers where GPUs have no way to each other
NO_ACCESS = (cu.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, cu.CUresult.CUDA_ERROR_INVALID_DEVICE)
OVER_HOST = 'with handle_type="host" they meet in the memory of the host, which is slower'

_process = b""


def _name_process() -> None:
    global _process
    _process = secrets.token_bytes(16)


_name_process()
os.register_at_fork(after_in_child=_name_process)


class PeerHandle(NamedTuple):
    """What a rank sends so that others can open its memory. `exported` is for other processes, by handle type.

    `process` is random: containers with one host name may each have a process of the same number.
    """

    host: str
    process: bytes
    bus_id: str
    address: int
    num_bytes: int
    exported: Any


class CudaSymmetricMemory(DeviceMemory, SymmetricMemory):
    """Memory that peers of the node map. _allocate sets `exported`.

    Raises: RuntimeError if the GPU or its driver does not offer the handle type
    """

    handle_type: HandleType
    exported: Any

    def __init__(self, device: Device, num_bytes: int, name: str):
        super().__init__(device, num_bytes, name)
        host = socket.gethostname()
        self.handle = PeerHandle(host, _process, device.bus_id, self.address, self.allocated_bytes, self.exported)
        self._opened = ExitStack()
        self._addresses: dict[int, int] = {}  # of the peers that are open

    def open_peers(self, handles: list[PeerHandle | None], rank: int) -> list[int]:
        """Raises: RuntimeError that names the peer and both GPUs if one of them cannot reach the other"""
        for peer, handle in enumerate(handles):
            if handle is not None and peer not in self._addresses:
                self._addresses[peer] = self._address_of(handle, peer)
        return [0 if handle is None else self._addresses[peer] for peer, handle in enumerate(handles)]

    def _address_of(self, handle: PeerHandle, peer: int) -> int:
        own = self.handle
        if handle.host != own.host:
            raise RuntimeError(f"rank {peer} is on host {handle.host}, this rank on {own.host}: not one node")
        self._check_reach(handle, peer)
        if handle.process == own.process:
            return handle.address
        try:
            return self._open(handle, peer, f"memory of rank {peer} on GPU {handle.bus_id}")
        except CudaError as error:
            if error.code not in NO_ACCESS:
                raise
            raise RuntimeError(f"{error}; {OVER_HOST}") from error

    def _check_reach(self, handle: PeerHandle, peer: int) -> None:
        if not self.device.can_reach(handle.bus_id):
            pair = f"GPU {self.device.bus_id} cannot reach GPU {handle.bus_id} of rank {peer}"
            raise RuntimeError(f"{pair}: no peer access; {OVER_HOST}")

    def _check_offered(self, attribute: Any) -> None:
        """Raises: RuntimeError if this attribute of the device is 0, which says whether it has what is needed"""
        if not self.device.attribute(attribute):
            raise RuntimeError(f"{self._refusal} ({attribute.name} is 0)")

    @property
    def _refusal(self) -> str:
        return f"handle_type: got {self.handle_type}; GPU {self.device.bus_id} does not offer it"

    @abstractmethod
    def _open(self, handle: PeerHandle, peer: int, what: str) -> int:
        """The address of a peer's memory, mapped into this process; _opened gets what undoes it."""

    def close_peers(self) -> None:
        self._addresses.clear()
        self._opened.close()


class IpcMemory(CudaSymmetricMemory):
    """Memory from cuMemAlloc, with a CUDA IPC handle."""

    handle_type = "ipc"

    def _allocate(self, undo: ExitStack) -> int:
        address = super()._allocate(undo)
        ipc = check("cuIpcGetMemHandle", cu.cuIpcGetMemHandle(address))
        self.exported = ctypes.string_at(ipc.getPtr(), cu.CU_IPC_HANDLE_SIZE)  # cuda-bindings 13.5 names no field
        return address

    def _open(self, handle: PeerHandle, peer: int, what: str) -> int:
        ipc = cu.CUipcMemHandle()
        ctypes.memmove(ipc.getPtr(), handle.exported, cu.CU_IPC_HANDLE_SIZE)
        flags = cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(check(f"cuIpcOpenMemHandle of {what}", cu.cuIpcOpenMemHandle(ipc, flags)))
        self._opened.callback(lambda: check("cuIpcCloseMemHandle", cu.cuIpcCloseMemHandle(address)))
        return address


class VmmMemory(CudaSymmetricMemory):
    """Memory from cuMemCreate, which other processes import and map."""

    driver_type: Any  # its CUmemAllocationHandleType
    supported: Any  # the device attribute that tells whether it is offered
    needs: str  # what is missing where the driver refuses it

    def _allocate(self, undo: ExitStack) -> int:
        self._check_offered(self.supported)
        with self._refused():
            properties = cu.CUmemAllocationProp()
            properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            properties.location.id = self.device.ordinal
            properties.requestedHandleTypes = self.driver_type
            minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            granularity = check("cuMemGetAllocationGranularity", cu.cuMemGetAllocationGranularity(properties, minimum))
            size = self.allocated_bytes = align_up(self.allocated_bytes, int(granularity))
            physical = check(f"cuMemCreate of {size} bytes for {self.name}", cu.cuMemCreate(size, properties, 0))
            undo.callback(lambda: check("cuMemRelease", cu.cuMemRelease(physical)))
            self._export(physical, undo)
        return map_gpu_memory(self.device, physical, self.allocated_bytes, self.name, undo)

    @contextmanager
    def _refused(self) -> Iterator[None]:
        """Say what is missing if the driver refuses a call within for what it is, not for how it goes."""
        try:
            yield
        except CudaError as error:
            if error.code not in (cu.CUresult.CUDA_ERROR_NOT_PERMITTED, cu.CUresult.CUDA_ERROR_NOT_SUPPORTED):
                raise
            raise RuntimeError(f"{self._refusal}: {error}; {self.needs}") from error

    @abstractmethod
    def _export(self, physical: Any, undo: ExitStack) -> None:
        """Set `exported`. physical is the driver's handle of the memory."""

    def _export_as(self, physical: Any) -> Any:
        return check("cuMemExportToShareableHandle", cu.cuMemExportToShareableHandle(physical, self.driver_type, 0))

    def _map_peer(self, handle: PeerHandle, shared: int | bytes, what: str) -> int:
        with self._refused():
            result = cu.cuMemImportFromShareableHandle(shared, self.driver_type)
            physical = check(f"cuMemImportFromShareableHandle of {what}", result)
            self._opened.callback(lambda: check("cuMemRelease", cu.cuMemRelease(physical)))
        return map_gpu_memory(self.device, physical, handle.num_bytes, what, self._opened)


class FabricMemory(VmmMemory):
    """Memory that the NVLink fabric knows by 64 bytes."""

    handle_type = "fabric"
    driver_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    supported = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED
    needs = "it takes an IMEX channel that this user may open, /dev/nvidia-caps-imex-channels/channel*"

    def _export(self, physical: Any, undo: ExitStack) -> None:
        self.exported = self._export_as(physical).data

    def _open(self, handle: PeerHandle, peer: int, what: str) -> int:
        return self._map_peer(handle, handle.exported, what)


class MailedMemory(CudaSymmetricMemory):
    """Memory that a file descriptor stands for. `exported` is where this rank wants those of its peers."""

    _mailbox: Mailbox

    def _open_mailbox(self, undo: ExitStack) -> None:
        self._mailbox = Mailbox()
        undo.callback(self._mailbox.close)
        self.exported = self._mailbox.address

    def open_peers(self, handles: list[PeerHandle | None], rank: int) -> list[int]:
        # Sent before anything can fail for a reason that is this rank's own: the peers wait for it.
        self._send([None if peer in self._addresses else handle for peer, handle in enumerate(handles)], rank)
        addresses = super().open_peers(handles, rank)
        self._mailbox.close()  # all peers have sent; after a failure it takes what is still to come until `free`
        return addresses

    def _send(self, handles: list[PeerHandle | None], rank: int) -> None:
        """Send this rank's memory to the peers in other processes of the host."""
        own, fd = self.handle, self._descriptor()
        try:
            for peer, handle in enumerate(handles):
                if handle is not None and handle.host == own.host and handle.process != own.process:
                    try:
                        self._mailbox.send(fd, handle.exported, rank, peer)
                    except OSError as error:
                        raise RuntimeError(f"cannot send a file descriptor to rank {peer}: {error}") from error
        finally:
            os.close(fd)

    @abstractmethod
    def _descriptor(self) -> int:
        """A new file descriptor of this rank's memory."""

    def _open(self, handle: PeerHandle, peer: int, what: str) -> int:
        fd = self._mailbox.receive(peer)
        try:
            return self._map_peer(handle, fd, what)
        finally:
            os.close(fd)

    @abstractmethod
    def _map_peer(self, handle: PeerHandle, shared: int, what: str) -> int:
        """The address of a peer's memory, from its file descriptor; _opened gets what undoes it."""


class PosixFdMemory(MailedMemory, VmmMemory):
    """Memory from cuMemCreate that a file descriptor stands for."""

    handle_type = "posix_fd"
    driver_type = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    supported = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    needs = "it takes a driver with virtual memory management"

    def _export(self, physical: Any, undo: ExitStack) -> None:
        self._physical = physical
        self._open_mailbox(undo)

    def _descriptor(self) -> int:
        return self._export_as(self._physical)

    def _map_peer(self, handle: PeerHandle, shared: int | bytes, what: str) -> int:
        return VmmMemory._map_peer(self, handle, shared, what)


class HostMemory(MailedMemory):
    """Memory of the host. All GPUs map it, whether they reach each other or not."""

    handle_type = "host"

    def _allocate(self, undo: ExitStack) -> int:
        self._check_offered(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)
        self._fd = create_host_memory(self.allocated_bytes, self.name, undo)
        self._open_mailbox(undo)
        self._mapped, address = map_host_memory(self._fd, self.allocated_bytes, self.name, undo)
        return address

    def _clear(self) -> None:
        """New memory is zeros."""

    def _check_reach(self, handle: PeerHandle, peer: int) -> None:
        """The GPUs need no way to each other."""

    def _descriptor(self) -> int:
        return os.dup(self._fd)

    def _map_peer(self, handle: PeerHandle, shared: int, what: str) -> int:
        return map_host_memory(shared, handle.num_bytes, what, self._opened)[1]

    def write(self, offset: int, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values)
        self._mapped[offset : offset + values.nbytes] = values.tobytes()

    def read(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        return np.frombuffer(self._mapped, np.uint8, count * np.dtype(dtype).itemsize, offset).view(dtype).copy()


SYMMETRIC_MEMORY: dict[HandleType, type[CudaSymmetricMemory]] = {
    "ipc": IpcMemory,
    "posix_fd": PosixFdMemory,
    "fabric": FabricMemory,
    "host": HostMemory,
}


# --- The driver's virtual memory management


def map_gpu_memory(device: Device, handle: Any, num_bytes: int, what: str, undo: ExitStack) -> int:
    """The address at which this process now sees the memory; the device may read and write it, no other may."""
    address = int(check("cuMemAddressReserve", cu.cuMemAddressReserve(num_bytes, 0, 0, 0)))
    undo.callback(lambda: check("cuMemAddressFree", cu.cuMemAddressFree(address, num_bytes)))
    check(f"cuMemMap of {what}", cu.cuMemMap(address, num_bytes, 0, handle, 0))
    undo.callback(lambda: check("cuMemUnmap", cu.cuMemUnmap(address, num_bytes)))
    access = cu.CUmemAccessDesc()
    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device.ordinal
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(f"cuMemSetAccess of GPU {device.bus_id} to {what}", cu.cuMemSetAccess(address, num_bytes, [access], 1))
    return address


# --- Memory of the host that processes share and their GPUs map


def create_host_memory(num_bytes: int, name: str, undo: ExitStack) -> int:
    """New memory, all zeros: its file descriptor. Its pages are taken when it is registered.

    Raises: RuntimeError if the host does not have so much; OSError if it has no such files
    """
    available = available_bytes()
    if num_bytes > available:
        raise RuntimeError(f"no {num_bytes} bytes of the host's memory for {name}: {available} are available")
    fd = os.memfd_create(f"nbep {name}")
    undo.callback(os.close, fd)
    os.ftruncate(fd, num_bytes)
    return fd


def available_bytes() -> int:
    """Memory of the host that can be had without moving other memory to disk."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


_registered: dict[int, mmap.mmap] = {}  # by address: a mapping ends with its last reference, while GPUs may use it


def map_host_memory(fd: int, num_bytes: int, what: str, undo: ExitStack) -> tuple[mmap.mmap, int]:
    """The memory as this process sees it, and the address at which its GPU does."""
    mapped = mmap.mmap(fd, num_bytes)
    undo.callback(mapped.close)
    host = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    flags = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
    check(f"cuMemHostRegister of {num_bytes} bytes for {what}", cu.cuMemHostRegister(host, num_bytes, flags))
    _registered[host] = mapped

    def unregister() -> None:
        check("cuMemHostUnregister", cu.cuMemHostUnregister(host))
        del _registered[host]

    undo.callback(unregister)
    return mapped, int(check("cuMemHostGetDevicePointer", cu.cuMemHostGetDevicePointer(host, 0)))
