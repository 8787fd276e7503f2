"""The clocks of benchmarks on GPUs: CUDA events, the profiler's own times of kernels, and the CPU's.

 by_events    |sleep|barrier| [e] call [e] call [e] ...     launch gaps count, the cost of launching does not
 by_profile   |sleep|barrier|  kernel  kernel ...           from the start of a kernel to its end
 host_times   call, call, ...                               what the CPU takes from a call to its return

A series of low-latency calls begins with a kernel that sleeps while the host queues the calls behind it, and then a
barrier of all ranks on their GPUs, so that they begin within a microsecond or two. Calls of the normal mode are long
enough to do without. The first round of a series is not counted. Virtual ranks do not sleep: their hosts wait for each
kernel, and what that costs is in the times of events.

Source: DeepEP tests/utils.py (bench, bench_kineto with barrier_comm_profiling)
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from nbep.host.ranks.comm import InProcessComm

SLEEP_CYCLES = 4_000_000  # 2 ms
SLEEP_CYCLES_PER_CALL = 200_000  # 0.1 ms, more than the host takes to queue a call and an event
TRIES = 3  # the profiler may lose a kernel
NUM_HOST_WARM_UPS, NUM_HOST_CALLS = 20, 100
HOST_CALLS_IN_A_ROW = 20


def nothing() -> None:
    """No barrier, or nothing to let go of."""


class Clock:
    """One rank's.

    repeat: rounds that are counted. barrier() launches a kernel that ends when all ranks are there. sleeps: whether
    series of events begin with a kernel that sleeps
    """

    def __init__(self, comm: Any, repeat: int, barrier: Callable[[], Any] = nothing, sleeps: bool = True):
        self.comm = comm
        self.repeat = repeat
        self.barrier = barrier
        self.sleeps = sleeps
        self.num_warm_ups = max(3, repeat // 3)
        self.is_virtual = isinstance(comm, InProcessComm)

    def align(self, num_calls: int) -> None:
        """Begin a series of that many calls, on all ranks at once."""
        import torch

        self.meet()
        if self.sleeps and not self.is_virtual:
            torch.cuda._sleep(SLEEP_CYCLES + num_calls * SLEEP_CYCLES_PER_CALL)
        self.barrier()

    def meet(self) -> None:
        """Wait for the work of this rank, and then for all ranks."""
        import torch

        torch.cuda.current_stream().synchronize()
        self.comm.barrier()


class Step(NamedTuple):
    """A part of a round. label "": it is not measured. let_go: of what the call before has left; see HostTime."""

    label: str
    call: Callable[[], Any]
    let_go: Callable[[], None] = nothing


class KernelTime(NamedTuple):
    """A kernel that ran; times in microseconds."""

    name: str
    stream: int
    start: float
    us: float


class Spread(NamedTuple):
    """A time in microseconds: each rank takes the median of its rounds; mean, min and max are over ranks.

    average: the mean over rounds and ranks, which DeepEP's test prints
    """

    mean: float
    min: float
    max: float
    average: float


def by_events(clock: Clock, steps: Sequence[Step]) -> dict[str, list[float]]:
    """Microseconds of each labelled step, one for each round."""
    import torch

    def marks() -> list[Any]:
        return [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]

    for _ in range(clock.num_warm_ups):
        for step in steps:
            step.call()
    rounds = [marks() for _ in range(1 + clock.repeat)]
    clock.align(len(rounds) * len(steps))
    for events in rounds:
        events[0].record()
        for step, end in zip(steps, events[1:], strict=True):
            step.call()
            end.record()
    torch.cuda.current_stream().synchronize()
    return {
        step.label: [1e3 * events[i].elapsed_time(events[i + 1]) for events in rounds[1:]]
        for i, step in enumerate(steps)
        if step.label
    }


def mean_us(clock: Clock, call: Callable[[], Any]) -> float:
    """Microseconds of a call on the GPU, the mean over rounds and ranks. Collective."""
    return over_ranks(clock.comm, by_events(clock, [Step("call", call)])["call"]).average


def by_profile(clock: Clock, call: Callable[[], Any], names: Sequence[str]) -> list[list[KernelTime]] | None:
    """The kernels of each round of this rank; None if the profiler has not seen them all, on any rank.

    Args: names of the kernels that call launches, in this order; others are left out
    """
    for _ in range(TRIES):
        streams = _profile(clock, call, frozenset(names))
        if clock.is_virtual:  # the profiler sees the process: rank 0 has the kernels of all
            everyone = clock.comm.bcast(streams)
            streams = [everyone[clock.comm.rank]] if len(everyone) == clock.comm.size else []
        rounds = split_rounds(streams[0], names, 1 + clock.repeat) if len(streams) == 1 else None
        if all(clock.comm.allgather(rounds is not None)):
            assert rounds is not None
            return rounds[1:]
    return None


def _profile(clock: Clock, call: Callable[[], Any], names: frozenset[str]) -> list[list[KernelTime]]:
    """Kernels with these names in a series, by time; those of each stream if ranks are virtual. The second of two
    series: starting the profiler makes the first one slow."""
    from torch.profiler import ProfilerActivity, profile, schedule

    is_profiling = not clock.is_virtual or clock.comm.rank == 0
    profiler: Any = nullcontext()
    if is_profiling:
        profiler = profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=0, warmup=1, active=1, repeat=1))
    with profiler:
        for _ in range(2):
            clock.align((1 + clock.repeat) * len(names))
            for _ in range(1 + clock.repeat):
                call()
            clock.meet()
            if is_profiling:
                profiler.step()
    kernels: list[KernelTime] = []
    if is_profiling:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            kernels = read_trace(path, names)
    clock.comm.barrier()
    if not clock.is_virtual:
        return [kernels]
    return [[kernel for kernel in kernels if kernel.stream == s] for s in sorted({k.stream for k in kernels})]


def read_trace(path: Path, names: frozenset[str]) -> list[KernelTime]:
    """The kernels in a trace of the profiler whose names contain one of these, by time."""
    kernels = [
        KernelTime(event["name"], event["args"].get("stream", 0), float(event["ts"]), float(event["dur"]))
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "kernel" and any(name in event["name"] for name in names)
    ]
    return sorted(kernels, key=lambda kernel: kernel.start)


def split_rounds(kernels: list[KernelTime], names: Sequence[str], num_rounds: int) -> list[list[KernelTime]] | None:
    """The kernels of each round; None if they are not num_rounds times the names."""
    if len(kernels) != num_rounds * len(names):
        return None
    if any(names[i % len(names)] not in kernel.name for i, kernel in enumerate(kernels)):
        return None
    return [kernels[first : first + len(names)] for first in range(0, len(kernels), len(names))]


def capture(clock: Clock, call: Callable[[], Any]) -> Any:
    """The CUDA graph of a call. Ranks capture one after the other: those that are threads share what torch keeps."""
    import torch

    graph = torch.cuda.CUDAGraph()
    for rank in range(clock.comm.size):
        clock.meet()
        if rank == clock.comm.rank:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
    clock.meet()
    return graph


def mean(comm: Any, value: float) -> float:
    """The mean over ranks. Collective."""
    return statistics.fmean(comm.allgather(float(value)))


def over_ranks(comm: Any, samples: Sequence[float]) -> Spread:
    """One rank's microseconds, with those of the others. Collective."""
    medians, averages = zip(
        *comm.allgather((statistics.median(samples), statistics.fmean(samples))),
        strict=True,
    )
    return Spread(statistics.fmean(medians), min(medians), max(medians), statistics.fmean(averages))


