"""The CUDA driver through cuda-python: results checked, errors named.

Source: CUDA Driver API
"""

from __future__ import annotations

import os
from typing import Any

from cuda.bindings import driver as cu

# Streams are dealt out to hardware queues, 8 by default. A kernel behind another rank's spinning kernel in
# the same queue never starts. The driver reads the number when the process first uses CUDA.
MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
os.environ.setdefault(MAX_CONNECTIONS, "32")


class CudaError(RuntimeError):
    """A driver call failed. `code` is its CUresult."""

    def __init__(self, call: str, code: Any):
        self.code = code
        _, text = cu.cuGetErrorString(code)
        super().__init__(f"{call}: {code.name}: {text.decode() if text else 'unknown error'}")


def check(call: str, result: tuple) -> Any:
    """The values of a driver call's result: nothing, one value or a tuple.

    Raises: CudaError if the call failed
    """
    code, *values = result
    if code != cu.CUresult.CUDA_SUCCESS:
        raise CudaError(call, code)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def unusable_reason() -> str | None:
    """Why no kernel can run on a GPU here, or None if one can."""
    try:
        code = cu.cuInit(0)[0]
    except RuntimeError as error:  # no driver library
        return str(error)
    if code != cu.CUresult.CUDA_SUCCESS:
        return f"cuInit: {code.name}"
    return None if check("cuDeviceGetCount", cu.cuDeviceGetCount()) else "the driver sees no GPU"


class Device:
    """One GPU and its primary context, which torch, CuPy and Numba use too."""

    def __init__(self, ordinal: int):
        check("cuInit", cu.cuInit(0))
        self.ordinal = ordinal
        self.device = check("cuDeviceGet", cu.cuDeviceGet(ordinal))
        self.context = check("cuDevicePrimaryCtxRetain", cu.cuDevicePrimaryCtxRetain(self.device))
        self.make_current()
        attribute = cu.CUdevice_attribute
        self.compute_capability = (
            self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            self.attribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        )
        self.num_sms = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
        self.max_smem_bytes = self.attribute(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        self.bus_id = check("cuDeviceGetPCIBusId", cu.cuDeviceGetPCIBusId(20, self.device)).partition(b"\0")[0].decode()

    def attribute(self, attribute: Any) -> int:
        """The value of a CUdevice_attribute."""
        return int(check("cuDeviceGetAttribute", cu.cuDeviceGetAttribute(attribute, self.device)))

    def make_current(self) -> None:
        """Use this device in the calling thread."""
        check("cuCtxSetCurrent", cu.cuCtxSetCurrent(self.context))

    def prepare_pool(self) -> None:
        """Make the device's memory pool safe for ranks that share it, with kernels that wait for each other.

        The pool may not order one stream behind another to use memory that was freed there: the other may be waiting
        for this rank. And it keeps its memory, because mapping new memory takes longest.
        """
        pool = check("cuDeviceGetDefaultMemPool", cu.cuDeviceGetDefaultMemPool(self.device))
        names = cu.CUmemPool_attribute
        for name, value in (
            (names.CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0),
            (names.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, cu.cuuint64_t(1 << 62)),
        ):
            check("cuMemPoolSetAttribute", cu.cuMemPoolSetAttribute(pool, name, value))

    def can_reach(self, bus_id: str) -> bool:
        """Whether kernels here can access another GPU's memory; True if this process does not see that GPU."""
        code, peer = cu.cuDeviceGetByPCIBusId(bus_id.encode())
        if code != cu.CUresult.CUDA_SUCCESS or int(peer) == int(self.device):
            return True
        return bool(check("cuDeviceCanAccessPeer", cu.cuDeviceCanAccessPeer(self.device, peer)))


def current_ordinal() -> int | None:
    """The device of the calling thread's context, None if it has none yet."""
    check("cuInit", cu.cuInit(0))
    if not int(check("cuCtxGetCurrent", cu.cuCtxGetCurrent())):
        return None
    return int(check("cuCtxGetDevice", cu.cuCtxGetDevice()))


def num_devices() -> int:
    check("cuInit", cu.cuInit(0))
    return int(check("cuDeviceGetCount", cu.cuDeviceGetCount()))
