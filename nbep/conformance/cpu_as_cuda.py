"""torch of a CPU, for programs that ask it for CUDA: their tensors are those of the CPU, and so the emulator's.

 what a program does                    what happens inside of `cpu_as_cuda()`
 device="cuda", x.cuda()                a tensor of the CPU
 torch.cuda.set_device, synchronize     nothing: a launch on the emulator is done when it returns
 torch.cuda.Event                       times are 1 ms
 init_process_group("nccl")             gloo; its collectives take every dtype and shape that NCCL's take
 torch.compile                          the function as it is
 torch.library.impl(.., "CUDA")         the implementation of CPU tensors

What torch is asked for beyond that fails as it does on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

NUM_DEVICES, NUM_SMS, NUM_BYTES = 8, 132, 80 << 30  # a host with eight H100s


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "cuda":
            return args[0]
        kwargs = {name: _device(value) for name, value in (kwargs or {}).items()}
        return function(*map(_device, args), **kwargs)


def _device(value: Any) -> Any:
    is_device = isinstance(value, (str, torch.device))
    return torch.device("cpu") if is_device and str(value).partition(":")[0] == "cuda" else value


class _Event:
    """Of torch.cuda: no time passes on the emulator that it could tell."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, other: _Event) -> float:
        return 1.0


def _nothing() -> Callable[..., None]:
    """A new function each time: torch._dynamo has a rule for each name of torch, and none may have two."""

    def nothing(*_: Any, **__: Any) -> None: ...

    return nothing


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _as_it_is


def _as_bytes(tensor: Any) -> Any:
    """[n, bytes of the rest], the tensor's own memory: a dtype that gloo does not know travels as it is."""
    row_bytes = tensor[0].numel() * tensor.element_size() if len(tensor) else 1
    return tensor.contiguous().view(-1).view(torch.uint8).view(len(tensor), row_bytes)


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> Any:
        return original("gloo", *args, **kwargs)

    return init_process_group


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    def barrier(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return barrier


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather_into_tensor(output: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        sent = tensor.contiguous().view(-1).view(torch.uint8)
        gathered = torch.empty(len(sent) * dist.get_world_size(group), dtype=torch.uint8)
        original(gathered, sent, group=group)
        output.copy_(gathered.view(output.dtype).view(output.shape))
        return SimpleNamespace(wait=_nothing()) if async_op else None

    return all_gather_into_tensor


def _all_to_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(output: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_as_bytes(output), _as_bytes(tensor), *args, **kwargs)

    return all_to_all_single


def _library_impl(original: Callable[..., Any]) -> Callable[..., Any]:
    def impl(library: Any, name: Any = "", *args: Any, **kwargs: Any) -> Any:
        """(library, name, key), or (name of the operation, device types, function)"""
        if isinstance(library, str):
            types = kwargs.pop("types", name)
            types = types if isinstance(types, str) else [each.replace("cuda", "cpu") for each in types]
            return original(library, "cpu" if types == "cuda" else types, *args, **kwargs)
        key = kwargs.pop("dispatch_key", args[0] if args else "")
        return original(library, name, "CPU" if key == "CUDA" else key, *args[1:], **kwargs)

    return impl


def _replaced() -> Iterator[tuple[Any, str, Any]]:
    """Where, a name, and what stands there meanwhile."""
    properties = SimpleNamespace(multi_processor_count=NUM_SMS, total_memory=NUM_BYTES, name="a CPU")
    for name in ("set_device", "synchronize", "_sleep", "empty_cache"):
        yield torch.cuda, name, _nothing()
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "device_count", lambda: NUM_DEVICES
    yield torch.cuda, "get_device_name", lambda *_, **__: properties.name
    yield torch.cuda, "get_device_properties", lambda *_, **__: properties
    yield torch.cuda, "Event", _Event
    yield torch, "compile", _as_it_is
    yield torch, "set_default_device", _nothing()
    yield torch.library, "impl", _library_impl(torch.library.impl)
    yield dist, "init_process_group", _init_process_group(dist.init_process_group)
    yield dist, "barrier", _barrier(dist.barrier)
    yield dist, "all_gather_into_tensor", _all_gather(dist.all_gather_into_tensor)
    yield dist, "all_to_all_single", _all_to_all(dist.all_to_all_single)


@contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Inside of it torch answers for CUDA; for this thread, and for processes that it forks."""
    with ExitStack() as stack:
        for owner, name, value in list(_replaced()):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        stack.enter_context(_OnCpu())
        yield
