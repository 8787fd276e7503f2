"""Inputs must not change while a kernel reads them: under `checked` each is compared at the launch and at its end."""

from __future__ import annotations

import numpy as np

from nbep.emulator import DataRace
from nbep.emulator.machine.memory import extent

Span = tuple[int, int]  # see `extent`


def is_over(array: np.ndarray, spans: list[Span]) -> bool:
    begin, end = extent(array)
    return any(begin < its_end and its_begin < end for its_begin, its_end in spans)


class Watched:
    """An array, and what was in it. until: by when it may change, for the report"""

    def __init__(self, name: str, array: np.ndarray, rank: int, reader: str, until: str):
        self._name, self._array, self._rank, self._reader, self._until = name, array, rank, reader, until
        self._before = array.copy()

    def check(self) -> None:
        """Raises: DataRace if something else is there now"""
        before, now = (np.ascontiguousarray(each).view(np.uint8).reshape(-1) for each in (self._before, self._array))
        changed = (before != now).nonzero()[0]
        if changed.size == 0:
            return
        at = np.unravel_index(int(changed[0]) // self._array.itemsize, self._array.shape)
        where = f"{self._name}[{', '.join(map(str, at))}]"
        raise DataRace(
            f"{self._name} of rank {self._rank} has changed while {self._reader} reads it: {where} was "
            f"{self._before[at]} when the host launched that, and is {self._array[at]} now; change it {self._until}"
        )
