"""The options of `nbep check`. Those of a scenario are its parameters."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from nbep.check.runs import MODELS, SEARCHED, STRATEGIES, option_of
from nbep.check.scenario import Scenario
from nbep.device.terminal import add_json

EXAMPLES = """\
examples:
  nbep check --list                                      the scenarios
  nbep check intranode.combine                           200 seeds of one
  nbep check my_kernel.py --ranks 4 --seeds 50           a file with main(comm)
  nbep check kernels.py --seeds 50                       a script that uses numba.cuda, as it is
  nbep check kernels.py --seed 3 --trace run.html        what one run did, step by step, as a page
  nbep check my_kernel.py --all                          every schedule of a small program
  nbep check intranode.dispatch --list-faults            what can be broken there
  nbep check intranode.dispatch --fault NAME             break it, and see it found
  nbep check --faults intranode.dispatch                 break each in turn: what finds it
"""


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; must be an integer of at least 1")
    return int(text)


def parser_of_check() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbep check",
        description="Run a scenario under many schedules and memory models, and keep the smallest run that fails.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a name, or a file with main(comm)")
    parser.add_argument("--list", action="store_true", help="list the scenarios and their options")
    parser.add_argument("--all", action="store_true", help="every schedule of a small program, each once")
    parser.add_argument("--weak", action="store_true", help="with --all: late stores and early loads are choices, too")
    parser.add_argument("--limit", type=positive, metavar="N", help="with --all: runs at most (100000)")
    parser.add_argument("--minutes", type=float, metavar="M", help="with --all: time at most (10)")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="run again what --all has found")
    parser.add_argument("--seeds", type=positive, metavar="N", help="how many (200; with --faults 12)")
    parser.add_argument("--seed", type=int, metavar="S", help="this one alone, with --strategy and --memory-model")
    parser.add_argument("--strategy", metavar="NAME", help=f"one of {', '.join(STRATEGIES)}; else in turn")
    parser.add_argument(
        "--memory-model",
        choices=MODELS,
        metavar="NAME",
        help=f"one of {', '.join(MODELS)}; else {' and '.join(SEARCHED)}, and so sc: checked takes the same steps",
    )
    parser.add_argument("--jobs", type=positive, default=default_jobs(), metavar="N", help="processes (one a CPU)")
    parser.add_argument("--no-shrink", action="store_true", help="show the first run that fails, not the smallest")
    parser.add_argument("--pdb", action="store_true", help="with --seed: stop in the debugger at the step that fails")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="with --seed: write it as .html or Perfetto's .json")
    parser.add_argument("--fault", action="append", default=[], metavar="NAME", help="break a step; may be repeated")
    parser.add_argument("--list-faults", action="store_true", help="list the faults of SCENARIO's kernels, or of all")
    add_json(parser)
    parser.add_argument(
        "--faults",
        nargs="?",
        const="",
        metavar="KERNEL",
        help="break each step of a kernel, of a folder of them, or of a file's; print what finds it",
    )
    return parser


def default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def parameters_of(
    parser: argparse.ArgumentParser, scenario: Scenario, rest: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    """The parameters of a scenario that the command line changes; others are refused by the parser."""
    own = argparse.ArgumentParser(prog=f"nbep check {scenario.name}", add_help=False, usage=argparse.SUPPRESS)
    for name in scenario.parameters:
        own.add_argument(option_of(name), type=int, dest=name, default=None)
    values, unknown = own.parse_known_args(rest)
    if unknown:
        allowed = " ".join(map(option_of, scenario.parameters))
        parser.error(f"unknown: {' '.join(unknown)}; {scenario.name} takes {allowed}")
    if values.ranks is not None and values.ranks < 1:
        parser.error(f"--ranks: got {values.ranks}; must be at least 1")
    given = {name: getattr(values, name) for name in scenario.parameters}
    return tuple((name, value) for name, value in given.items() if value not in (None, scenario.parameters[name]))
