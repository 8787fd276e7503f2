"""The tables that the demo prints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nbep.demo.checks import Check
from nbep.demo.layer import Settings

MAX_EXPERT_COLUMNS = 16


def new_table(title: str, *columns: str, left: int = 1) -> Table:
    """A table whose first `left` columns are words and the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return table


def print_traffic(
    console: Console, title: str, sent: list[list[int]], received: list[int], num_tokens: list[int]
) -> None:
    """Who sent how many to whom, and what it came to. sent[src][dst]"""
    ranks = range(len(sent))
    table = new_table(title, "from \\ to", *(f"rank {rank}" for rank in ranks), "copies", "tokens")
    for rank, counts in enumerate(sent):
        table.add_row(f"rank {rank}", *map(str, counts), str(sum(counts)), str(num_tokens[rank]))
    table.add_section()
    table.add_row("received", *map(str, received), str(sum(received)), str(sum(num_tokens)))
    console.print(table)


def print_experts(console: Console, settings: Settings, lists: list[list[int]]) -> None:
    """How many tokens each expert of each rank got; the range where there are many experts."""
    share = settings.num_experts // settings.num_ranks
    if share <= MAX_EXPERT_COLUMNS:
        table = new_table("Tokens per expert", "on", "experts", *([""] * share), left=2)
        rows = [[str(count) for count in counts] for counts in lists]
    else:
        table = new_table("Tokens per expert", "on", "experts", "fewest", "mean", "most", left=2)
        rows = [[str(min(counts)), f"{sum(counts) / share:.1f}", str(max(counts))] for counts in lists]
    for rank, row in enumerate(rows):
        first, last = rank * share, (rank + 1) * share - 1
        table.add_row(f"rank {rank}", str(first) if share == 1 else f"{first} to {last}", *row)
    console.print(table)


def print_checks(console: Console, checks: list[Check]) -> None:
    """Each comparison with its result."""
    table = new_table("Checks against nbep.reference", "what", "demanded", "result", "largest error", left=3)
    for check in checks:
        result = Text("pass", style="green") if check.passed else Text("FAIL", style="bold red")
        error = "-" if math.isnan(check.error) else f"{check.error:.3g}"
        table.add_row(check.name, check.demand, result, error)
    console.print(table)
    for check in checks:
        if check.where:
            console.print(Text(f"{check.name}: {check.where}", style="red"))


# What the demo prints while it runs

STARTING = "start"


class Progress:
    """Which of the phases each rank is in, the last of which means that it is done. Rank functions call `enter`."""

    def __init__(self, console: Console, num_ranks: int, phases: Sequence[str]):
        self.console = console
        self.names = list(phases)
        self.phases = [STARTING] * num_ranks
        self.world: Any = None
        self._spinner = Spinner("dots")
        self._begin = time.perf_counter()

    def enter(self, rank: int, phase: str) -> None:
        """A rank begins a phase; where lines do not move, one is printed when all ranks have left the last one."""
        left = self.phases[rank]
        self.phases[rank] = phase
        if left != STARTING and not self.console.is_terminal:
            behind = [
                other for other in self.phases if other == STARTING or self.names.index(other) <= self.names.index(left)
            ]
            if not behind:
                self.console.print(f"{left} done on all ranks, {self.calls:,} primitive calls so far")

    @property
    def calls(self) -> int:
        """Primitive calls so far."""
        return 0 if self.world is None else self.world.counters["primitive_calls"]

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Redraws from a thread of its own while the emulator runs in this one."""
        if not self.console.is_terminal:
            yield
            return
        with Live(get_renderable=self._draw, console=self.console, refresh_per_second=8, transient=True):
            yield

    def _draw(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for rank, current in enumerate(self.phases):
            number = self.names.index(current) if current in self.names else -1
            steps = Text()
            for i, phase in enumerate(self.names[:-1]):
                style = "green" if i < number else "bold yellow" if i == number else "dim"
                steps.append(phase + "  ", style=style)
            mark = Text("*", style="green") if current == self.names[-1] else self._spinner
            table.add_row(mark, f"rank {rank}", steps)
        table.add_row("", "", Text(f"{self.calls:,} primitive calls, {self.seconds:.1f} s", style="dim"))
        return table
