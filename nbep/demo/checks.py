"""Compares what the ranks got with `nbep.reference`: routes, copies and sums bit for bit, the layer within rounding.

What is compared bit for bit, `nbep.specimens.workloads` says: `check_all` is for a whole layer, `check_step` for a
decoding step.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nbep import reference
from nbep.demo.decode import Batch
from nbep.demo.layer import AfterExperts, Model, Result, Settings, options_of
from nbep.specimens.workloads.cases import Case, Report
from nbep.specimens.workloads.intranode import Expected, dispatch_input
from nbep.specimens.workloads.low_latency import check_combined, check_dispatched, expected_dispatch

CASTS = "FP8 cast", "FP8 scales"
# A decoding step multiplies all rows of an expert at once, which adds up in another order than the reference does.
# Both round to bf16, whose step is 2**-8.
LAYER_TOLERANCE = 2**-7
# DeepEP's own limit for FP8, on its measure of difference.
FP8_LIMIT = 9e-4


@dataclass(frozen=True)
class Check:
    """One comparison over all ranks. error: the largest difference of two values, or nan where that means nothing."""

    name: str
    demand: str
    passed: bool
    error: float
    where: str = ""


class Checks(Report):
    """Notes comparisons by name in place of raising, all ranks together. suffix: of the names"""

    def __init__(self, suffix: str = ""):
        super().__init__("")
        self.suffix = suffix
        self.found: dict[str, Check] = {}

    def same(self, name: str, got: np.ndarray, want: np.ndarray, rows: list[str] | None = None) -> None:
        """Bit for bit, on one rank, which `where` names."""
        error, where = float("nan"), ""
        if got.shape != want.shape:
            where = f"{self.where}: shape {got.shape}, expected {want.shape}"
        else:
            error = _largest_difference(got, want)
            if got.tobytes() != want.tobytes():
                wrong = [i for i in range(len(want)) if got[i].tobytes() != want[i].tobytes()]
                where = f"{self.where}: {len(wrong)} of {len(want)} rows, first {wrong[0]}"
        name = re.sub(r" of r\d+e\d+$", "", name)  # all experts together
        before = self.found.get(name + self.suffix)
        if before is not None:
            error, where = max(before.error, error), before.where or where
        self.note(name, "bitwise", not where, error, where)

    def note(self, name: str, demand: str, passed: bool, error: float, where: str = "") -> None:
        self.found[name + self.suffix] = Check(name + self.suffix, demand, passed, error, where)

    def same_layer(self, settings: Settings, model: Model, case: Case, combined_x: list[np.ndarray]) -> None:
        """The sums beside the same layer without ranks: of what FP8 has left of the inputs, then of the inputs."""

        def layers(inputs: list[np.ndarray]) -> list[np.ndarray]:
            tokens = zip(inputs, case.topk_idx, case.topk_weights, strict=True)
            return [reference.moe_layer(*of_rank, model.expert_weight, settings.num_ranks) for of_rank in tokens]

        if not settings.fp8:
            self.close("MoE layer", combined_x, layers(case.x))
            return
        casts = [reference.per_token_cast_to_fp8(x) for x in case.x]
        self.close("MoE layer", combined_x, layers([reference.per_token_cast_back(*pair) for pair in casts]))
        difference = reference.calc_diff(*(np.concatenate(arrays).ravel() for arrays in (combined_x, layers(case.x))))
        self.note("MoE layer without FP8", f"calc_diff <= {FP8_LIMIT:g}", difference <= FP8_LIMIT, difference)

    def close(self, name: str, got: list[np.ndarray], want: list[np.ndarray]) -> None:
        """Within rounding of the largest value, on every rank."""
        limit = LAYER_TOLERANCE * max([float(np.abs(b.astype(np.float32)).max()) for b in want if b.size], default=0.0)
        errors = [_largest_difference(a, b) for a, b in zip(got, want, strict=True)]
        worst = int(np.argmax(np.nan_to_num(errors, nan=np.inf)))
        passed = errors[worst] <= limit
        self.note(name, f"error <= {limit:.2g}", passed, errors[worst], "" if passed else f"rank {worst}")


def check_all(settings: Settings, model: Model, results: list[Result]) -> list[Check]:
    """All comparisons, in the order of the layer."""
    checks, case, options = Checks(), model.case, options_of(settings)
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(options)}
    expected = Expected(case, AfterExperts(**given, outputs=tuple(result.expert_output for result in results)))
    for rank, result in enumerate(results):
        checks.where = f"rank {rank}"
        if settings.fp8:
            # The reference starts from the model, not from what the ranks sent.
            for name, got, want in zip(CASTS, result.sent, dispatch_input(case, options, rank), strict=True):
                checks.same(name, got, want)
        expected.compare(rank, result.outcome, checks)
    checks.same_layer(settings, model, case, [result.outcome.combined_x for result in results])
    return list(checks.found.values())


def check_step(settings: Settings, model: Model, results: list[list[Batch]]) -> list[Check]:
    """All comparisons, batch by batch. results[rank][batch]"""
    found: list[Check] = []
    for name, batches in zip("ab", zip(*results, strict=True), strict=True):
        checks, case, options = Checks(f", batch {name}"), batches[0].case, batches[0].options
        dispatched = expected_dispatch(case, options)
        # The sums start from the rows as they came, in whatever order.
        combined = reference.low_latency_combine(
            [batch.output for batch in batches],
            case.topk_idx,
            case.topk_weights,
            [batch.outcome.dispatched for batch in batches],
            deduplicate=options.deduplicate,
        )
        for rank, batch in enumerate(batches):
            checks.where = f"rank {rank}"
            check_dispatched(checks, case, options, rank, dispatched[rank], batch.outcome)
            check_combined(checks, case, options, rank, combined[rank], batch.outcome)
        checks.same_layer(settings, model, case, [batch.outcome.combined_x for batch in batches])
        found += checks.found.values()
    return found


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if a.size else 0.0


# What the demo prints

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
