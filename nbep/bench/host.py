"""What a call costs the CPU: every verb through nbep.Buffer and nbep.deep_ep, and through DeepEP if it is there.

    nbep bench host --ranks 2 --beside deep_ep [--json [FILE.json]]      a process for each of two GPUs

 in a row   calls come one after the other, as in a program that queues its work ahead: the least mean of a series
 cold       before each call this process has gone through 64 MB of other memory, as a program does: a median
 events     GPU time from one call to the next, in a row: where that is more than the kernels take, the CPU is the limit

Each is measured without and with torch.set_default_device, in three passes over all fronts; the least pass counts.
Where there are fewer GPUs than ranks, nothing is launched: the driver is replaced by one that does nothing, tensors lie
on the CPU and are small, and the title of the table says so. Then the figures are those of nbep's own steps in Python.
Needs torch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from nbep.bench.harness.case import Row
from nbep.bench.harness.clocks import nothing
from nbep.bench.harness.command import UNUSABLE, Parser, positive
from nbep.bench.harness.report import Report
from nbep.bench.parts.host_calls import FOR_GPUS, FOR_THE_CPU, NVL_BYTES, Verbs, all_verbs
from nbep.version import __version__

FRONTS = {"nbep.Buffer": "nbep", "nbep.deep_ep": "nbep.deep_ep"}
JUNK_BYTES = 64 << 20
SERIES, CALLS, WARM_UPS, PASSES = 12, 8, 10, 3
COLD_CALLS, EVENTS = 20, 60
COLUMNS = {
    "call": "verb",
    "through": "front",
    "in a row": "in_a_row:.1f",
    "default device": "in_a_row_default:.1f",
    "cold": "cold:.1f",
    "cold, default device": "cold_default:.1f",
    "events": "events:.1f",
    "events, default device": "events_default:.1f",
}
Synchronize = Callable[[], None]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("host", __doc__)
    parser.add("ranks", type=positive, choices=None, help="processes, each with a GPU of its own")
    parser.add_argument("--beside", metavar="MODULE", help="a package like DeepEP to measure, too, such as deep_ep")
    parser.add_argument("--verbs", default="", help="measure only calls whose names contain this")
    parser.add_argument("--series", type=positive, default=SERIES, help="series of calls in a row")
    parser.add_argument("--no-launch", action="store_true", help="launch nothing, even if there are GPUs")
    parser.add("json")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if find_spec("torch") is None:
        print("nbep bench host needs torch: pip install torch", file=sys.stderr)
        return UNUSABLE
    import torch

    launches = not options.no_launch and torch.cuda.is_available() and torch.cuda.device_count() >= options.ranks
    if options.beside and (not launches or find_spec(options.beside) is None):
        missing = f"the package {options.beside}" if launches else f"{options.ranks} GPUs"
        print(f"nbep bench host --beside {options.beside} needs {missing}", file=sys.stderr)
        return UNUSABLE
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        if launches:
            torch.multiprocessing.spawn(_run_rank, (options, store), nprocs=options.ranks)
        else:
            report_on(options, False, measure_without_gpu(options))
    return 0


def report_on(options: argparse.Namespace, launches: bool, rows: Iterator[Row]) -> None:
    """Measure, print and write."""
    sizes = FOR_GPUS if launches else FOR_THE_CPU
    about = {"version": __version__, "launches": launches, "ranks": options.ranks}
    report = Report(options, **about, **sizes._asdict(), rows=[])
    for row in rows:
        report.add(rows=[row])
    how = f"{options.ranks} GPUs" if launches else "nothing is launched, tensors lie on the CPU: nbep's own steps alone"
    columns = {title: field for title, field in COLUMNS.items() if launches or "events" not in title}
    report.table(report.found["rows"], columns, f"CPU, us of a call ({how})")
    report.close()


def _run_rank(rank: int, options: argparse.Namespace, store: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    where = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=options.ranks, device_id=where)
    rows = measure_on_gpu(options, dist)
    if rank == 0:
        report_on(options, True, rows)
    else:
        for _ in rows:
            pass
    dist.barrier()
    dist.destroy_process_group()


def measure_on_gpu(options: argparse.Namespace, dist: Any) -> Iterator[Row]:
    """All ranks together."""
    import torch

    group, sizes, buffers = dist.new_group(list(range(options.ranks))), FOR_GPUS, []

    def meet() -> None:
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()

    def create(cls: Any, num_rdma_bytes: int, **more: Any) -> Any:
        buffers.append(cls(group, NVL_BYTES, num_rdma_bytes, explicitly_destroy=True, **more))
        return buffers[-1]

    def create_elastic(cls: Any) -> Any:
        num_tokens = sizes.low_latency_tokens
        buffers.append(cls(group, num_max_tokens_per_rank=num_tokens, hidden=sizes.hidden, num_topk=sizes.topk))
        return buffers[-1]

    fronts = FRONTS | ({options.beside: options.beside} if options.beside else {})
    verbs = all_verbs(fronts, torch, sizes, "cuda", options.ranks, create, create_elastic)
    yield from measure(options, verbs, "cuda", torch.cuda.synchronize, meet)
    meet()
    verbs.clear()
    for buffer in buffers:
        buffer.destroy()


def measure_without_gpu(options: argparse.Namespace) -> Iterator[Row]:
    """nbep's own steps of one rank, where nothing is launched."""
    from nbep.bench.parts.no_gpu import make_buffer, make_elastic, tensors_of_the_cpu

    num_ranks, sizes = max(2, options.ranks), FOR_THE_CPU

    def create(cls: Any, num_rdma_bytes: int, num_qps_per_rank: int = 0, num_nvl_peers: int = 0, **more: Any) -> Any:
        return make_buffer(num_ranks, num_rdma_bytes, num_nvl_peers, cls, **more)

    create_elastic = partial(make_elastic, num_ranks, sizes.low_latency_tokens, sizes.hidden)
    with tensors_of_the_cpu() as torch:
        verbs = all_verbs(FRONTS, torch, sizes, "cpu", num_ranks, create, create_elastic)
        yield from measure(options, verbs, "cpu", nothing, nothing)


