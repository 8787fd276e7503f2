"""Low-latency dispatch and combine, as DeepEP's own test measures them, beside what the wire can carry.

    mpirun -n 4 nbep bench low-latency [--tokens 1,8,32,64,128] [--json [FILE.json]] [--plot FILE]
    nbep bench low-latency --ranks 4      virtual ranks on one card: the kernels run, but no wire is measured

 clock    graph   us
 kernel   no      the kernel alone, as DeepEP's test prints it; "both" from the start of dispatch to the end of combine
 events   no      CUDA events around each call, the launches behind a sleeping kernel
 kernel   yes     as above, in a CUDA graph of ten rounds
 events   yes     events around the replay of ten calls in one graph, a tenth of it

Each rank takes the median over its rounds. us is the mean over ranks, min and max are those of the ranks; average is
the mean over rounds and ranks, as DeepEP's test takes it. The halves are the two launches with return_recv_hook, with a
product of matrices between them; in a graph only the profiler sees them. GB/s counts every choice of a rank's tokens
(DeepEP's unit: hidden + hidden / 128 * 4 + 16 bytes in FP8), wire what leaves the rank. "of push" is the time in which
`push` copies as many bytes to the peers, rounded up to whole rows, over the time of the call; with a graph it is that
of push's kernel. The host cost is what a call takes until it returns, alone and in a row, without what it takes to let
go of earlier results; virtual ranks wait for their kernels in it. Before anything is measured, a round trip is compared
with torch. Needs torch.

Source: DeepEP tests/test_low_latency.py and tests/utils.py
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

import nbep
from nbep.bench.harness.clocks import (
    Clock,
    KernelTime,
    Spread,
    Step,
    by_events,
    by_profile,
    capture,
    host_times,
    mean,
    over_ranks,
)
from nbep.bench.harness.command import Parser, numbers, run, some_of
from nbep.bench.harness.low_latency_calls import Bytes, Calls, Gap, Variant, bytes_of, make_inputs
from nbep.bench.harness.report import PUSH_OFFSET, Case, Report, Row, draw, push_call
from nbep.device.jit import KERNELS, spec_of
from nbep.device.kernels.intranode.push import ROW_BYTES, push
from nbep.device.layout.low_latency import MAX_RANKS
from nbep.host.transport.base import TransportName
from nbep.host.validate import INTRANODE_RANKS

PAIR = ("dispatch", "combine")
WORKS = (*PAIR, "both", "halves")
HALVES = ("dispatch send", "dispatch receive", "combine send", "combine receive")
GRAPH_ROUNDS = 10
PUSH_SMS = 24  # fill the wire; for few bytes all SMs are faster
COLUMNS = {
    "work": "work",
    "clock": "clock",
    "graph": "graph",
    "us": "us:.1f",
    "min": "min_us:.1f",
    "max": "max_us:.1f",
    "average": "average_us:.1f",
    "GB/s": "gbps:.1f",
    "wire GB/s": "wire_gbps:.1f",
    "of push": "of_push:.2f",
}

Samples = dict[tuple[str, str, bool], list[float]]  # microseconds by work, clock and whether in a graph


@dataclass
class Setup:
    """One rank's."""

    comm: Any
    buffer: nbep.Buffer
    gap: Gap
    options: argparse.Namespace


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("low-latency", __doc__)
    on_off = some_of(("off", "on"))
    tried = "tokens of a rank to try, such as 1,8,32,64,128"
    parser.add("tokens", type=numbers, default=[128], help=tried)
    parser.add("hidden", "topk")
    parser.add("experts", default=288, help="of all ranks")
    parser.add_works(WORKS)
    parser.add_argument("--deduplicate", type=on_off, default=["off", "on"], help="off, on or off,on")
    text = "off, on or off,on: without CUDA graphs, with them; virtual ranks do without unless asked"
    parser.add_argument("--graph", type=on_off, default=None, help=text)
    parser.add_argument("--bf16", action="store_true", help="dispatch BF16, too")
    parser.add_argument("--logfmt", action="store_true", help="combine with LogFMT, too")
    parser.add("repeat", help="rounds that are timed")
    parser.add("handle-type")
    text = "as in nbep.Buffer; if not direct, each rank is a node of its own, and nothing is compared with push"
    parser.add_argument("--transport", default="direct", choices=get_args(TransportName), help=text)
    parser.add_ranks(MAX_RANKS)
    parser.add("json")
    parser.add("plot", help="draw the time over tokens there")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or torch's profiler tells of every start and stop
    return run("low-latency", parse(argv), measure_rank, fill_in)


