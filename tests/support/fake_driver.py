"""The memory calls of the CUDA driver without a GPU. It hands out numbers, keeps account of them and refuses misuse.

Memory is a number too: two addresses are the same memory if `memory_at` says the same. The structures are the real
ones of cuda.bindings. Memory of the host is the real one as well, and its number is that of its file.
"""

import ctypes
import os
from pathlib import Path

from cuda.bindings import driver as cu

from nbep.host.target.cuda import memory as gpu_memory

GRANULARITY = 1 << 21
RESULT = cu.CUresult
DEVICE = 3


class FakeDriver:
    """Attributes: failing is the call that fails, with result `failure`; calls are those so far that made something."""

    def __init__(self, failing: str | None = None, failure=RESULT.CUDA_ERROR_OUT_OF_MEMORY):
        self.failing = failing
        self.failure = failure
        self.calls: list[str] = []
        self.allocated: dict[int, int] = {}  # cuMemAlloc: address, memory
        self.reserved: dict[int, int] = {}  # address, bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # address, (memory, bytes)
        self.readable: dict[int, int] = {}  # address, device
        self.zeroed: dict[int, int] = {}  # memory, bytes
        self.handles: dict[int, int] = {}  # handle, memory
        self.sizes: dict[int, int] = {}  # memory, bytes
        self.opened: dict[int, int] = {}  # cuIpcOpenMemHandle: address, memory
        self.registered: dict[int, tuple[int, int]] = {}  # cuMemHostRegister: the host's address, (the device's, file)
        self.pinned: dict[int, object] = {}  # cuMemHostAlloc: the host's address, its bytes
        self._next = 0

    def install(self, monkeypatch) -> "FakeDriver":
        for name in dir(self):
            if name.startswith("cu"):
                monkeypatch.setattr(cu, name, getattr(self, name))
        monkeypatch.setattr(gpu_memory, "_registered", {})  # what a test drops is known to its own driver alone
        return self

    @property
    def outstanding(self) -> list[dict]:
        """All that is not given back."""
        kept = (self.allocated, self.reserved, self.mapped, self.readable, self.handles, self.opened, self.registered)
        return [entries for entries in kept if entries]

    def memory_at(self, address: int) -> int:
        if address in self.mapped:
            assert self.readable[address] == DEVICE, "no access"
            return self.mapped[address][0]
        of_host = dict(self.registered.values())
        if address in of_host:
            return of_host[address]
        return self.allocated.get(address) or self.opened[address]

    def _new(self) -> int:
        self._next += 1
        return self._next << 24

    def _make(self, name: str) -> bool:
        """Whether this call succeeds."""
        self.calls.append(name)
        return name != self.failing

    def cuGetErrorString(self, code):  # noqa: N802
        return RESULT.CUDA_SUCCESS, b"the fake driver says no"

    def cuMemAlloc(self, num_bytes):  # noqa: N802
        if not self._make("cuMemAlloc"):
            return self.failure, None
        address, memory = self._new(), self._new()
        self.allocated[address], self.sizes[memory] = memory, num_bytes
        return RESULT.CUDA_SUCCESS, cu.CUdeviceptr(address)

    def cuMemFree(self, address):  # noqa: N802
        del self.allocated[address]
        return (RESULT.CUDA_SUCCESS,)

    def cuMemsetD8(self, address, value, num_bytes):  # noqa: N802
        if not self._make("cuMemsetD8"):
            return (self.failure,)
        assert value == 0
        assert num_bytes == self.sizes[self.memory_at(address)]
        self.zeroed[self.memory_at(address)] = num_bytes
        return (RESULT.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream):  # noqa: N802
        return (RESULT.CUDA_SUCCESS,)

    def cuMemHostAlloc(self, num_bytes, flags):  # noqa: N802
        if not self._make("cuMemHostAlloc"):
            return self.failure, None
        host = ctypes.create_string_buffer(b"\xff" * num_bytes, num_bytes)
        address = ctypes.addressof(host)
        self.pinned[address] = host
        self.registered[address] = self._new(), 0
        return RESULT.CUDA_SUCCESS, address

    def cuMemFreeHost(self, host):  # noqa: N802
        del self.pinned[host], self.registered[host]
        return (RESULT.CUDA_SUCCESS,)

    def cuIpcGetMemHandle(self, address):  # noqa: N802
        if not self._make("cuIpcGetMemHandle"):
            return self.failure, None
        handle = cu.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), self.allocated[address].to_bytes(64, "little"), 64)
        return RESULT.CUDA_SUCCESS, handle

    def cuIpcOpenMemHandle(self, handle, flags):  # noqa: N802
        if not self._make("cuIpcOpenMemHandle"):
            return self.failure, None
        address = self._new()
        self.opened[address] = int.from_bytes(ctypes.string_at(handle.getPtr(), 64), "little")
        return RESULT.CUDA_SUCCESS, cu.CUdeviceptr(address)

    def cuIpcCloseMemHandle(self, address):  # noqa: N802
        del self.opened[address]
        return (RESULT.CUDA_SUCCESS,)

    def cuMemHostRegister(self, host, num_bytes, flags):  # noqa: N802
        if not self._make("cuMemHostRegister"):
            return (self.failure,)
        assert flags == cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
        assert host not in self.registered
        self.registered[host] = self._new(), file_mapped_at(host, num_bytes)
        return (RESULT.CUDA_SUCCESS,)

    def cuMemHostGetDevicePointer(self, host, flags):  # noqa: N802
        if not self._make("cuMemHostGetDevicePointer"):
            return self.failure, None
        return RESULT.CUDA_SUCCESS, cu.CUdeviceptr(self.registered[host][0])

    def cuMemHostUnregister(self, host):  # noqa: N802
        _, file = self.registered.pop(host)
        assert file_mapped_at(host, 1) == file, "unmapped before it is unregistered"
        return (RESULT.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, properties, option):  # noqa: N802
        if not self._make("cuMemGetAllocationGranularity"):
            return self.failure, None
        return RESULT.CUDA_SUCCESS, GRANULARITY

    def cuMemCreate(self, num_bytes, properties, flags):  # noqa: N802
        if not self._make("cuMemCreate"):
            return self.failure, None
        assert num_bytes % GRANULARITY == 0
        assert properties.location.id == DEVICE
        handle, memory = self._new(), self._new()
        self.handles[handle], self.sizes[memory] = memory, num_bytes
        return RESULT.CUDA_SUCCESS, handle

    def cuMemRelease(self, handle):  # noqa: N802
        del self.handles[handle]
        return (RESULT.CUDA_SUCCESS,)

    def cuMemAddressReserve(self, num_bytes, alignment, address, flags):  # noqa: N802
        if not self._make("cuMemAddressReserve"):
            return self.failure, None
        address = self._new()
        self.reserved[address] = num_bytes
        return RESULT.CUDA_SUCCESS, cu.CUdeviceptr(address)

    def cuMemAddressFree(self, address, num_bytes):  # noqa: N802
        assert address not in self.mapped
        assert self.reserved.pop(address) == num_bytes
        return (RESULT.CUDA_SUCCESS,)

    def cuMemMap(self, address, num_bytes, offset, handle, flags):  # noqa: N802
        if not self._make("cuMemMap"):
            return (self.failure,)
        memory = self.handles[handle]
        assert self.reserved[address] == self.sizes[memory] == num_bytes
        assert address not in self.mapped
        self.mapped[address] = memory, num_bytes
        return (RESULT.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, num_bytes):  # noqa: N802
        assert self.mapped.pop(address)[1] == num_bytes
        self.readable.pop(address, None)
        return (RESULT.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, num_bytes, descriptors, count):  # noqa: N802
        if not self._make("cuMemSetAccess"):
            return (self.failure,)
        assert self.mapped[address][1] == num_bytes
        (descriptor,) = descriptors
        assert descriptor.flags == cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.readable[address] = descriptor.location.id
        return (RESULT.CUDA_SUCCESS,)

    def cuMemExportToShareableHandle(self, handle, handle_type, flags):  # noqa: N802
        if not self._make("cuMemExportToShareableHandle"):
            return self.failure, None
        content = self.handles[handle].to_bytes(64, "little")
        if handle_type == cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC:
            handle = cu.CUmemFabricHandle()
            handle.data = content
            return RESULT.CUDA_SUCCESS, handle
        fd = os.memfd_create("memory")
        os.pwrite(fd, content, 0)
        return RESULT.CUDA_SUCCESS, fd

    def cuMemImportFromShareableHandle(self, shared, handle_type):  # noqa: N802
        if not self._make("cuMemImportFromShareableHandle"):
            return self.failure, None
        content = shared if isinstance(shared, bytes) else os.pread(shared, 64, 0)
        handle = self._new()
        self.handles[handle] = int.from_bytes(content, "little")
        return RESULT.CUDA_SUCCESS, handle


