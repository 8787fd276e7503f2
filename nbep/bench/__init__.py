"""Benchmarks: `nbep bench <name>` runs `nbep.bench.<name>.main(argv)`."""

from __future__ import annotations

import argparse
import sys

from nbep.host.targets import why_no_gpu

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


def positive(text: str) -> int:
    """A number for argparse that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