def fill_in(options: argparse.Namespace, comm: Any) -> str | None:
    """Set whether there are graphs. Returns what cannot be measured."""
    if options.graph is None:
        options.graph = ["off"] if comm is None else ["off", "on"]
    num_ranks = options.ranks if comm is None else comm.size
    return f"{options.experts} experts are no multiple of {num_ranks} ranks" if options.experts % num_ranks else None


def variants(options: argparse.Namespace) -> list[Variant]:
    formats = [(True, False), *[(False, False)] * options.bf16, *[(True, True)] * options.logfmt]
    return [
        Variant(num_tokens, use_fp8, use_logfmt, deduplicate == "on")
        for num_tokens, deduplicate, (use_fp8, use_logfmt) in product(options.tokens, options.deduplicate, formats)
        if not (use_logfmt and deduplicate == "on")  # which exclude each other
    ]


def measure_rank(comm: Any, options: argparse.Namespace) -> bool:
    """Measure everything on this rank; rank 0 prints and writes. False if a round trip was wrong."""
    setup = prepare(comm, options)
    settings = {name: getattr(options, name) for name in ("transport", "hidden", "topk", "experts", "repeat")}
    report = Report(options, num_ranks=comm.size, **settings, rows=[], push=[], host=[])
    hosts: dict[Variant, list[Row]] = {}
    right = True
    for variant in variants(options):  # all of them first: torch's profiler, once started, makes each launch slower
        calls, choices = prepare_calls(setup, variant)
        faults = comm.allgather(calls.round_trip(choices))
        right = not any(faults)
        if not right:
            if comm.rank == 0:
                say_faults(variant, faults)
            break
        hosts[variant] = host_costs(setup, calls)
    for variant, costs in hosts.items() if right else ():
        calls, choices = prepare_calls(setup, variant)
        calls.round_trip(choices)
        rows, pushes = measure_variant(setup, calls, choices)
        if comm.rank == 0:
            add_variant(report, variant, rows, pushes, costs)
    if comm.rank == 0:
        report.close()
        if options.plot:
            plot(report)
    setup.buffer.destroy()
    return right


def prepare(comm: Any, options: argparse.Namespace) -> Setup:
    most_tokens, is_direct = max(options.tokens), options.transport == "direct"
    num_rdma_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(most_tokens, options.hidden, comm.size, options.experts)
    num_nvl_bytes = 0
    if comm.size in INTRANODE_RANKS and is_direct:
        # Push writes there: as many bytes as if all choices went to peers, and more.
        most_bytes = most_tokens * options.topk * (2 * options.hidden + 1024)
        num_nvl_bytes = PUSH_OFFSET + comm.size * push_rows(most_bytes, comm.size) * ROW_BYTES
    # The buffer comes first: its GPU is torch's current one from then on.
    buffer = nbep.Buffer(
        comm,
        num_nvl_bytes=num_nvl_bytes,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=True,
        handle_type=options.handle_type,
        transport=options.transport,
        num_nvl_peers=None if is_direct else 1,
    )
    gap = Gap()
    gap()
    return Setup(comm, buffer, gap, options)


def prepare_calls(setup: Setup, variant: Variant) -> tuple[Calls, Any]:
    """The calls of a variant, and the choices of all ranks in NumPy."""
    import numpy as np
    import torch

    options = setup.options
    inputs = make_inputs(setup.comm.rank, variant.num_tokens, options.hidden, options.topk, options.experts)
    choices = np.stack(setup.comm.allgather(inputs.topk_idx.cpu().numpy()))
    torch.cuda.current_stream().synchronize()
    return Calls(setup.buffer, variant, inputs, options.experts, setup.gap), choices


def measure_variant(setup: Setup, calls: Calls, choices: Any) -> tuple[list[Row], list[Row]]:
    """The rows of the calls, and those of push."""
    comm, options, variant = setup.comm, setup.options, calls.variant
    clock = Clock(comm, options.repeat, calls.clean)
    own = bytes_of(variant, choices, comm.rank, options.hidden, options.experts)
    moved = {verb: Bytes(*(mean(comm, num_bytes) for num_bytes in own[verb])) for verb in PAIR}
    pushes = push_times(setup, clock, variant, moved)
    samples: Samples = {}
    if "off" in options.graph:
        samples |= eager_samples(clock, calls, options.works)
    if "on" in options.graph:
        samples |= graph_samples(clock, calls, options.works)
    rows = [
        make_row(variant, *key, over_ranks(comm, of_key), moved, pushes)
        for key, of_key in samples.items()
        if work_of(key[0]) in options.works
    ]
    return rows, pushes


