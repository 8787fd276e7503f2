"""The driver's virtual memory management: memory of a GPU, and addresses of this process at which it appears.

cuMemCreate, or import of a peer's -> memory handle -> reserve addresses -> map -> set access -> use
-> unmap -> free the addresses -> release

Each step leaves its undoing in the caller's ExitStack, so a failure half-way gives back what was made.

Source: CUDA Driver API, "Virtual Memory Management"
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from cuda.bindings import driver as cu

from nbep.host.target.cuda.driver import Device, check


def create(device: Device, num_bytes: int, handle_type: Any, name: str, undo: ExitStack) -> tuple[Any, int]:
    """New memory that can be exported as handle_type: its handle, and its size, num_bytes rounded up.

    Raises: CudaError, with CUDA_ERROR_NOT_PERMITTED or _NOT_SUPPORTED if the driver does not offer the type
    """
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    properties.requestedHandleTypes = handle_type
    minimum = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = int(check("cuMemGetAllocationGranularity", cu.cuMemGetAllocationGranularity(properties, minimum)))
    num_bytes = (num_bytes + granularity - 1) // granularity * granularity
    handle = check(f"cuMemCreate of {num_bytes} bytes for {name}", cu.cuMemCreate(num_bytes, properties, 0))
    undo.callback(lambda: check("cuMemRelease", cu.cuMemRelease(handle)))
    return handle, num_bytes


def import_handle(shared: int | bytes, handle_type: Any, what: str, undo: ExitStack) -> Any:
    """The handle of another process's memory, from its file descriptor or the bytes of its fabric handle."""
    handle = check(f"cuMemImportFromShareableHandle of {what}", cu.cuMemImportFromShareableHandle(shared, handle_type))
    undo.callback(lambda: check("cuMemRelease", cu.cuMemRelease(handle)))
    return handle


def map_memory(device: Device, handle: Any, num_bytes: int, what: str, undo: ExitStack) -> int:
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