def file_mapped_at(address: int, num_bytes: int) -> int:
    """The number of the file that this process has mapped, shared and writable, at so many bytes of its memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *_ = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address and address + num_bytes <= end:
            assert access == "rw-s"
            return int(inode)
    raise AssertionError(f"nothing is mapped at {address:#x}")


class FakeGpus:
    """What the driver says of GPUs that do not exist.

    links: (GPU, other) -> whether the first reaches the second with native atomics; others are out of reach
    """

    def __init__(self, num_gpus: int, links: dict[tuple[int, int], bool], compute_capability: tuple[int, int] = (9, 0)):
        self.num_gpus = num_gpus
        self.links = links
        names = cu.CUdevice_attribute
        self.attributes = {
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: compute_capability[0],
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: compute_capability[1],
            names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
            names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: 1,
            names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: 0,
            names.CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: 1,
        }

    def install(self, monkeypatch) -> None:
        for name in dir(self):
            if name.startswith("cu"):
                monkeypatch.setattr(cu, name, getattr(self, name))

    def cuInit(self, flags):  # noqa: N802
        return (RESULT.CUDA_SUCCESS,)

    def cuDriverGetVersion(self):  # noqa: N802
        return RESULT.CUDA_SUCCESS, 13020

    def cuDeviceGetCount(self):  # noqa: N802
        return RESULT.CUDA_SUCCESS, self.num_gpus

    def cuDeviceGet(self, ordinal):  # noqa: N802
        assert 0 <= ordinal < self.num_gpus
        return RESULT.CUDA_SUCCESS, ordinal

    def cuDeviceCanAccessPeer(self, device, peer):  # noqa: N802
        assert device != peer
        return RESULT.CUDA_SUCCESS, int((device, peer) in self.links)

    def cuDeviceGetP2PAttribute(self, attribute, device, peer):  # noqa: N802
        assert attribute == cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return RESULT.CUDA_SUCCESS, int(self.links[device, peer])

    def cuDeviceGetAttribute(self, attribute, device):  # noqa: N802
        return RESULT.CUDA_SUCCESS, self.attributes[attribute]

    def cuDeviceGetName(self, size, device):  # noqa: N802
        return RESULT.CUDA_SUCCESS, f"Fake {device}".encode().ljust(size, b"\0")

    def cuDeviceTotalMem(self, device):  # noqa: N802
        return RESULT.CUDA_SUCCESS, 80 << 30

    def cuDeviceGetPCIBusId(self, size, device):  # noqa: N802
        return RESULT.CUDA_SUCCESS, f"0000:0{device}:00.0".encode().ljust(size, b"\0")
