"""What every benchmark begins with: its options, what it needs, and the ranks that it runs on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import nbep
from nbep.device.terminal import add_json
from nbep.host.target.memory import HandleType
from nbep.host.target.resolve import why_no_gpu

UNUSABLE = 2  # the exit code where a benchmark cannot run
WRONG = 1  # and where a result is wrong


def positive(text: str) -> int:
    """A number for argparse that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def numbers(text: str) -> list[int]:
    """Numbers for argparse, with commas between, each at least 1."""
    return [positive(part) for part in text.split(",")]


def some_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of these names for argparse, with commas between."""

    def chosen(text: str) -> list[str]:
        parts = [part.strip() for part in text.split(",")]
        unknown = [part for part in parts if part not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; allowed: {', '.join(allowed)}")
        return parts

    return chosen


# Options that several benchmarks have.
OPTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"type": positive, "default": 4096},
    "hidden": {"type": positive, "default": 7168},
    "topk": {"type": positive, "default": 8},
    "experts": {"type": positive, "default": 256},
    "threads": {"type": positive, "help": "threads a block"},
    "repeat": {"type": positive, "default": 30, "help": "timed calls of each kind"},
    "handle-type": {"default": "ipc", "choices": get_args(HandleType), "help": "as in nbep.Buffer"},
    "ranks": {"type": int, "choices": (2, 4, 8), "default": 2, "help": "virtual ranks, when not under mpirun"},
    "plot": {"type": Path},
}


class Parser(argparse.ArgumentParser):
    """The options of a benchmark; doc is its module's, whose first line says what it measures."""

    def __init__(self, name: str, doc: str | None):
        super().__init__(prog=f"nbep bench {name}", description=(doc or "").partition("\n")[0])

    def add(self, *names: str, **changes: Any) -> None:
        """Some of OPTIONS, or json. changes: what is other than there"""
        for name in names:
            if name == "json":
                add_json(self)
            else:
                self.add_argument(f"--{name}", **OPTIONS[name] | changes)

    def add_ranks(self, most: int) -> None:
        """The option --ranks, from 2 on."""
        self.add("ranks", choices=range(2, most + 1), metavar=f"2..{most}")

    def add_works(self, works: Sequence[str]) -> None:
        self.add_argument("--works", type=some_of(works), default=list(works), help=f"some of: {', '.join(works)}")


def can_run(name: str, with_torch: bool) -> bool:
    """Whether there is what a benchmark on GPUs needs; says in one line what is missing."""
    missing = _missing(with_torch)
    if missing is not None:
        print(f"nbep bench {name} {missing}", file=sys.stderr)
    return missing is None


def _missing(with_torch: bool) -> str | None:
    reason = why_no_gpu()
    if reason is not None:
        return f"needs a GPU: {reason}"
    if with_torch:
        try:
            import torch
        except ImportError:
            return "needs torch: pip install torch"
        if not torch.cuda.is_available():
            return f"needs a torch with CUDA: this is {torch.__version__}"
    return None


def mpi_world() -> Any:
    """MPI.COMM_WORLD under mpirun with more than one rank, else None."""
    try:
        from mpi4py import MPI
    except ImportError:
        return None
    return MPI.COMM_WORLD if MPI.COMM_WORLD.size > 1 else None


def run(
    name: str,
    options: argparse.Namespace,
    measure_rank: Callable[[Any, argparse.Namespace], bool | None],
    fill_in: Callable[[argparse.Namespace, Any], str | None] = lambda *_: None,
    with_torch: bool = True,
) -> int:
    """Measure on this rank under mpirun, else on virtual ranks of one card; the exit code.

    Args: measure_rank(comm, options): returns False if a result was wrong
          fill_in(options, comm): sets options that depend on the ranks, and says what cannot be measured. comm is None
          for virtual ranks, whose number is then options.ranks
    """
    if not can_run(name, with_torch):
        return UNUSABLE
    comm = mpi_world()
    problem = fill_in(options, comm)
    if problem is not None:
        print(f"nbep bench {name}: {problem}", file=sys.stderr)
        return UNUSABLE
    if comm is None:
        results = nbep.spawn(measure_rank, options.ranks, "cuda", (options,))
    else:
        results = [measure_rank(comm, options)]
    return WRONG if any(right is False for right in results) else 0
