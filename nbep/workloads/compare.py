"""Compares arrays bit for bit with what they must be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Report:
    """Compares arrays bit for bit and says where they differ.

    where: which run it is, and which rank; it begins each message
    """

    where: str

    def same(self, name: str, got: np.ndarray, want: np.ndarray, rows: list[str] | None = None) -> None:
        """Raises: AssertionError if the arrays differ. rows: what to call each row"""
        where = f"{self.where}, {name}"
        assert (got.shape, got.dtype) == (want.shape, want.dtype), where
        if got.tobytes() == want.tobytes():
            return
        wrong = [i for i in range(len(want)) if got[i].tobytes() != want[i].tobytes()]
        lines = [f"{where}: {len(wrong)} of {len(want)} rows differ"]
        for i in wrong[:4]:
            token = f" ({rows[i]})" if rows is not None and i < len(rows) else ""
            lines.append(f"  row {i}{token}: got {got[i].ravel()[:8]}, expected {want[i].ravel()[:8]}")
        raise AssertionError("\n".join(lines))