# The clocks


def measure(
    options: argparse.Namespace, verbs: dict[str, Verbs], device: str, wait: Synchronize, meet: Synchronize
) -> Iterator[Row]:
    """A row for each verb of each front. wait: for this rank's GPU; meet: and for all ranks

    Fronts take turns, pass by pass: a host that is slow for a while is slow for all of them.
    """
    import numpy as np
    import torch

    junk = np.zeros(JUNK_BYTES // 8, np.int64)
    for verb in dict.fromkeys(verb for calls in verbs.values() for verb in calls):
        calls = {front: of_front[verb] for front, of_front in verbs.items() if verb in of_front}
        if options.verbs not in verb:
            continue
        rows: dict[str, Row] = {front: {"verb": verb, "front": front} for front in calls}
        for _, suffix, front in product(range(PASSES), ("", "_default"), calls):
            call, row = calls[front], rows[front]
            torch.set_default_device(device if suffix else None)
            try:
                for _ in range(WARM_UPS):
                    call()
                meet()
                found: dict[str, float | None] = {
                    "in_a_row": in_a_row_us(call, -(-options.series // PASSES), wait),
                    "cold": cold_us(call, junk, wait),
                }
                meet()
                found["events"] = events_us(call) if device == "cuda" else None
                meet()
            finally:
                torch.set_default_device(None)
            for clock, us in found.items():
                row[clock + suffix] = None if us is None else min(us, row.get(clock + suffix, us))
        yield from rows.values()


def in_a_row_us(call: Callable[[], Any], series: int, wait: Synchronize) -> float:
    means = []
    for _ in range(series):
        wait()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        means.append((time.perf_counter() - start) / CALLS)
    wait()
    return 1e6 * min(means)


def cold_us(call: Callable[[], Any], junk: Any, wait: Synchronize) -> float:
    spent = []
    for _ in range(COLD_CALLS):
        wait()
        junk += 1
        start = time.perf_counter()
        result = call()
        spent.append(time.perf_counter() - start)
        del result
    wait()
    return 1e6 * statistics.median(spent)


def events_us(call: Callable[[], Any]) -> float:
    """The median, between two events, of a call in a row."""
    import torch

    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(EVENTS)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in pairs)
