"""What a benchmark says and writes: tables, lines, one JSON value, and plots, in one form for all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nbep.bench.harness.clocks import Clock, mean_us, nothing
from nbep.device.kernels.intranode.push import AT_HOME, BOTH, ROW_BYTES, TO_PEERS, push
from nbep.device.terminal import console_for, write_json
from nbep.host.ranks.comm import InProcessComm
from nbep.host.shared_memory import SharedMemory

Row = dict[str, Any]  # columns by name, as JSON has them; None where one has no meaning


@dataclass(frozen=True)
class Case:
    """What is measured, on one rank. Bytes and times are means over the ranks, so that all ranks make the same row.

    settings  the columns that a row begins with
    call      what is measured; left out where a clock times several calls at once
    moved     the bytes of a call, by the column for their rate in GB/s
    compared  microseconds of something else that does the same, by the column for the ratio
    """

    settings: Row
    call: Callable[[], Any] = nothing
    moved: Mapping[str, float] = field(default_factory=dict)
    compared: Mapping[str, float] = field(default_factory=dict)

    def row(self, us: float, **more: Any) -> Row:
        """The row of a case that took so long. more: other columns"""
        rates = {name: num_bytes / us / 1e3 for name, num_bytes in self.moved.items()}
        ratios = {name: other_us / us for name, other_us in self.compared.items()}
        return {**self.settings, "us": us, **more, **rates, **ratios}


class Report:
    """What rank 0 says and writes, after every part, so that a run that is cut off has said what it knows.

    Args: options of the command; `json` is where to write
          head: what the JSON value begins with
    """

    def __init__(self, options: argparse.Namespace, **head: Any):
        self.options = options
        self.found: dict[str, Any] = head
        self.console = console_for(options.json, width=120)

    def say(self, *lines: str) -> None:
        for line in lines:
            self.console.print(line, highlight=False)

    def table(self, rows: Sequence[Row], columns: Mapping[str, str], title: str | None = None) -> None:
        """A line for each row. Words stand on the left, numbers on the right.

        Args: columns: title -> key of a row, and behind a colon how it is formatted
        """
        from rich.table import Table

        table = Table(title=title)
        for name, shown in columns.items():
            is_text = all(isinstance(row[shown.partition(":")[0]], str | bool) for row in rows)
            table.add_column(name, justify="left" if is_text else "right")
        for row in rows:
            table.add_row(*(cell(row, field) for field in columns.values()))
        self.console.print(table)

    def add(self, **lists: Iterable[Row]) -> None:
        """What is written in the lists of these names, too."""
        for name, rows in lists.items():
            self.found[name] = self.found.get(name, []) + list(rows)
        write_json(self.options.json, self.found, is_last=False)

    def close(self) -> None:
        """Nothing comes any more."""
        write_json(self.options.json, self.found)


def carrier(what: str, comm: Any) -> str:
    """What carries the bytes of a benchmark between nodes that are ranks of one host."""
    if isinstance(comm, InProcessComm):
        return f"{what} is the memory of one card; no NIC and no NVLink is measured"
    return f"{what} is NVLink, or memory where ranks share a card; no NIC is measured"


def cell(row: Row, field: str) -> str:
    """None is an empty cell."""
    name, _, form = field.partition(":")
    value = row[name]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else format(value, form)


def draw(path: Path, points: Iterable[tuple[str, float, float]], *, dashed: str, small: str = "", **axes: Any) -> None:
    """A line for each label.

    Args: points: label, x, y; of those of a label at one x the first counts
          dashed: how the labels of ceilings begin
          small: a title in small letters
          axes: as `Axes.set` takes them
    """
    from matplotlib.figure import Figure

    lines: dict[str, dict[float, float]] = {}
    for label, x, y in points:
        lines.setdefault(label, {}).setdefault(x, y)
    figure = Figure(figsize=(7, 4), layout="constrained")
    drawn = figure.subplots()
    for label, line in lines.items():
        style = {"linestyle": "--", "linewidth": 1} if dashed and label.startswith(dashed) else {"marker": "o"}
        drawn.plot(sorted(line), [line[x] for x in sorted(line)], label=label, **style)
    drawn.set(**axes)
    if small:
        drawn.set_title(small, fontsize="small")
    drawn.legend(fontsize="small")
    figure.savefig(path, dpi=150)


# What SMs copy with nothing else to do, with which calls are compared: the kernel `push`


PUSH_ROWS = 4096
PUSH_OFFSET = 1 << 20  # past the cells of the rings
PUSH_THREADS = 768
COLUMNS = {"SMs": "num_sms", "to peers": "to_peers:.1f", "at home": "at_home:.1f", "both": "both:.1f"}


class Push(NamedTuple):
    """What SMs copy with nothing else to do, in GB/s of each rank; half of `both` goes to the peers."""

    to_peers: float
    at_home: float
    both: float


Pushes = dict[int, Push]  # by the number of SMs


def push_bytes(num_ranks: int) -> int:
    """Of the symmetric memory that `push_rates` takes."""
    return PUSH_OFFSET + 2 * num_ranks * PUSH_ROWS * ROW_BYTES


def push_call(memory: SharedMemory, num_rows: int, num_sms: int, destination: int = TO_PEERS) -> Callable[[], None]:
    """A call that copies so many rows to each destination."""
    import torch

    src = torch.ones(num_rows * ROW_BYTES // 2, dtype=torch.int16, device="cuda")
    torch.cuda.current_stream().synchronize()
    runtime, sizes = memory.runtime, (num_sms, PUSH_THREADS, 0)

    def call() -> None:
        runtime.launch(runtime.current_stream, push, *sizes, src, PUSH_OFFSET, num_rows, destination, memory.peers)

    return call


def push_rates(clock: Clock, memory: SharedMemory, sms: Iterable[int]) -> Pushes:
    """Of so many SMs each, to the ranks of the memory's node."""
    num_peers = memory.peers.num_ranks - 1

    def gbps(num_sms: int, destination: int) -> float:
        num_bytes = PUSH_ROWS * ROW_BYTES * (2 * num_peers if destination == BOTH else num_peers)
        return num_bytes / mean_us(clock, push_call(memory, PUSH_ROWS, num_sms, destination)) / 1e3

    return {num_sms: Push(*(gbps(num_sms, to) for to in (TO_PEERS, AT_HOME, BOTH))) for num_sms in sms}


def push_gbps(pushes: Pushes) -> dict[int, dict[str, float]]:
    """As JSON has it."""
    return {num_sms: rates._asdict() for num_sms, rates in pushes.items()}


def say_push(report: Report, pushes: Pushes) -> None:
    rows = [{"num_sms": num_sms, **rates._asdict()} for num_sms, rates in pushes.items()]
    report.table(rows, COLUMNS, "push, GB/s")
