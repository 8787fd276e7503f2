"""A rank on a GPU where there is none: nbep's CUDA runtime over a driver that does nothing.

Real are all of nbep's own steps between a call and the driver. What the driver takes is left out, and no kernel runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from cuda.bindings import driver as cu

import nbep
from nbep.host.config import Sizes
from nbep.host.elastic import buffer as elastic_buffer
from nbep.host.node import NodeMemory
from nbep.host.ranks.comm import Communicator
from nbep.host.target import libraries
from nbep.host.target.cuda import launcher
from nbep.host.target.cuda import runtime as cuda_runtime
from nbep.host.target.cuda.runtime import CudaRuntime, SharedDevice
from nbep.host.target.memory import HostWords, Memory
from nbep.host.transport.base import DirectTransport, NetworkOptions, NicOptions

SUCCESS = cu.CUresult.CUDA_SUCCESS
DRIVER = {
    "cuStreamIsCapturing": (SUCCESS, 0),
    "cuLaunchKernelEx": (SUCCESS,),
    "cuEventCreate": (SUCCESS, None),  # so that it is not destroyed later
    "cuEventRecord": (SUCCESS,),
    "cuEventQuery": (SUCCESS,),
    "cuEventDestroy": (SUCCESS,),
    "cuStreamWaitEvent": (SUCCESS,),
    "cuModuleLoadData": (SUCCESS, 1),
    "cuModuleGetFunction": (SUCCESS, 1),
    "cuFuncSetAttribute": (SUCCESS,),
    "cuOccupancyMaxActiveClusters": (SUCCESS, 132),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (SUCCESS, 1),
    "cuCtxGetStreamPriorityRange": (SUCCESS, 0, 0),
    "cuStreamCreateWithPriority": (SUCCESS, 7),
}
SetAttribute = Callable[[Any, str, Any], Any]


class SameOnAll(Communicator):
    """A communicator whose other ranks say what this one says."""

    rank = size = 0

    def __init__(self, size: int):
        self.size = size

    def barrier(self) -> None:
        pass

    def allgather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def bcast(self, value: Any, root: int = 0) -> Any:
        return value


class HostMemory:
    """Host memory in place of a GPU's."""

    handle = SimpleNamespace(bus_id="")
    span, writes = Memory.span, Memory.writes

    def __init__(self, num_bytes: int, num_ranks: int = 1):
        self.address, self.num_bytes, self._num_ranks = 1 << 30, num_bytes, num_ranks
        self._bytes = np.zeros(min(num_bytes, 1 << 16), np.uint8)

    def array(self, dtype: Any, offset: int = 0, count: int = -1) -> Any:
        if hasattr(dtype, "name") and not isinstance(dtype, np.dtype):
            return sys.modules["torch"].Tensor((count,), dtype)
        if type(dtype).__module__ == "torch":
            return sys.modules["torch"].empty((count,), dtype=dtype)
        size = np.dtype(dtype).itemsize
        return self._bytes[offset : offset + count * size].view(dtype)

    def words(self, offset: int, count: int) -> HostWords:
        return HostWords(self.array(np.int32, offset, count))

    def write(self, offset: int, values: np.ndarray) -> None:
        pass

    def read(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        return np.ones(count, dtype)

    def open_peers(self, handles: list[Any], rank: int) -> list[int]:
        return [1 << 30] * self._num_ranks

    def close_peers(self) -> None:
        pass

    free = close_peers


def replace_driver(set_attribute: SetAttribute) -> None:
    """Let nbep believe in a GPU. set_attribute: sets an attribute of an object"""
    for name, result in DRIVER.items():
        set_attribute(cu, name, lambda *_, result=result: result)
    device = SimpleNamespace(compute_capability=(9, 0), ordinal=0, num_sms=132, make_current=lambda: None)
    device.max_smem_bytes, device.bus_id = 227 << 10, HostMemory.handle.bus_id
    set_attribute(cuda_runtime, "Device", lambda ordinal: device)
    set_attribute(launcher, "load_cubin", lambda spec, cc, key: b"")
    for name in ("allocate", "allocate_host_visible"):
        set_attribute(CudaRuntime, name, lambda self, num_bytes, *_: HostMemory(num_bytes))

    def allocate_symmetric(self: Any, comm: Any, wanted: Any, reach: Any) -> HostMemory:
        return HostMemory(wanted.num_bytes, comm.size)

    set_attribute(CudaRuntime, "allocate_symmetric", allocate_symmetric)


def make_buffer(
    num_ranks: int, num_rdma_bytes: int = 0, num_nvl_peers: int = 0, front: Any = nbep.Buffer, **sizes: Any
) -> Any:
    """A buffer of a rank among so many, for the low-latency mode too if it has num_rdma_bytes. front: its class"""
    runtime = CudaRuntime(SharedDevice(0), 0)
    num_peers = num_nvl_peers or num_ranks
    options = NetworkOptions.check("direct", num_peers, 1, True, NicOptions(), num_ranks)
    buffer = front.__new__(front)
    transport = DirectTransport(runtime, 0, options)
    rdma = DirectTransport(runtime, 0, options) if num_rdma_bytes > 0 else None
    all_sizes = Sizes(1 << 30, "ipc", num_rdma_bytes, **{"low_latency_mode": rdma is not None, **sizes})
    buffer.rank, buffer.group_size, buffer.explicitly_destroy = 0, num_ranks, False
    buffer.num_nvl_bytes, buffer.num_rdma_bytes = all_sizes.num_nvl_bytes, num_rdma_bytes
    buffer._turn = Lock()
    buffer._memory = NodeMemory(
        SameOnAll(num_ranks), runtime, all_sizes, 1000.0, transport, rdma_transport=rdma, num_nvl_peers=num_peers
    )
    buffer._memory.is_deep_eps = front._is_deep_eps
    return buffer


def make_elastic(num_ranks: int, num_tokens: int, hidden: int, front: Any = nbep.ElasticBuffer) -> Any:
    """An elastic buffer of a rank among so many. front: its class"""
    there = SameOnAll(num_ranks), CudaRuntime(SharedDevice(0), 0)
    with patch.object(elastic_buffer, "connect", lambda *_: there):
        return front(None, num_max_tokens_per_rank=num_tokens, hidden=hidden)


def forget_torch() -> None:
    """What nbep keeps of the torch that it has seen, which is about to be another one."""
    libraries.TorchArrays.dtype.cache_clear()
    libraries._maker_of_one.cache_clear()
    libraries._torch_streams.clear()


@contextmanager
def tensors_of_the_cpu() -> Iterator[Any]:
    """torch, whose tensors of the CPU nbep takes for those of a GPU; and a driver that does nothing."""
    import torch
    from torch._C._dynamo import guards

    with ExitStack() as undo:
        forget_torch()
        undo.callback(forget_torch)

        def set_attribute(owner: Any, name: str, value: Any) -> None:
            undo.enter_context(patch.object(owner, name, value, create=True))

        replace_driver(set_attribute)
        set_attribute(torch.Tensor, "is_cuda", True)
        set_attribute(torch._C, "_cuda_getCurrentRawStream", lambda device: 0)
        set_attribute(torch._C, "_cuda_getDevice", lambda: -1)  # as get_device() of such a tensor
        set_attribute(torch.cuda, "is_initialized", lambda: True)
        set_attribute(guards, "_empty_strided_cuda", guards._empty_strided_cpu)  # type: ignore[attr-defined, unused-ignore]
        yield torch
