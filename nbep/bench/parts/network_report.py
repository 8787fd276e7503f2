"""What `nbep bench network` says and writes."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nbep.device.terminal import console_for, write_json


@dataclass(frozen=True)
class Row:
    """One measurement. batch, num_queues: entries a doorbell and queue pairs for each peer; 0 where there are none."""

    transport: str
    batch: int
    num_queues: int
    num_bytes: int  # of a message
    num_messages: int  # of a rank in a launch
    us: float  # of a launch
    million_per_s: float
    gbps: float
    of_copy: float

    @property
    def label(self) -> str:
        """The transport, and how its queues are used."""
        if self.num_queues == 0:
            return self.transport
        return f"{self.transport}, {self.batch} a doorbell, {self.num_queues} queue pairs"


def wire(is_virtual: bool) -> str:
    """What carries the bytes."""
    if is_virtual:
        return "the wire is the memory of one card; no NIC and no NVLink is measured"
    return "the wire is NVLink, or memory where ranks share a card; no NIC is measured"


class Report:
    """What rank 0 says and writes, after every setting, so that a run that is cut off has said what it knows."""

    def __init__(self, num_ranks: int, is_virtual: bool, options: argparse.Namespace):
        self.num_ranks = num_ranks
        self.is_virtual = is_virtual
        self.options = options
        self.rows: list[Row] = []

    def add(self, rows: list[Row]) -> None:
        from rich.table import Table

        console = console_for(self.options.json, width=120)
        if not self.rows:
            console.print(f"{self.num_ranks} ranks, {self.options.sms} blocks each; {wire(self.is_virtual)}")
        self.rows += rows
        table = Table(title=rows[0].label)
        for name in ("bytes", "messages", "us", "M/s", "GB/s", "of copy"):
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(
                str(row.num_bytes),
                str(row.num_messages),
                f"{row.us:.1f}",
                f"{row.million_per_s:.2f}",
                f"{row.gbps:.2f}",
                f"{row.of_copy:.2f}",
            )
        console.print(table)
        write_json(self.options.json, self._everything(), is_last=False)

    def _everything(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            "wire": wire(self.is_virtual),
            "sms": self.options.sms,
            "rows": [asdict(row) for row in self.rows],
        }

    def close(self) -> None:
        write_json(self.options.json, self._everything())
        if self.options.plot:
            plot(self.rows, f"{self.num_ranks} ranks; {wire(self.is_virtual)}", self.options.plot)


def plot(rows: list[Row], title: str, path: Path) -> None:
    """GB/s over the size of messages, one line for each transport and way to use its queues."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label in dict.fromkeys(row.label for row in rows):
        line = [(row.num_bytes, row.gbps) for row in rows if row.label == label]
        axes.plot(*zip(*line, strict=True), marker="o", label=label)
    axes.set(xlabel="bytes of a message", ylabel="GB/s, each rank", xscale="log", yscale="log")
    axes.set_title(title, fontsize="small")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
