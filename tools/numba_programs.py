"""Runs public programs for numba.cuda as they are, for who has them: nbep copies none of them.

    python tools/numba_programs.py FOLDER            all, in all WAYS; writes the table
    python tools/numba_programs.py FOLDER checked    in one of WAYS, such as "checked compiled"; prints JSON

FOLDER/GPU_puzzlers.py    solved GPU-Puzzles, such as those of github.com/chancecardona/GPU-Puzzles-Solns
FOLDER/histogram.py       examples/density_estimation/histogram/gpu.py of github.com/numba/numba-examples
the package stumpy        for its gpu_stump

The doc examples and the kernels of numba-cuda come with it.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numba_tests as theirs
import numpy as np

WAYS = ("simulator", "sc", "sc compiled", "checked", "checked compiled")
LIMIT_S = 60  # of CPU, for one program
LATE = f"over {LIMIT_S}"
PAGE = Path(__file__).resolve().parents[1] / "records" / "numba_programs.md"
DOCS = "vecadd cpu_gpu_compat globals matmul montecarlo random reduction sessionize ufunc cg".split()  # noqa: SIM905
KERNELS = ("transpose", "reduction")


class Wrong(Exception):
    """A program has ended, and its result is wrong."""


def timed(run: Callable[[], None]) -> list[Any]:
    """What a program ends with, "right" or its first line, and its seconds of CPU."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    begin = time.process_time()
    try:
        run()
        said = "right"
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - begin
    return [LATE if seconds > LIMIT_S else said, seconds]


def puzzles(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """Each puzzle of a file, with what its lib.py would do but draw: launch, and compare with the spec."""
    from numba import cuda

    found: dict[str, list[Any]] = {}

    class Coord:
        def __init__(self, x: int, y: int):
            self.dims = x, y

    class CudaProblem:
        def __init__(
            self, name: str, fn: Any, inputs: Any, out: Any, args: Any = (), blockspergrid: Any = None,
            threadsperblock: Any = None, spec: Any = None,
        ):  # fmt: skip
            one = Coord(1, 1)
            launch = (blockspergrid or one).dims, (threadsperblock or one).dims

            def check() -> None:
                cuda.jit(fn(cuda))[launch](out, *inputs, *args)
                np.testing.assert_allclose(out, spec(*inputs))

            said, seconds = timed(check)  # here: the next puzzle changes the globals that its kernel has
            name = name.partition(" (")[0]
            before, so_far = found.get(name, ["right", 0])
            found[name] = [said if before == "right" else before, so_far + seconds]

        def show(self, *_: Any, **__: Any) -> None: ...

        check = show

    lib = sys.modules["lib"] = ModuleType("lib")
    lib.__dict__.update(CudaProblem=CudaProblem, Coord=Coord)
    runpy.run_path(str(path))
    for name, ended in found.items():
        yield f"GPU-Puzzles: {name}", ended


def tests_of(module: str, folder: str) -> Callable[[], None]:
    def run() -> None:
        result = theirs.run(f"test_{module}", folder)
        for test, text in (*result.errors, *result.failures):
            raise Wrong(f"{str(test).split()[0]}: {text.strip().splitlines()[-1]}")
        if not result.passed:
            raise Wrong(str(result.skipped[0][1]) if result.skipped else "no test")

    return run


def stump() -> list[Any]:
    import stumpy
    from stumpy import config, core

    series = np.random.default_rng(0).random(60)
    core.preprocess(series, 5)  # Numba compiles it for the host, which takes 6 s and is none of the kernels' time
    return timed(lambda: matrix_profile(stumpy, config, series))


def matrix_profile(stumpy: Any, config: Any, series: np.ndarray) -> None:
    config.STUMPY_THREADS_PER_BLOCK = 32
    got = stumpy.gpu_stump(series, 5)
    windows = np.lib.stride_tricks.sliding_window_view(series, 5)
    scaled = (windows - windows.mean(1, keepdims=True)) / windows.std(1, keepdims=True)
    distance = np.linalg.norm(scaled[:, None] - scaled[None], axis=2)
    for i in range(len(distance)):
        distance[i, max(0, i - 2) : i + 3] = np.inf
    np.testing.assert_allclose(got[:, 0].astype(float), distance.min(1))
    np.testing.assert_array_equal(got[:, 1].astype(int), distance.argmin(1))


def histogram(path: Path) -> Callable[[], None]:
    def run() -> None:
        names = runpy.run_path(str(path))
        values = np.random.default_rng(0).normal(size=500).astype(np.float32)
        counts, _ = names["numba_gpu_histogram"](values, 16)
        np.testing.assert_array_equal(counts, np.histogram(values, 16)[0])

    return run


def programs(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    if (folder / "GPU_puzzlers.py").exists():
        yield from puzzles(folder / "GPU_puzzlers.py")
    for name in DOCS:
        yield f"numba-cuda's doc example: {name}", timed(tests_of(name, "doc_examples"))
    for name in KERNELS:
        yield f"numba-cuda's kernels: {name}", timed(tests_of(name, "cudapy"))
    if (folder / "histogram.py").exists():
        yield "numba-examples: histogram", timed(histogram(folder / "histogram.py"))
    yield "stumpy: gpu_stump", stump()


def measure(folder: Path, way: str) -> dict[str, list[Any]]:
    """What each program has ended with ("right", or its first line), and its seconds of CPU without imports."""
    from nbep.lab.numba_cuda import session

    theirs.install(simulator=way == "simulator")
    signal.signal(signal.SIGPROF, _late)
    if way != "simulator":
        model, _, engine = way.partition(" ")
        session.OPTIONS.update(memory_model=model, engine=engine or "python")
    result = {}
    for name, ended in programs(folder):
        result[name] = ended
        print(f"{way}: {name}: {ended[0]} {ended[1]:.2f} s", file=sys.stderr, flush=True)
    return result


def _late(*_: Any) -> None:
    raise TimeoutError(LATE)


def table(measured: dict[str, dict[str, list[Any]]]) -> str:
    rows = ["| program | " + " | ".join(WAYS) + " | finding |", "| --- " * (len(WAYS) + 2) + "|"]
    for name in measured["checked"]:
        cells, finding = [], ""
        for way in WAYS:
            said, seconds = measured[way].get(name, ["is not there", 0])
            cells.append(f"{seconds:.2f}" if said == "right" else said if said == LATE else "fails")
            if said not in ("right", LATE) and way != "simulator":
                finding = said.replace("|", "\\|")
        rows.append(f"| {name} | {' | '.join(cells)} | {finding} |")
    return "\n".join(rows)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    if len(sys.argv) > 2:
        json.dump(measure(folder, sys.argv[2]), sys.stdout)
        return
    measured = {}
    for way in WAYS:
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"} if way == "simulator" else None
        done = subprocess.run([sys.executable, __file__, str(folder), way], env=environment, stdout=subprocess.PIPE)
        measured[way] = json.loads(done.stdout)
    text = f"<!-- programs -->\n{table(measured)}\n<!-- /programs -->"
    PAGE.write_text(re.sub(r"<!-- programs -->.*<!-- /programs -->", lambda _: text, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
