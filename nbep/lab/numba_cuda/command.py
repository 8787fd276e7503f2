"""`nbep run script.py`: a program for numba.cuda, without a GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nbep.emulator import EmulatorError
from nbep.host.spawn import ENGINES, engine_for


def parser_of_run() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nbep run",
        description="Run a program for numba.cuda on the emulator: its numba.cuda is nbep's. `nbep check` looks for "
        "races under many schedules; this runs one.",
    )
    parser.add_argument("--memory-model", choices=("sc", "checked", "delayed"), default="checked", metavar="NAME",
                        help="checked (which reports races), sc (faster) or delayed (stores come late)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the schedule (0)")
    parser.add_argument("--strategy", default="uniform", metavar="NAME", help="how schedules are chosen (uniform)")
    parser.add_argument("--num-sms", type=int, metavar="N", help="blocks that run at once (as many as an H100 holds)")
    parser.add_argument(
        "--max-calls", type=int, metavar="N", help="loads, stores, barriers until it ends with a report"
    )
    parser.add_argument(
        "--engine", choices=ENGINES, help="what runs kernels: Python, machine code, or the faster (auto)"
    )
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is passed")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit status: 0, or 1 after a report; an error of the program itself ends as with `python`.

    Args:     argv without the program's name; None takes sys.argv
    Raises:   SystemExit as argparse does, and as the program does
    """
    parser = parser_of_run()
    options = parser.parse_args(argv)
    if not options.script.is_file():
        parser.error(f"{options.script}: there is no such file")
    from . import script, session
    from .code import KernelTypeError

    given = {name: getattr(options, name) for name in session.OPTIONS if hasattr(options, name)}
    try:
        engine_for(options.engine, options.memory_model, options.strategy, None)
    except ValueError as error:
        parser.error(str(error))
    try:
        with session.options(**given), script.shown():
            script.run(options.script, options.arguments)
    except (EmulatorError, KernelTypeError) as error:
        session.tell(error)
        return 1
    return 0
