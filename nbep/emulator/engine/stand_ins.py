"""What stands for the scheduler's generator and lists, whose state lies in tables."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from ..schedule.scheduler import Host
from .build import Library
from .state import AT, GENERATOR_WORDS, Tables


class SharedRandom(random.Random):
    """Python's generator, whose state compiled code shares. early: `Run.early`, not that of the scheduler"""

    def __init__(self, tables: Tables, machine: Library, state_of: tuple[Any, ...], early: bool = False):
        super().__init__(0)
        tables.generator[early * GENERATOR_WORDS :][:GENERATOR_WORDS] = state_of[1]
        self._uniform = partial(machine.function("nbep_uniform", ctypes.c_double, ctypes.c_int64), early)
        self._word = partial(machine.function("nbep_random_word", ctypes.c_int64, ctypes.c_int64), early)
        self._use = tables.use

    def random(self) -> float:
        self._use()
        return self._uniform()

    def getrandbits(self, k: int) -> int:
        self._use()
        if k > 32:
            raise NotImplementedError(f"k: {k}; at most 32")
        return self._word() >> (32 - k)


class Waiting:
    """Stands for a list of threads and hosts that can run; those that Python sees are hosts."""

    def __init__(self, tables: Tables, rows: np.ndarray, count: str, number_of: Callable[[Host], int]):
        self._words, self._rows, self._count = tables.words, rows, AT[count]
        self._number_of = number_of

    def __len__(self) -> int:
        return self._words[self._count]

    def append(self, host: Host) -> None:
        self._rows[len(self)] = self._number_of(host)
        self._words[self._count] += 1

    def extend(self, hosts: Iterable[Host]) -> Waiting:
        for host in hosts:
            self.append(host)
        return self

    __iadd__ = extend

    def clear(self) -> None:
        self._words[self._count] = 0


class Operations:
    """Stands for the list of operations under way; those that Python sees are Python's."""

    def __init__(self, tables: Tables):
        self._tables = tables
        self._calls: dict[int, Callable[[], object]] = {}
        self._latest = 0

    def __len__(self) -> int:
        return self._tables.words[AT["num_operations"]]

    def append(self, operation: Callable[[], object]) -> None:
        self._latest -= 1
        self._calls[self._latest] = operation
        self._tables.operations[len(self)] = self._latest
        self._tables.run["num_operations"] += 1

    def take(self, number: int) -> Callable[[], object]:
        return self._calls.pop(number)

    def calls(self) -> list[Callable[[], object]]:
        return [self._calls[int(number)] for number in self._tables.operations[: len(self)]]

    def extend(self, operations: Iterable[Callable[[], object]]) -> None:
        for operation in operations:
            self.append(operation)

    def clear(self) -> None:
        self._calls.clear()
        self._tables.run["num_operations"] = 0