class HostTime(NamedTuple):
    """Microseconds that the CPU takes from a call to its return: each rank's median, the mean over ranks.

    What the caller pays to let go of the arrays of an earlier call is not in it.

    us           before each call this rank's GPU is idle and all ranks have met, so the caches of the CPU are cold
    least_us     the least of all of these: where others share the CPU, it says more of the code than their median
    in_a_row_us  calls come one after the other, as in a program that queues its work ahead
    """

    us: float
    least_us: float
    in_a_row_us: float


def host_times(clock: Clock, steps: Sequence[Step]) -> dict[str, HostTime]:
    """What each step costs the CPU. Collective."""
    alone = _host_us(clock, [[step] for step in steps], NUM_HOST_CALLS)
    in_a_row = _host_us(clock, [[*steps] * HOST_CALLS_IN_A_ROW], NUM_HOST_CALLS // HOST_CALLS_IN_A_ROW)
    return {
        label: HostTime(
            over_ranks(clock.comm, us).mean,
            min(clock.comm.allgather(min(us))),
            over_ranks(clock.comm, in_a_row[label]).mean,
        )
        for label, us in alone.items()
    }


def _host_us(clock: Clock, series: Sequence[Sequence[Step]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call of these series. Before each series this rank's GPU is idle and all ranks have met."""
    spent: dict[str, list[float]] = {}
    for number in range(NUM_HOST_WARM_UPS + rounds):
        for steps in series:
            clock.meet()
            for step in steps:
                step.let_go()
                start = time.perf_counter()
                result = step.call()
                us = 1e6 * (time.perf_counter() - start)
                del result
                if number >= NUM_HOST_WARM_UPS:
                    spent.setdefault(step.label, []).append(us)
    return spent


def driver_us(stream: Any, call: Callable[[], Any], times: int) -> float:
    """Microseconds of so many calls in a row on one of nbep's streams; it waits for them. No torch."""
    from cuda.bindings import driver as cu

    from nbep.host.target.cuda.driver import check

    start, end = (check("cuEventCreate", cu.cuEventCreate(0)) for _ in range(2))
    try:
        check("cuEventRecord", cu.cuEventRecord(start, stream.handle))
        for _ in range(times):
            call()
        check("cuEventRecord", cu.cuEventRecord(end, stream.handle))
        stream.synchronize()
        return 1e3 * float(check("cuEventElapsedTime", cu.cuEventElapsedTime(start, end)))
    finally:
        for event in (start, end):
            cu.cuEventDestroy(event)
