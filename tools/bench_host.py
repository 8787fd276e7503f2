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
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from nbep.bench.harness.clocks import nothing
from nbep.bench.harness.command import UNUSABLE, Parser, positive
from nbep.bench.harness.report import Report, Row
from nbep.specimens.workloads.cases import routes_of
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
    from no_gpu import make_buffer, make_elastic, tensors_of_the_cpu

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


# The calls of all verbs, as programs make them, on one buffer of any front


Verbs = dict[str, Callable[[], Any]]
PAIR = "low-latency pair"


class Sizes(NamedTuple):
    """Of a rank's calls. low_latency_tokens: of the low-latency mode, and tokens of the normal one"""

    low_latency_tokens: int
    tokens: int
    hidden: int
    topk: int
    low_latency_experts: int
    experts: int


FOR_GPUS = Sizes(128, 4096, 7168, 8, 288, 256)
FOR_THE_CPU = Sizes(4, 16, 512, 8, 16, 16)  # the memory of larger outputs costs a CPU more than a call does
NVL_BYTES = 1 << 30


def inputs(torch: Any, sizes: Sizes, num_tokens: int, num_experts: int, device: str) -> tuple[Any, Any, Any]:
    """x, topk_idx and topk_weights."""
    x = torch.zeros((num_tokens, sizes.hidden), dtype=torch.bfloat16, device=device)
    first = 7 * torch.arange(num_tokens, dtype=torch.int64, device=device)
    step = torch.arange(sizes.topk, dtype=torch.int64, device=device) * (num_experts // sizes.topk)
    weights = torch.ones((num_tokens, sizes.topk), dtype=torch.float32, device=device)
    return x, (first[:, None] + step[None]) % num_experts, weights


def routed(buffer: Any, topk_idx: Any, weights: Any, num_experts: int) -> dict[str, Any]:
    """What a dispatch takes besides x."""
    routes = routes_of(buffer.get_dispatch_layout(topk_idx, num_experts)[:4])
    given = {name: array for name, array in routes.items() if array is not None}
    return {**given, "topk_idx": topk_idx, "topk_weights": weights}


def low_latency_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those of the low-latency mode, which all fronts have."""
    num_tokens, num_experts = sizes.low_latency_tokens, sizes.low_latency_experts
    x, topk_idx, weights = inputs(torch, sizes, num_tokens, num_experts, device)
    shape = num_experts // buffer.group_size, buffer.group_size * num_tokens, sizes.hidden
    rows = torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def dispatch(**options: Any) -> Any:
        return buffer.low_latency_dispatch(x, topk_idx, num_tokens, num_experts, use_fp8=True, **options)

    def combine(handle: Any) -> Any:
        return buffer.low_latency_combine(rows, topk_idx, weights, handle)

    def with_hook() -> Any:
        received = dispatch(return_recv_hook=True)
        received[-1]()
        return received

    held = dispatch()[2]
    return {
        PAIR: lambda: combine(dispatch()[2]),
        "low-latency dispatch": dispatch,
        "low-latency dispatch and hook": with_hook,
        "low-latency combine": lambda: combine(held),
    }


def normal_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str, between_nodes: bool = False) -> Verbs:
    """Those of the normal mode, which all fronts have."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    routes, most = routed(buffer, topk_idx, weights, sizes.experts), sizes.tokens * buffer.group_size
    # Where no counts come because nothing is launched, none must be waited for.
    most_of_first = 0 if device == "cuda" else most
    received, _, received_weights, _, handle, _ = buffer.dispatch(x, **routes, num_worst_tokens=most_of_first)
    where = " between nodes" if between_nodes else ""
    return {
        f"layout{where}": lambda: buffer.get_dispatch_layout(topk_idx, sizes.experts),
        f"dispatch, num_worst_tokens{where}": lambda: buffer.dispatch(x, **routes, num_worst_tokens=most),
        f"cached dispatch{where}": lambda: buffer.dispatch(x, handle=handle),
        f"combine{where}": lambda: buffer.combine(received, handle, topk_weights=received_weights),
    }


def events_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """A cached dispatch and a combine behind an event, as programs make them that overlap."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    received, _, _, _, handle, _ = buffer.dispatch(x, **routed(buffer, topk_idx, weights, sizes.experts))

    def behind_an_event(verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        options |= {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}
        made = verb(*args, **options)
        made[-1].current_stream_wait()
        return made

    return {
        "cached dispatch behind an event": lambda: behind_an_event(buffer.dispatch, x, handle=handle),
        "combine behind an event": lambda: behind_an_event(buffer.combine, received, handle),
    }


def zero_copy_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those without rings, which DeepEP has not."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    routes, most = routed(buffer, topk_idx, weights, sizes.experts), sizes.tokens * buffer.group_size
    received, _, _, _, handle, _ = buffer.dispatch(x, **routes, num_worst_tokens=most, zero_copy=True)
    return {
        "cached dispatch, zero copy": lambda: buffer.dispatch(x, handle=handle, zero_copy=True),
        "combine, zero copy": lambda: buffer.combine(received, handle, zero_copy=True),
    }


def elastic_verbs(elastic: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those of an ElasticBuffer: a decoding step's, and along the routes of a handle."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.low_latency_tokens, sizes.experts, device)

    dispatch = partial(elastic.dispatch, x, topk_idx, weights, num_experts=sizes.experts, do_cpu_sync=False)
    received, _, received_weights, handle, _ = dispatch()
    return {
        "elastic dispatch, no CPU sync": dispatch,
        "elastic dispatch, cached": lambda: elastic.dispatch(x, handle=handle),
        "elastic combine": lambda: elastic.combine(received, handle, topk_weights=received_weights),
    }


def all_verbs(
    fronts: dict[str, str],
    torch: Any,
    sizes: Sizes,
    device: str,
    num_ranks: int,
    create: Callable[..., Any],
    create_elastic: Callable[[Any], Any],
) -> dict[str, Verbs]:
    """The calls of each front, by its name.

    Args: fronts: the module of each. One that is not nbep's is like DeepEP: without zero_copy, virtual nodes and such
          create(class, num_rdma_bytes, **options) makes a Buffer, create_elastic(class) an ElasticBuffer
    """
    verbs = {}
    for front, name in fronts.items():
        module, num_experts = import_module(name), sizes.low_latency_experts
        cls = module.Buffer
        hint = cls.get_low_latency_rdma_size_hint(sizes.low_latency_tokens, sizes.hidden, num_ranks, num_experts)
        more = {"low_latency_mode": True, "num_qps_per_rank": num_experts // num_ranks}
        given = torch, sizes, device
        is_nbeps = name.startswith("nbep")
        if is_nbeps:
            more["num_zero_copy_bytes"] = cls.get_zero_copy_size_hint(sizes.tokens, sizes.hidden, num_ranks, sizes.topk)
        buffer = create(cls, hint, **more)
        verbs[front] = low_latency_verbs(buffer, *given) | normal_verbs(buffer, *given)
        if device == "cuda":
            verbs[front] |= events_verbs(buffer, *given)
        if is_nbeps:
            nodes = create(cls, NVL_BYTES, low_latency_mode=False, num_nvl_peers=1)  # each rank is a node
            verbs[front] |= zero_copy_verbs(buffer, *given) | normal_verbs(nodes, *given, between_nodes=True)
            verbs[f"{name}.ElasticBuffer"] = elastic_verbs(create_elastic(module.ElasticBuffer), *given)
    return verbs
