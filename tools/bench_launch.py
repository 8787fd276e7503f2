"""What one launch costs the CPU: nbep's launcher beside Numba's dispatcher and the bare driver call, in one run.

    nbep bench launch [--repeat N] [--json [FILE.json]]

All launch a kernel of twelve parameters that has nothing to do, on an idle stream. Needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import nbep
from nbep.bench.harness.command import UNUSABLE, Parser, can_run, positive
from nbep.device.kernels.get_dispatch_layout import (
    LayoutOutputs,
    LayoutSizes,
    LayoutWorkspace,
    get_dispatch_layout,
)
from nbep.device.terminal import STDOUT, write_json

GRID, BLOCK = 1, 32


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser("launch", __doc__)
    parser.add_argument("--repeat", type=positive, default=2000)
    parser.add("json")
    options = parser.parse_args(argv)
    if not can_run("launch", with_torch=False):
        return UNUSABLE
    [costs] = nbep.spawn(measure, 1, "cuda", (options.repeat,))
    write_json(options.json, costs)
    if options.json != STDOUT:
        for name, microseconds in costs.items():
            print(f"{name:24} {microseconds:6.1f} us")
    return 0


def measure(comm: Any, repeat: int) -> dict[str, float]:
    """Microseconds of a launch, by launcher."""
    from cuda.bindings import driver as cu

    runtime = comm.runtime
    memory = runtime.allocate(4096, "outputs and workspace")
    stream = runtime.create_stream("bench")
    out, workspace = memory.address, memory.address + 2048
    args = (
        LayoutOutputs(out, 0, out + 64, out + 128),
        out + 256,
        LayoutWorkspace(workspace, workspace + 1024),
        LayoutSizes(0, 1, 1, 1, 1),
    )
    smem_bytes = 64

    def by_nbep() -> None:
        runtime.launch(stream, get_dispatch_layout, GRID, BLOCK, smem_bytes, *args)

    by_nbep()
    loaded = runtime._kernels[get_dispatch_layout]
    [config] = loaded._configs.values()

    def by_driver() -> None:
        cu.cuLaunchKernelEx(config, loaded.function, loaded.block.address, 0)

    costs = {
        "nbep": mean_us(stream, by_nbep, repeat),
        "Numba's dispatcher": mean_us(stream, numba_launch(len(loaded.spec.params)), repeat),
        "driver, packed before": mean_us(stream, by_driver, repeat),
    }
    stream.close()
    memory.free()
    return costs


def numba_launch(num_params: int) -> Callable[[], None]:
    """A launch of an empty kernel through numba.cuda, compiled by now."""
    from numba import cuda

    names = ", ".join(f"p{i}" for i in range(num_params))
    namespace: dict[str, Any] = {}
    exec(f"def empty({names}): pass", namespace)
    configured = cuda.jit(namespace["empty"])[GRID, BLOCK, cuda.stream(), 64]
    values = tuple(range(num_params))

    def launch() -> None:
        configured(*values)

    launch()
    cuda.synchronize()
    return launch


def mean_us(stream: Any, launch: Callable[[], None], repeat: int) -> float:
    """Mean time of a call, in batches that the launch queue holds."""
    batch, spent, done = 200, 0.0, 0
    while done < repeat:
        stream.synchronize()
        start = time.perf_counter()
        for _ in range(batch):
            launch()
        spent += time.perf_counter() - start
        done += batch
    stream.synchronize()
    return round(1e6 * spent / done, 2)
