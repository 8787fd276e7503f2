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
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from nbep.conformance.cpu_as_cuda import cpu_as_cuda
from nbep.deep_ep.installation import install

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
        utils.__path__ = [str(folder)]
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
