"""What `nbep bench low-latency` says and writes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from nbep.bench.parts.low_latency_calls import Variant
from nbep.bench.parts.report import Report, draw

PAIR = ("dispatch", "combine")


@dataclass(frozen=True)
class Row:
    """One measurement: see the module. None where it has no meaning."""

    num_tokens: int
    deduplicate: bool
    dispatch: str
    combine: str
    work: str
    clock: str
    graph: bool
    us: float
    min_us: float
    max_us: float
    average_us: float
    gbps: float | None
    wire_gbps: float | None
    of_push: float | None


@dataclass(frozen=True)
class PushTime:
    """Push with as many bytes as one call sends."""

    num_tokens: int
    deduplicate: bool
    dispatch: str
    combine: str
    verb: str
    wire_bytes: float
    kernel_us: float
    events_us: float


@dataclass(frozen=True)
class HostCost:
    """What a call costs the CPU until it returns; see clocks.HostTime."""

    deduplicate: bool
    call: str
    us: float
    least_us: float
    in_a_row_us: float


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


def report_for(num_ranks: int, options: argparse.Namespace) -> Report:
    settings = {name: getattr(options, name) for name in ("transport", "hidden", "topk", "experts", "repeat")}
    return Report(options, num_ranks=num_ranks, **settings, rows=[], push=[], host=[])


def say_faults(variant: Variant, faults: list[list[str]]) -> None:
    """What is wrong on each rank."""
    print(f"nbep bench low-latency: the round trip of {variant} is wrong", file=sys.stderr)
    for rank, of_rank in enumerate(faults):
        for fault in of_rank:
            print(f"  rank {rank}: {fault}", file=sys.stderr, flush=True)


def add_variant(
    report: Report, variant: Variant, rows: list[Row], pushes: list[PushTime], hosts: list[HostCost]
) -> None:
    options = report.options
    report.say(
        f"\n{report.found['num_ranks']} ranks over {options.transport}, {variant.num_tokens} tokens, hidden "
        f"{options.hidden}, top-{options.topk} of {options.experts}, dispatch {variant.dispatch}, combine "
        f"{variant.combine}, deduplicate {'on' if variant.deduplicate else 'off'}"
    )
    report.table(rows, COLUMNS)
    if not any(row.clock == "kernel" for row in rows):
        report.say("no times of kernels: the profiler has not seen all; KINETO_LOG_LEVEL=0 says more")
    for push_time in pushes:
        report.say(
            f"push of {push_time.verb}'s {push_time.wire_bytes / 1e6:.2f} MB: kernel {push_time.kernel_us:.1f} us, "
            f"events {push_time.events_us:.1f} us"
        )
    costs = (f"{h.call} {h.us:.1f} us (least {h.least_us:.1f}, in a row {h.in_a_row_us:.1f})" for h in hosts)
    report.say("host cost: " + ", ".join(costs))
    report.add(rows=rows, push=pushes, host=hosts)


def plot(rows: list[Row], pushes: list[PushTime], num_ranks: int, path: Path) -> None:
    """Time of the kernels over tokens, one line for each work and variant; dashed what push takes."""
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.work in PAIR and row.clock == "kernel":
            words = (row.work, _format(row, row.work), "deduplicated" * row.deduplicate, "in a graph" * row.graph)
            lines.setdefault(" ".join(filter(None, words)), {}).setdefault(row.num_tokens, row.us)
    for p in pushes:
        words = ("push as", p.verb, _format(p, p.verb), "deduplicated" * p.deduplicate)
        lines.setdefault(" ".join(filter(None, words)), {}).setdefault(p.num_tokens, p.kernel_us)
    texts = {"xlabel": "tokens of a rank", "ylabel": "us", "title": f"{num_ranks} ranks"}
    draw(path, lines, dashed="push", ylim=(0, None), **texts)


def _format(measured: Row | PushTime, verb: str) -> str:
    return measured.dispatch if verb == "dispatch" else measured.combine
