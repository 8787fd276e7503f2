"""The host's way to a GPU without one: nbep's CUDA runtime, with a driver that does nothing and tensors without memory.

Real are all of nbep's own steps between a call and the driver. What the driver and torch would take is left out.
"""

import math
import sys
from functools import cache
from itertools import count
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from cuda.bindings import driver as cu

import nbep
from nbep.host.config import Sizes
from nbep.host.ranks.comm import Communicator
from nbep.host.symmetric import NodeMemory
from nbep.host.target.cuda import launcher
from nbep.host.target.cuda import runtime as cuda_runtime
from nbep.host.target.cuda.arrays import TorchArrays
from nbep.host.target.cuda.runtime import CudaRuntime, SharedDevice
from nbep.host.target.memory import HostWords
from nbep.host.transport.base import NetworkOptions, NicOptions
from nbep.host.transport.direct import DirectTransport

SUCCESS = cu.CUresult.CUDA_SUCCESS
NUM_RANKS = 4
ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float32": 4,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "uint8": 1,
}


def make_torch() -> ModuleType:
    """A module with as much of torch as nbep's adapter asks for."""
    torch = ModuleType("torch")
    addresses = count(1 << 20, 512)

    class dtype:  # noqa: N801
        def __init__(self, name: str):
            self.name, self.itemsize = name, ITEM_BYTES[name]

        def __str__(self) -> str:
            return f"torch.{self.name}"

    class Tensor:
        is_cuda = True

        def __init__(self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None):
            self.shape, self.dtype, self._strides = shape, dtype, strides
            self.address = next(addresses)

        def data_ptr(self) -> int:
            return self.address

        def numel(self) -> int:
            return math.prod(self.shape)

        def is_neg(self) -> bool:
            return False

        is_conj = is_neg

        def is_contiguous(self) -> bool:
            return self._strides is None or self._strides == self._packed()

        def stride(self) -> tuple[int, ...]:
            return self._strides or self._packed()

        def _packed(self) -> tuple[int, ...]:
            return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

        def new_empty(self, shape: tuple[int, ...], dtype: Any) -> "Tensor":
            return Tensor(shape, dtype)

        def new_empty_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> "Tensor":
            return Tensor(shape, dtype, strides)

        def get_device(self) -> int:
            return 0

        def view(self, what: Any) -> "Tensor":
            return Tensor(self.shape, what) if not isinstance(what, tuple) else Tensor(what, self.dtype)

        def reshape(self, shape: tuple[int, ...]) -> "Tensor":
            return Tensor(shape, self.dtype)

        def __getitem__(self, rows: slice) -> "Tensor":
            return Tensor((min(rows.stop, self.shape[0]), *self.shape[1:]), self.dtype)

    Tensor.__module__ = "torch"
    torch.Tensor, torch.dtype = Tensor, dtype
    for name in ITEM_BYTES:
        setattr(torch, name, dtype(name))
    guards = SimpleNamespace(_empty_strided_cuda=lambda shape, strides, dtype: Tensor(shape, dtype, strides))
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 0, _cuda_getDevice=lambda: 0)
    torch._C._dynamo = SimpleNamespace(guards=guards)
    torch.cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 0)
    torch.device = lambda *_: None
    torch.as_tensor = lambda span, device: Tensor((span.__cuda_array_interface__["shape"][0],), torch.uint8)
    return torch


class SameOnAll(Communicator):
    """A communicator whose other ranks say what this one says."""

    rank, size = 0, NUM_RANKS

    def barrier(self) -> None:
        pass

    def allgather(self, value: Any) -> list[Any]:
        return [value] * NUM_RANKS

    def bcast(self, value: Any, root: int = 0) -> Any:
        return value


