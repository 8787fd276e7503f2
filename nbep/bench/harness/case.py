"""One measurement: what is called, the bytes it moves, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbep.bench.harness.clocks import nothing

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
