"""One puzzle: a kernel with holes, how it is launched, what it must give, and what to say when it does not.

    PUZZLE = Puzzle(kernel=flag, holes=("send", "receive"), outputs=..., inputs=..., answer=..., advice=...)

A file of the folder puzzles/ defines one. `check` runs it, `command` is what the user types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from nbep.device.jit import device_function
from nbep.host.shared_memory import SharedMemory
from nbep.host.spawn import spawn

Arrays = tuple[np.ndarray, ...]
LONGEST_WAIT_MS = 2000  # on a GPU; the emulator says at once that no thread can go on


@dataclass(frozen=True)
class Clue:
    """What is known of a run that was not right.

    kind      "wrong result", "race", "deadlock", "divergence", "memory", or "error"
    report    what the emulator said, without machine paths; "" for a wrong result
    rank, name, got, expected   of a wrong result: whose output, which one, and what is in it
    """

    puzzle: Puzzle
    kind: str
    report: str = ""
    rank: int = -1
    name: str = ""
    got: Any = None
    expected: Any = None

    def calls(self, *prefixes: str, where: str = "") -> bool:
        """Whether the code in the holes, or in one of them, calls a function whose name begins so."""
        return self.puzzle.calls(*prefixes, where=where)

    @property
    def seen(self) -> int | None:
        """Of a deadlock: what the first wait in the report sees in its cell."""
        found = re.search(r"sees (-?\d+)", self.report)
        return None if found is None else int(found[1])

    def about(self, cell: str) -> bool:
        """Whether the report is about a cell, by its name."""
        return cell in self.report


@dataclass(frozen=True)
class Puzzle:
    """Attributes:

    kernel      takes outputs, then inputs, then `peers`, `bounds`, then sizes
    holes       names of the functions of its module that are to be filled in
    outputs     outputs(rank): the arrays as they are before the launch
    inputs      inputs(rank): what the kernel reads
    answer      answer(rank): what the outputs must be; plain NumPy
    sizes       the last arguments of the kernel, the same on all ranks
    cells       names of what lies in the symmetric memory, by its first byte
    num_bytes   of the symmetric memory of each rank, which is 0 before the launch
    addresses   parameters of the holes that are addresses, and what is loaded and stored there: {"data": "weak_s32"}
    shows       the cell that the picture is about; "": which threads read and write which elements
    ring        cells of a ring with `num_slots` slots, whose picture has them: ("tail", "head"); rank 0 sends
    advice      advice(clue): a sentence or two for a reader who is stuck there
    learned     what a reader who has solved it knows
    others      what other solutions do differently
    remark      remark(puzzle): what could be better in a solution that is right
    runs        how many seeds under each memory model
    few         how many rows, calls or the like every schedule is run with, in place of the last size, and what they
                are called: (5, "rows"); the outputs' first axis has one for each. None: as many as with seeds
    has_too_many_schedules  so that only seeds are run
    """

    kernel: Callable
    holes: tuple[str, ...]
    outputs: Callable[[int], Arrays]
    answer: Callable[[int], Arrays]
    inputs: Callable[[int], Arrays] = lambda rank: ()
    num_ranks: int = 2
    grid: int = 1
    block: int = 32
    smem_bytes: int = 0
    sizes: tuple[int, ...] = ()
    cells: Mapping[str, int] = field(default_factory=dict)
    num_bytes: int = 1024
    addresses: Mapping[str, str] = field(default_factory=dict)
    shows: str = ""
    ring: tuple[str, ...] = ()
    num_slots: int = 0
    advice: Callable[[Clue], str] = lambda clue: ""
    learned: str = ""
    others: str = ""
    remark: Callable[[Puzzle], str] = lambda puzzle: ""
    runs: int = 8
    few: tuple[int, str] | None = None
    has_too_many_schedules: bool = False

    @property
    def scope(self) -> dict[str, Any]:
        """The globals of the puzzle's module."""
        return self.kernel.__globals__

    @property
    def text(self) -> str:
        """The module's docstring: the picture, the ledger, what there is to know."""
        return str(self.scope["__doc__"])

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def parameter_names(self) -> list[str]:
        return list(self.kernel.__annotations__)

    @property
    def output_names(self) -> list[str]:
        return self.parameter_names[: len(self.outputs(0))]

    def unfilled(self) -> list[str]:
        """The holes that still call `hole`."""
        return [name for name in self.holes if "hole" in _names(self.scope[name].__code__)]

    def missing(self) -> list[str]:
        """The holes whose function is not in the file any more."""
        return [name for name in self.holes if not isinstance(self.scope.get(name), FunctionType)]

    def calls(self, *prefixes: str, where: str = "") -> bool:
        """Whether the code in the holes, or in one of them, calls a function whose name begins so."""
        return any(name.startswith(prefixes) for name in self.called_names((where,) if where else self.holes))

    def called_names(self, holes: Sequence[str]) -> set[str]:
        """What the code in the holes calls, and what helpers of the same module call that it calls."""
        found: set[str] = set()
        waiting: list[Any] = [self.scope[name] for name in holes]
        while waiting:
            function = waiting.pop()
            names = _names(function.__code__) - found
            found |= names
            near = [function.__globals__.get(name) for name in names]
            waiting += [
                other for other in near if isinstance(other, FunctionType) and other.__module__ == function.__module__
            ]
        return found

    def made_smaller(self) -> Puzzle:
        """The same with few rows; what lies behind them in the outputs stays as it was."""
        if self.few is None:
            return self
        few, _ = self.few

        def answer(rank: int) -> Arrays:
            pairs = zip(self.answer(rank), self.outputs(rank), strict=True)
            return tuple(np.concatenate((after[:few], before[few:])) for after, before in pairs)

        return replace(self, sizes=(*self.sizes[:-1], few), answer=answer)

    @contextmanager
    def filled(self, functions: Mapping[str, Callable]) -> Iterator[None]:
        """With other functions in the place of the holes."""
        if missing := set(self.holes) - set(functions):
            raise ValueError(f"functions: got {', '.join(functions)}; must have {', '.join(sorted(missing))} too")
        before = {name: self.scope[name] for name in self.holes}
        self.scope.update({name: functions[name] for name in self.holes})
        try:
            yield
        finally:
            self.scope.update(before)

    def run(self, target: str = "emulator", rounds: int = 1, **options: Any) -> list[list[Arrays]]:
        """Run it so often, each time with new memory: for each round the outputs of every rank.

        A GPU compiles the kernel once for all rounds.

        Args:
            options: seed, memory_model, strategy, tracer of nbep.spawn
        """
        by_rank = spawn(self._main, self.num_ranks, target, (rounds,), **options)
        return [list(results) for results in zip(*by_rank, strict=True)]

    def _main(self, comm: Any, rounds: int) -> list[Arrays]:
        return [self._round(comm) for _ in range(rounds)]

    def _round(self, comm: Any) -> Arrays:
        memory = SharedMemory.create(comm, self.num_bytes, timeout_ms=LONGEST_WAIT_MS, cells=self.cells)
        outputs = [to_target(memory.runtime, array) for array in self.outputs(comm.rank)]
        inputs = [to_target(memory.runtime, array) for array in self.inputs(comm.rank)]
        memory.runtime.load(self.kernel)
        comm.barrier()  # memory and code come first: a GPU on which kernels wait may not hand out any
        memory.comm_stream.wait_current_stream()
        arguments = (*outputs, *inputs, memory.peers, memory.bounds, *self.sizes)
        memory.runtime.launch(memory.comm_stream, self.kernel, self.grid, self.block, self.smem_bytes, *arguments)
        memory.wait()
        results = tuple(to_numpy(array) for array in outputs)
        memory.close()
        return results

    def first_difference(self, results: Sequence[Arrays]) -> Clue | None:
        """The first output that is not what it must be."""
        for rank, got_arrays in enumerate(results):
            expected_arrays = self.answer(rank)
            for name, got, expected in zip(self.output_names, got_arrays, expected_arrays, strict=True):
                if not np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"):
                    return Clue(self, "wrong result", rank=rank, name=name, got=got, expected=expected)
        return None


def to_target(runtime: Any, values: np.ndarray) -> Any:
    """The emulator takes NumPy's arrays, and writes into them. A GPU takes torch's."""
    if runtime.target == "emulator":
        return values.copy()
    import torch

    return torch.from_numpy(values.copy()).cuda()


def to_numpy(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.cpu().numpy()


def _names(code: CodeType) -> set[str]:
    return set(code.co_names)


# --- What the kernels of puzzles call beside nbep.lang: a hole --------------------------------------------------------


@device_function
def hole():
    """Marks where code is missing. The check looks for it and runs nothing as long as it stands there."""
