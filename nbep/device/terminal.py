"""What the commands share: the option --json, in one form for all, and progress for a person who waits.

    nbep demo --json                  the standard output has one JSON value, and nothing else
    nbep demo --json checks.json      the value is written there; the tables are printed as without it

Progress goes to the error stream, and only where that is a terminal.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

STDOUT = Path("-")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option --json; its value is None, STDOUT, or a file."""
    text = "print one JSON value instead of tables; or write it to FILE.json, beside them"
    parser.add_argument("--json", nargs="?", const=STDOUT, type=_json_file, metavar="FILE.json", help=text)


def _json_file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json":  # so that no argument of the command is taken for it, and overwritten
        raise argparse.ArgumentTypeError(f"got {text!r}; must be a file that ends in .json, or be left out")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"got {text!r}; must be in a folder that exists")
    return path


def write_json(chosen: Path | None, value: Any, is_last: bool = True) -> None:
    """Print or write the value, as --json says. A file may be written again and again; only the last is printed."""
    if chosen is not None and (is_last or chosen != STDOUT):
        text = json.dumps(value, indent=1) + "\n"
        if chosen == STDOUT:
            sys.stdout.write(text)
        else:
            chosen.write_text(text)


def console_for(chosen: Path | None, **options: Any) -> Any:
    """A rich Console for tables: with --json alone on the error stream, if that is a terminal."""
    from rich.console import Console

    alone = chosen == STDOUT
    return Console(stderr=alone, quiet=alone and not sys.stderr.isatty(), **options)


@contextmanager
def progress(description: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar, gone when it is done. It gives a function: advance(), or advance(completed=n, description="...").

    Inside another one, and in the processes of a search, it shows nothing.
    """
    global _is_shown
    if _is_shown or parent_process() is not None or not sys.stderr.isatty():
        yield lambda **_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # What is printed meanwhile goes above the bar, unless it is not for the terminal.
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task(description, total=total)

        def advance(**changes: Any) -> None:
            bar.update(task, **(changes or {"advance": 1}))

        _is_shown = True
        try:
            yield advance
        finally:
            _is_shown = False


_is_shown = False
