"""What `nbep bench low-latency` says and writes."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbep.bench.parts.low_latency_calls import Variant
from nbep.device.terminal import console_for, write_json

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


class Report:
    """What rank 0 says and writes, after every variant, so that a run that is cut off has said what it knows."""

    def __init__(self, num_ranks: int, options: argparse.Namespace):
        self.num_ranks = num_ranks
        self.options = options
        self.rows: list[Row] = []
        self.pushes: list[PushTime] = []
        self.hosts: list[HostCost] = []

    def add_faults(self, variant: Variant, faults: list[list[str]]) -> None:
        """What is wrong on each rank."""
        print(f"nbep bench low-latency: the round trip of {variant} is wrong", file=sys.stderr)
        for rank, of_rank in enumerate(faults):
            for fault in of_rank:
                print(f"  rank {rank}: {fault}", file=sys.stderr, flush=True)

    def add(self, variant: Variant, rows: list[Row], pushes: list[PushTime], hosts: list[HostCost]) -> None:
        self.rows += rows
        self.pushes += pushes
        self.hosts += hosts
        console, options = console_for(self.options.json, width=120), self.options
        console.print(
            f"\n{self.num_ranks} ranks over {options.transport}, {variant.num_tokens} tokens, hidden {options.hidden}, "
            f"top-{options.topk} of {options.experts}, dispatch {variant.dispatch}, combine {variant.combine}, "
            f"deduplicate {'on' if variant.deduplicate else 'off'}"
        )
        console.print(table_of(rows))
        if not any(row.clock == "kernel" for row in rows):
            console.print("no times of kernels: the profiler has not seen all; KINETO_LOG_LEVEL=0 says more")
        for push_time in pushes:
            console.print(
                f"push of {push_time.verb}'s {push_time.wire_bytes / 1e6:.2f} MB: kernel {push_time.kernel_us:.1f} us, "
                f"events {push_time.events_us:.1f} us"
            )
        costs = (f"{h.call} {h.us:.1f} us (least {h.least_us:.1f}, in a row {h.in_a_row_us:.1f})" for h in hosts)
        console.print("host cost: " + ", ".join(costs))
        write_json(options.json, self._everything(), is_last=False)

    def close(self) -> None:
        write_json(self.options.json, self._everything())
        if self.options.plot:
            plot(self.rows, self.pushes, self.num_ranks, self.options.plot)

    def _everything(self) -> dict[str, Any]:
        options = self.options
        return {
            "num_ranks": self.num_ranks,
            "transport": options.transport,
            "hidden": options.hidden,
            "topk": options.topk,
            "experts": options.experts,
            "repeat": options.repeat,
            "rows": [asdict(row) for row in self.rows],
            "push": [asdict(push_time) for push_time in self.pushes],
            "host": [asdict(host) for host in self.hosts],
        }


def table_of(rows: list[Row]) -> Any:
    from rich.table import Table

    table = Table()
    for name in ("work", "clock", "graph", "us", "min", "max", "average", "GB/s", "wire GB/s", "of push"):
        table.add_column(name, justify="left" if name in ("work", "clock", "graph") else "right")
    for row in rows:
        table.add_row(
            row.work,
            row.clock,
            "yes" if row.graph else "no",
            *(number(us, 1) for us in (row.us, row.min_us, row.max_us, row.average_us, row.gbps, row.wire_gbps)),
            number(row.of_push, 2),
        )
    return table


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(rows: list[Row], pushes: list[PushTime], num_ranks: int, path: Path) -> None:
    """Time of the kernels over tokens, one line for each work and variant; dashed what push takes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.work in PAIR and row.clock == "kernel":
            words = (row.work, _format(row, row.work), "deduplicated" * row.deduplicate, "in a graph" * row.graph)
            lines.setdefault(" ".join(filter(None, words)), {}).setdefault(row.num_tokens, row.us)
    for p in pushes:
        words = ("push as", p.verb, _format(p, p.verb), "deduplicated" * p.deduplicate)
        lines.setdefault(" ".join(filter(None, words)), {}).setdefault(p.num_tokens, p.kernel_us)
    for label, line in lines.items():
        style = {"linestyle": "--", "linewidth": 1} if label.startswith("push") else {"marker": "o"}
        axes.plot(sorted(line), [line[n] for n in sorted(line)], label=label, **style)
    axes.set(xlabel="tokens of a rank", ylabel="us", title=f"{num_ranks} ranks", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def _format(measured: Row | PushTime, verb: str) -> str:
    return measured.dispatch if verb == "dispatch" else measured.combine