class FakeMemory:
    """Host memory in place of a GPU's."""

    handle = SimpleNamespace(bus_id="")

    def __init__(self, num_bytes: int):
        self.address, self.num_bytes = 1 << 30, num_bytes
        self._bytes = np.zeros(min(num_bytes, 1 << 16), np.uint8)

    def array(self, dtype: Any, offset: int = 0, count: int = -1) -> Any:
        if hasattr(dtype, "name") and not isinstance(dtype, np.dtype):
            return sys.modules["torch"].Tensor((count,), dtype)
        size = np.dtype(dtype).itemsize
        return self._bytes[offset : offset + count * size].view(dtype)

    def words(self, offset: int, count: int) -> HostWords:
        return HostWords(self.array(np.int32, offset, count))

    def write(self, offset: int, values: np.ndarray) -> None:
        pass

    def read(self, offset: int, count: int, dtype: Any) -> np.ndarray:
        return np.ones(count, dtype)

    def open_peers(self, handles: list[Any], rank: int) -> list[int]:
        return [1 << 30] * NUM_RANKS

    def close_peers(self) -> None:
        pass

    free = close_peers


def install(monkeypatch: Any) -> ModuleType:
    """Let nbep believe in a GPU and in torch; the latter."""
    torch = make_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    of_this_torch = cache(TorchArrays.dtype.__wrapped__)
    monkeypatch.setattr(TorchArrays, "dtype", staticmethod(of_this_torch))
    results = {
        "cuStreamIsCapturing": (SUCCESS, 0),
        "cuLaunchKernelEx": (SUCCESS,),
        "cuEventCreate": (SUCCESS, None),  # so that nobody destroys it later
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
    for name, result in results.items():
        monkeypatch.setattr(cu, name, lambda *_, result=result: result)
    device = SimpleNamespace(compute_capability=(9, 0), ordinal=0, num_sms=132, make_current=lambda: None)
    device.max_smem_bytes, device.bus_id = 227 << 10, FakeMemory.handle.bus_id
    monkeypatch.setattr(cuda_runtime, "Device", lambda ordinal: device)
    monkeypatch.setattr(launcher, "load_cubin", lambda spec, cc, key: b"")
    for name in ("allocate", "allocate_host_visible"):
        monkeypatch.setattr(CudaRuntime, name, lambda self, num_bytes, *_: FakeMemory(num_bytes))
    monkeypatch.setattr(CudaRuntime, "allocate_symmetric", lambda self, comm, wanted, _: FakeMemory(wanted.num_bytes))
    return torch


def make_buffer(num_rdma_bytes: int = 0, **sizes: int) -> nbep.Buffer:
    """A buffer of a rank among NUM_RANKS, for the low-latency mode too if it has num_rdma_bytes."""
    runtime = CudaRuntime(SharedDevice(0), 0)
    options = NetworkOptions.check("direct", NUM_RANKS, 1, True, NicOptions(), NUM_RANKS)
    buffer = nbep.Buffer.__new__(nbep.Buffer)
    transport = DirectTransport(runtime, 0, options)
    rdma = DirectTransport(runtime, 0, options) if num_rdma_bytes > 0 else None
    all_sizes = Sizes(1 << 30, "ipc", num_rdma_bytes, low_latency_mode=rdma is not None, **sizes)
    buffer.rank, buffer.group_size, buffer.explicitly_destroy = 0, NUM_RANKS, False
    buffer._turn = Lock()
    buffer._memory = NodeMemory(SameOnAll(), runtime, all_sizes, 1000.0, transport, rdma_transport=rdma)
    return buffer


def handle_of(torch: ModuleType, buffer: nbep.Buffer, num_tokens: int, num_channels: int) -> Any:
    """A handle as a dispatch of that buffer makes it."""
    from nbep.host.intranode.handle import DispatchHandle

    shapes = [(NUM_RANKS, NUM_RANKS), (NUM_RANKS, num_channels), (NUM_RANKS, num_channels), (3 * num_tokens,)]
    arrays = [torch.Tensor(shape, torch.int32) for shape in shapes]
    is_token_in_rank = torch.Tensor((num_tokens, NUM_RANKS), torch.bool)
    send_head = torch.Tensor((num_tokens, NUM_RANKS), torch.int32)
    return DispatchHandle(*arrays, is_token_in_rank, send_head).owned_by(buffer._memory.identity, 1)
