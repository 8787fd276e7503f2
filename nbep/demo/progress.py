"""Tells how far the ranks are: a line for each rank that moves on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

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
