"""DeepEP's own tests, as they are, without a GPU: for who has its sources.

    python tools/deep_ep_tests.py ~/DeepEP/tests/elastic/test_ep.py --num-processes 2 --num-tokens 8 --hidden 512
    python tools/deep_ep_tests.py ~/DeepEP-1.2.1/tests/test_intranode.py --num-processes 2 --num-tokens 8

The test is run as a program; what stands behind its path are its own arguments. Its processes are forked, its tensors
are the CPU's, and its kernels run on the emulator: take few tokens and a small hidden size. What it measures is run
once and counts as 1 ms.

    NUM_NODES=2    first: that many nodes of --num-processes each, on this machine

Exit status: 0 if every process has ended well, else 1.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from nbep.deep_ep.installation import install

# torch of a CPU, for programs that ask it for CUDA: their tensors are those of the CPU, and so the emulator's.
#
#  what a program does                    what happens inside of `cpu_as_cuda()`
#  device="cuda", x.cuda()                a tensor of the CPU
#  torch.cuda.set_device, synchronize     nothing: a launch on the emulator is done when it returns
#  torch.cuda.Event                       times are 1 ms
#  init_process_group("nccl")             gloo; its collectives take every dtype and shape that NCCL's take
#  torch.compile                          the function as it is
#  torch.library.impl(.., "CUDA")         the implementation of CPU tensors
#
# What torch is asked for beyond that fails as it does on a machine without a GPU.


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


def _nothing(*_: Any, **__: Any) -> None: ...


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
        return SimpleNamespace(wait=_nothing) if async_op else None

    return all_gather_into_tensor


def _all_to_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_to_all_single(output: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_as_bytes(output), _as_bytes(tensor), *args, **kwargs)

    return all_to_all_single


def _library_impl(original: Callable[..., Any]) -> Callable[..., Any]:
    def impl(library: Any, name: Any, key: Any = "", *args: Any, **kwargs: Any) -> Any:
        return original(library, name, "CPU" if key == "CUDA" else key, *args, **kwargs)

    return impl


def _replaced() -> Iterator[tuple[Any, str, Any]]:
    """Where, a name, and what stands there meanwhile."""
    properties = SimpleNamespace(multi_processor_count=NUM_SMS, total_memory=NUM_BYTES, name="a CPU")
    for name in ("set_device", "synchronize", "_sleep", "empty_cache"):
        yield torch.cuda, name, _nothing
    yield torch.cuda, "current_device", lambda: 0
    yield torch.cuda, "device_count", lambda: NUM_DEVICES
    yield torch.cuda, "get_device_name", lambda *_, **__: properties.name
    yield torch.cuda, "get_device_properties", lambda *_, **__: properties
    yield torch.cuda, "Event", _Event
    yield torch, "compile", _as_it_is
    yield torch, "set_default_device", _nothing
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


TIME_S = 1e-3  # of whatever is measured
BESIDE = ("comm", "envs", "gate", "math", "refs", "semantic", "testing")  # modules of deep_ep.utils that its tests use


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0 if arguments else 2
    num_nodes = 1
    if arguments[0].startswith("NUM_NODES="):
        num_nodes = int(arguments.pop(0).partition("=")[2])
    test = Path(arguments[0]).resolve()
    if not test.is_file():
        print(f"{test}: no such file; must be one of DeepEP's tests")
        return 2
    os.environ["NBEP_TARGET"] = "emulator"
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    os.environ["WORLD_SIZE"] = str(num_nodes)
    if num_nodes == 1:
        _run_node(0, test, arguments)
        return 0
    nodes = multiprocessing.get_context("fork")
    started = [nodes.Process(target=_run_node, args=(node, test, arguments)) for node in range(num_nodes)]
    return _end_well("node", started)


def _free_port() -> int:
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        return any_free.getsockname()[1]


def _end_well(what: str, processes: list[Any]) -> int:
    """Start them and wait for them. Returns 0; or 1, has said who failed first, and has ended the others."""
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        ended = [running.pop(sentinel) for sentinel in wait(list(running))]
        for process in ended:
            process.join()
        failed = [process for process in ended if process.exitcode != 0]
        if failed:
            for process in running.values():
                process.terminate()
                process.join()
            which = ", ".join(f"{processes.index(each)} (exit status {each.exitcode})" for each in failed)
            print(f"failed: {what} {which} of {len(processes)}", flush=True)
            return 1
    return 0


def _run_node(node: int, test: Path, arguments: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["RANK"] = str(node)
    install()
    sys.path.insert(0, str(test.parent))
    with cpu_as_cuda():
        _take_utils(test)
        vars(torch.multiprocessing)["spawn"] = _spawn  # no assignment: mypy knows torch in some environments alone
        sys.argv = [str(test), *arguments[1:]]
        runpy.run_path(str(test), run_name="__main__")


def _spawn(function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, **_: Any) -> None:
    """As torch.multiprocessing.spawn; forked, so that a process has what `_run_node` has put into this one."""
    forks = multiprocessing.get_context("fork")
    if _end_well("process", [forks.Process(target=function, args=(rank, *args)) for rank in range(nprocs)]):
        sys.exit(1)


def _take_utils(test: Path) -> None:
    """The helpers of the tests are DeepEP's own: tests/utils.py, later deep_ep/utils/. They measure nothing."""
    old = test.parent / "utils.py"
    if old.is_file():
        helpers = import_module("utils")
    else:
        folder = next((up / "deep_ep" / "utils" for up in test.parents if (up / "deep_ep" / "utils").is_dir()), None)
        if folder is None:
            return
        utils = import_module("deep_ep.utils")
        utils.__path__.insert(0, str(folder))
        for name in BESIDE:
            sys.modules.pop(f"deep_ep.utils.{name}", None)
        if not (folder / "testing.py").is_file():
            return
        helpers = import_module("deep_ep.utils.testing")
    vars(helpers).update(bench=_bench, bench_kineto=_bench_kineto)


def _bench(function: Callable[[], Any], *_: Any, **__: Any) -> tuple[float, float, float]:
    function()
    return TIME_S, TIME_S, TIME_S


def _bench_kineto(
    function: Callable[[], Any], kernel_names: Any, *_: Any, num_kernels_per_period: int = 1, **__: Any
) -> Any:
    """A time for each kernel; a list of times if it runs several times in each period."""
    function()
    time = TIME_S if num_kernels_per_period == 1 else [TIME_S] * num_kernels_per_period
    return time if isinstance(kernel_names, str) else (time,) * len(kernel_names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
