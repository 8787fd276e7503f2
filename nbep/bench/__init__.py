"""Benchmarks: `nbep bench <name>` runs `nbep.bench.<name>.main(argv)`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import nbep
from nbep.host.target.resolve import why_no_gpu

UNUSABLE = 2  # the exit code where a benchmark cannot run


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


def on_ranks(comm: Any, num_ranks: int, measure: Callable[..., Any], options: argparse.Namespace) -> list[Any]:
    """What measure(comm, options) returns: on this rank under mpirun, else on virtual ranks of one card."""
    return nbep.spawn(measure, num_ranks, "cuda", (options,)) if comm is None else [measure(comm, options)]


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


def add_ranks(parser: argparse.ArgumentParser, most: int) -> None:
    """The argument --ranks, from 2 on."""
    text = "virtual ranks, when not under mpirun"
    parser.add_argument("--ranks", type=int, choices=range(2, most + 1), default=2, metavar=f"2..{most}", help=text)
