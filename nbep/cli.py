"""The `nbep` command: `nbep demo`, `nbep puzzle`, `nbep check`, `nbep bench <name>`, `nbep compile` ...

Each subcommand is a module with `main(argv) -> int | None`; it is imported only when it is asked for, so that
`nbep demo` does not load Numba.
"""

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from nbep import bench, starting
from nbep.device.extras import what_is_missing
from nbep.version import __version__

# The module of each benchmark. A package there holds parts of them. Names of commands have dashes.
BENCHMARKS = {
    module.name.replace("_", "-"): f"nbep.bench.{module.name}"
    for module in pkgutil.iter_modules(bench.__path__)
    if not module.ispkg
}
TOOLS = Path(bench.__file__).parents[2] / "tools"  # a checkout has more: those of nbep's own parts
BENCHMARKS |= {path.stem.removeprefix("bench_"): path.stem for path in sorted(TOOLS.glob("bench_*.py"))}

MODULES = {  # the others are called as they are
    "check": "nbep.lab.check",
    "puzzle": "nbep.lab.puzzle",
    "compile": "nbep.device.compile",
    "explain": "nbep.host.ranks.who_waits",
    "litmus": "nbep.lab.litmus.runs",
    "run": "nbep.lab.numba_cuda.command",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nbep", description="Expert-parallel dispatch and combine in Numba.")
    parser.add_argument("--version", action="version", version=f"nbep {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # add_help=False: `nbep demo --help` is answered by the subcommand's own parser.
    commands.add_parser("demo", add_help=False, help="run a small MoE layer on emulated ranks and check it")
    commands.add_parser("run", add_help=False, help="run a program for numba.cuda without a GPU")
    commands.add_parser("check", add_help=False, help="find races, deadlocks and wrong results")
    benchmarks = commands.add_parser("bench", help=f"measure or stress: {', '.join(BENCHMARKS)}")
    names = benchmarks.add_subparsers(dest="benchmark", required=True, metavar="NAME")
    for name in BENCHMARKS:
        names.add_parser(name, add_help=False, help=f"see `nbep bench {name} --help`")
    commands.add_parser("puzzle", add_help=False, help="list the puzzles of a checkout, or check one")
    commands.add_parser("litmus", add_help=False, help="compare the emulator's memory models with the axioms of PTX")
    commands.add_parser("compile", add_help=False, help="compile kernels to PTX and cubin; needs no GPU")
    commands.add_parser("explain", add_help=False, help="say who waits for whom, from time-out lines in a log")
    commands.add_parser("info", add_help=False, help="say what is here, and what would run on it")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Args:     argv without the program's name; None takes sys.argv
    Raises:   SystemExit as argparse does, for bad arguments and for --help
    """
    if sys.stdout is None:  # it is closed, and print does nothing
        return _run(argv)
    output = Output(sys.stdout)
    try:
        with redirect_stdout(output):
            try:
                return _run(argv)
            finally:
                output.flush()  # at the end of the process Python could only print a traceback
    except OutputLost as lost:
        output.discard()
        if isinstance(lost.error, BrokenPipeError):
            return starting.PIPE_CLOSED
        print(f"nbep: cannot write the output: {lost.error.strerror}", file=sys.stderr)
        return 1


def _run(argv: Sequence[str] | None) -> int:
    arguments, rest = _parser().parse_known_args(argv)
    try:
        command = import_module(module_of(arguments.command, getattr(arguments, "benchmark", "")))
        starting.let_raise()
        return command.main(rest) or 0
    except KeyboardInterrupt:
        print(f"nbep {arguments.command}: interrupted", file=sys.stderr)
        return starting.INTERRUPTED
    except ImportError as error:
        missing = what_is_missing(error)
        if missing is None:
            raise
        print(f"nbep {arguments.command}: {missing}", file=sys.stderr)
        return 1


def module_of(command: str, benchmark: str = "") -> str:
    """The module whose main runs a command."""
    if not benchmark:
        return MODULES.get(command, f"nbep.{command}")
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return BENCHMARKS[benchmark]


class OutputLost(Exception):
    """The output cannot be written; error says why."""

    def __init__(self, error: OSError):
        super().__init__(str(error))
        self.error = error


class Output:
    """The standard output, whose own failures cannot be confused with those of other files."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputLost(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputLost(error) from None

    def discard(self) -> None:
        """What is still to be written goes nowhere, also at the end of the process."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
