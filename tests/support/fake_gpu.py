"""The host's way to a GPU without one: nbep's CUDA runtime, with a driver that does nothing and tensors without memory.

Real are all of nbep's own steps between a call and the driver. What the driver and torch would take is left out.
"""

import math
import sys
from functools import cache
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import no_gpu

import nbep
from nbep.host.target.cuda.launcher import LoadedKernel
from nbep.host.target.libraries import TorchArrays

SUCCESS = no_gpu.SUCCESS
NUM_RANKS = 4
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float32": 4, "int32": 4, "int64": 8, "bool": 1}
ITEM_BYTES |= {"uint8": 1}


def make_torch() -> ModuleType:
    """A module with as much of torch as nbep's adapter asks for."""
    torch = ModuleType("torch")
    addresses = count(1 << 20, 1 << 31)  # no two of them share memory

    class dtype:  # noqa: N801
        def __init__(self, name: str):
            self.name, self.itemsize = name, ITEM_BYTES[name]

        def __str__(self) -> str:
            return f"torch.{self.name}"

    class Tensor:
        is_cuda = True
        card = 0

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

        def new_empty_strided(self, shape: tuple[int, ...], strides: Any, dtype: Any) -> "Tensor":
            made = Tensor(shape, dtype, strides)
            made.card = self.card
            return made

        def new_empty(self, shape: tuple[int, ...], dtype: Any) -> "Tensor":
            return self.new_empty_strided(shape, None, dtype)

        def get_device(self) -> int:
            return self.card

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


def install(monkeypatch: Any) -> ModuleType:
    """Let nbep believe in a GPU and in torch; the latter."""
    torch = make_torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    of_this_torch = cache(TorchArrays.dtype.__wrapped__)
    monkeypatch.setattr(TorchArrays, "dtype", staticmethod(of_this_torch))
    no_gpu.replace_driver(monkeypatch.setattr)
    return torch


def noted_launches(monkeypatch: Any) -> list[tuple[str, dict[str, Any]]]:
    """A list that fills with what is launched: the kernel's label, and its parameters by their paths."""
    launches: list[tuple[str, dict[str, Any]]] = []

    def note(loaded, config, parameters):
        values = parameters._format.unpack_from(parameters._bytes)
        paths = [param.path for param in loaded.spec.params]
        launches.append((loaded.spec.label, dict(zip(paths, values, strict=True))))

    monkeypatch.setattr(LoadedKernel, "start", note)
    return launches


class Gpu:
    """Tensors on a GPU that is none, and the launches on it."""

    def __init__(self, monkeypatch: Any):
        self.torch = install(monkeypatch)
        self.launches = noted_launches(monkeypatch)

    def tensor(self, dtype: str, *shape: int, strides: tuple[int, ...] | None = None) -> Any:
        return self.torch.Tensor(shape, getattr(self.torch, dtype), strides)

    def tokens(self, num_tokens: int, hidden: int, fp8: bool = False) -> Any:
        """Rows, with fp8 and their scales."""
        if not fp8:
            return self.tensor("bfloat16", num_tokens, hidden)
        scales = self.tensor("float32", num_tokens, hidden // 128, strides=(1, num_tokens))
        return self.tensor("float8_e4m3fn", num_tokens, hidden), scales

    def check(self, name: str, **wanted: Any) -> dict[str, Any]:
        """The next launch is of this kernel, with these parameters; a tensor stands for its address, None for 0."""
        got_name, got = self.launches.pop(0)
        assert got_name == name
        for path, value in wanted.items():
            address = 0 if value is None else getattr(value, "address", value)
            assert got[path.replace("__", ".")] == address, path
        return got


def make_buffer(num_rdma_bytes: int = 0, **sizes: int) -> nbep.Buffer:
    """A buffer of a rank among NUM_RANKS, for the low-latency mode too if it has num_rdma_bytes."""
    return no_gpu.make_buffer(NUM_RANKS, num_rdma_bytes, **sizes)


def handle_of(torch: ModuleType, buffer: nbep.Buffer, num_tokens: int, num_channels: int) -> Any:
    """A handle as a dispatch of that buffer makes it."""
    from nbep.host.handles import DispatchHandle

    shapes = [(NUM_RANKS, NUM_RANKS), (NUM_RANKS, num_channels), (NUM_RANKS, num_channels), (3 * num_tokens,)]
    arrays = [torch.Tensor(shape, torch.int32) for shape in shapes]
    is_token_in_rank = torch.Tensor((num_tokens, NUM_RANKS), torch.bool)
    send_head = torch.Tensor((num_tokens, NUM_RANKS), torch.int32)
    return DispatchHandle.made((*arrays, is_token_in_rank, send_head), buffer._memory.identity, 1)
