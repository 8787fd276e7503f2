"""Processes that a program starts by multiprocessing: they have the emulator, and what is found there counts.

One that starts anew unpickles what `multiprocessing.spawn` sends before it imports the program, and so finds the
emulator. Findings come back in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any

from nbep.emulator.machine import errors

_plain = spawn.get_preparation_data
_file: list[Path] = []  # where findings of children stand, or are to be written if this is one
_hears = 0  # how many `heard` are open
_is_child = False  # whose parent hears it


class _Emulator:
    def __reduce__(self) -> Any:
        from .session import OPTIONS

        options = {name: value for name, value in OPTIONS.items() if isinstance(value, (int, str))}
        _open()
        begin = f"begin({options!r}, {[str(one) for one in _file]!r})"
        return exec, (f"import sys\nsys.path[:] = {sys.path!r}\nfrom {__name__} import begin\n{begin}",)


def follow() -> None:
    """From now on children of this process have the emulator."""
    spawn.get_preparation_data = lambda name: {**_plain(name), "nbep": _Emulator()}


def leave_alone() -> None:
    """Undo `follow`."""
    spawn.get_preparation_data = _plain


def begin(options: dict[str, Any], file: list[str]) -> None:
    """In a new process, before anything else."""
    from . import installing, session

    session.OPTIONS.update(options)
    _file[:] = map(Path, file)
    _enter()
    installing.install()


def _enter() -> None:
    global _is_child
    from . import session

    _is_child = bool(_file)
    session.begin_child()
    util.register_after_fork(_Emulator, lambda _: util.Finalize(None, session.end, exitpriority=0))


def note(error: errors.EmulatorError) -> None:
    """A finding; in a child, for its parent."""
    if _is_child and _file:
        with _file[0].open("a") as file:
            file.write(json.dumps([type(error).__name__, str(error)]) + "\n")


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Children that start within may report."""
    global _hears
    _hears += 1
    try:
        yield
    finally:
        _hears -= 1
        if _file and not _hears and not _is_child:
            _file.pop().unlink()


def _open() -> None:
    """Have a file for a child that is about to start."""
    if _hears and not _file:
        number, name = tempfile.mkstemp(prefix="nbep-findings-")
        os.close(number)
        _file.append(Path(name))


def first() -> errors.EmulatorError | None:
    """What a child has found."""
    lines = _file[0].read_text().splitlines() if _file and not _is_child else []
    return getattr(errors, json.loads(lines[0])[0])(json.loads(lines[0])[1]) if lines else None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_open, after_in_child=_enter)
