"""Runs a script whose `numba.cuda` is the emulator's."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import session
from .installing import install


def run(path: Path, arguments: Sequence[str] = ()) -> None:
    """Run it as `python path arguments` does, and then what it has not waited for."""
    install()
    before = sys.argv[:], sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
        session.finish()
    finally:
        sys.argv[:], sys.path[:] = before


def explore(
    path: Path,
    seed: int,
    memory_model: str,
    strategy: Any,
    on_failure: Callable[[BaseException], object] | None,
    seen: Any,
    tracer: Any = None,
) -> None:
    """Run it under one schedule. What it prints goes nowhere. seen: takes note of the world; tracer: sees the run"""
    output = sys.stdout

    def loud(error: BaseException) -> None:
        if on_failure is not None:
            with contextlib.redirect_stdout(output):
                on_failure(error)

    given = {
        "seed": seed,
        "memory_model": memory_model,
        "strategy": strategy,
        "tracer": tracer,
        "on_failure": loud if on_failure else None,
    }
    try:
        with session.options(**given), quiet():
            run(path)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"the script ends with exit status {end.code}") from None
    finally:
        seen.world = session.latest_world()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def short(text: str) -> str:
    """A report without the folder in which the program runs."""
    return text.replace(f"{os.getcwd()}{os.sep}", "")  # noqa: PTH109