def work_of(label: str) -> str:
    return "halves" if label in HALVES else label


# Dispatch and combine


def eager_samples(clock: Clock, calls: Calls, works: Sequence[str]) -> Samples:
    gap = Step("", calls.gap)
    events: dict[str, list[float]] = {}
    if {"dispatch", "combine"} & set(works):
        events |= by_events(clock, [Step("dispatch", calls.dispatch), Step("combine", calls.combine)])
    if "both" in works:
        events |= by_events(clock, [Step("both", calls.both)])
    if "halves" in works:
        dispatch = [Step(HALVES[0], calls.send_dispatch), gap, Step(HALVES[1], calls.receive)]
        combine = [Step(HALVES[2], calls.send_combine), gap, Step(HALVES[3], calls.receive)]
        events |= by_events(clock, dispatch + combine)
    samples: Samples = {(label, "events", False): us for label, us in events.items()}
    if set(works) != {"halves"}:
        samples |= kernel_samples(by_profile(clock, calls.both, names_of(PAIR)), PAIR, False)
    if "halves" in works:
        samples |= kernel_samples(by_profile(clock, calls.halves, names_of(HALVES)), HALVES, False)
    return samples


def graph_samples(clock: Clock, calls: Calls, works: Sequence[str]) -> Samples:
    samples: Samples = {}

    def captured(call: Callable[[], None], times: int) -> Any:
        def repeated() -> None:
            for _ in range(times):
                call()

        calls.both()  # or combine's handle would be one of an earlier graph
        return capture(clock, repeated)

    for work, call in (("dispatch", calls.dispatch), ("combine", calls.combine), ("both", calls.both)):
        if work in works:
            graph = captured(call, GRAPH_ROUNDS)
            us = by_events(clock, [Step(work, graph.replay)])[work]
            samples[work, "events", True] = [of_replay / GRAPH_ROUNDS for of_replay in us]
    if set(works) != {"halves"}:
        graph, labels = captured(calls.both, GRAPH_ROUNDS), PAIR * GRAPH_ROUNDS
        samples |= kernel_samples(by_profile(clock, graph.replay, names_of(labels)), labels, True)
    if "halves" in works:
        graph = captured(calls.halves, 1)
        samples |= kernel_samples(by_profile(clock, graph.replay, names_of(HALVES)), HALVES, True)
    calls.both()
    return samples


def names_of(labels: Iterable[str]) -> list[str]:
    """The kernel that each of these launches, as the profiler calls it."""
    return [KERNELS[f"low_latency_{label.split()[0]}"].full_name for label in labels]


def kernel_samples(rounds: list[list[KernelTime]] | None, labels: Sequence[str], graph: bool) -> Samples:
    """Microseconds of each kernel, and from the start of a dispatch to the end of the combine behind it as "both"."""
    samples: Samples = {}
    for kernels in rounds or []:
        for label, kernel in zip(labels, kernels, strict=True):
            samples.setdefault((label, "kernel", graph), []).append(kernel.us)
        if tuple(labels[:2]) == PAIR:
            for first, last in zip(kernels[::2], kernels[1::2], strict=True):
                samples.setdefault(("both", "kernel", graph), []).append(last.start + last.us - first.start)
    return samples


def make_row(
    variant: Variant,
    label: str,
    clock: str,
    graph: bool,
    spread: Spread,
    moved: dict[str, Bytes],
    pushes: Sequence[Row],
) -> Row:
    """Halves move no bytes of their own; push is timed by the same clock."""
    verbs = PAIR if label == "both" else (label,) if label in PAIR else ()
    settings = {**variant.columns, "work": label, "clock": clock, "graph": graph}
    rates, compared = {}, {}
    if verbs:
        rates["gbps"] = sum(moved[verb].selections for verb in verbs)
        rates["wire_gbps"] = sum(moved[verb].wire for verb in verbs)
    if verbs and pushes:
        push_us = "kernel_us" if graph or clock == "kernel" else "events_us"
        compared["of_push"] = sum(push[push_us] for push in pushes if push["verb"] in verbs)
    case = Case({**settings, "gbps": None, "wire_gbps": None, "of_push": None}, moved=rates, compared=compared)
    return case.row(spread.mean, min_us=spread.min, max_us=spread.max, average_us=spread.average)


# Push and the host


def push_rows(num_bytes: float, num_ranks: int) -> int:
    """Rows for each peer that hold these bytes."""
    return max(1, math.ceil(num_bytes / (num_ranks - 1) / ROW_BYTES))


def push_times(setup: Setup, clock: Clock, variant: Variant, moved: dict[str, Bytes]) -> list[Row]:
    """Push with as many bytes as each call sends. None if the buffer has no memory for push, which knows 2, 4 or 8
    ranks, all mapped."""
    memory = setup.buffer._memory
    assert memory is not None
    if memory.num_nvl_bytes == 0 or memory.low_latency is None:
        return []
    times = []
    for verb in PAIR:
        of_kernel, of_events = [], []
        for num_sms in sorted({PUSH_SMS, memory.low_latency.num_blocks}):
            call = push_call(memory, push_rows(moved[verb].wire, setup.comm.size), num_sms)
            of_events.append(over_ranks(setup.comm, by_events(clock, [Step("push", call)])["push"]).mean)
            rounds = by_profile(clock, call, [spec_of(push).full_name])
            if rounds is not None:
                of_kernel.append(over_ranks(setup.comm, [kernels[0].us for kernels in rounds]).mean)
        found = {"kernel_us": min(of_kernel or of_events), "events_us": min(of_events)}
        times.append({**variant.columns, "verb": verb, "wire_bytes": moved[verb].wire, **found})
    return times


def host_costs(setup: Setup, calls: Calls) -> list[Row]:
    """What each call costs the CPU; see HostTime."""
    steps = [
        Step("dispatch", calls.dispatch, calls.forget_dispatch),
        Step("combine", calls.combine, calls.forget_combine),
        Step("dispatch with hook", calls.send_dispatch, calls.forget_dispatch),
        Step("hook of dispatch", calls.receive),
        Step("combine with hook", calls.send_combine, calls.forget_combine),
        Step("hook of combine", calls.receive),
    ]
    times = host_times(Clock(setup.comm, setup.options.repeat, calls.clean), steps)
    return [
        {"deduplicate": calls.variant.deduplicate, "call": label, **spent._asdict()} for label, spent in times.items()
    ]


# What is said


def say_faults(variant: Variant, faults: list[list[str]]) -> None:
    """What is wrong on each rank."""
    print(f"nbep bench low-latency: the round trip of {variant} is wrong", file=sys.stderr)
    for rank, of_rank in enumerate(faults):
        for fault in of_rank:
            print(f"  rank {rank}: {fault}", file=sys.stderr, flush=True)


def add_variant(report: Report, variant: Variant, rows: list[Row], pushes: list[Row], hosts: list[Row]) -> None:
    options = report.options
    report.say(
        f"\n{report.found['num_ranks']} ranks over {options.transport}, {variant.num_tokens} tokens, hidden "
        f"{options.hidden}, top-{options.topk} of {options.experts}, dispatch {variant.dispatch}, combine "
        f"{variant.combine}, deduplicate {'on' if variant.deduplicate else 'off'}"
    )
    report.table(rows, COLUMNS)
    if not any(row["clock"] == "kernel" for row in rows):
        report.say("no times of kernels: the profiler has not seen all; KINETO_LOG_LEVEL=0 says more")
    for row in pushes:
        report.say(
            f"push of {row['verb']}'s {row['wire_bytes'] / 1e6:.2f} MB: kernel {row['kernel_us']:.1f} us, "
            f"events {row['events_us']:.1f} us"
        )
    cost = "{call} {us:.1f} us (least {least_us:.1f}, in a row {in_a_row_us:.1f})"
    report.say("host cost: " + ", ".join(cost.format(**row) for row in hosts))
    report.add(rows=rows, push=pushes, host=hosts)


def plot(report: Report) -> None:
    """Time of the kernels over tokens, one line for each work and variant; dashed what push takes."""

    def label(row: Row, verb: str, *words: str) -> str:
        return " ".join(filter(None, (*words, verb, row[verb], "deduplicated" * row["deduplicate"])))

    points = [
        (label(row, row["work"]) + " in a graph" * row["graph"], row["num_tokens"], row["us"])
        for row in report.found["rows"]
        if row["work"] in PAIR and row["clock"] == "kernel"
    ]
    pushes = report.found["push"]
    points += [(label(row, row["verb"], "push as"), row["num_tokens"], row["kernel_us"]) for row in pushes]
    texts = {"xlabel": "tokens of a rank", "ylabel": "us", "title": f"{report.found['num_ranks']} ranks"}
    draw(report.options.plot, points, dashed="push", ylim=(0, None), **texts)
