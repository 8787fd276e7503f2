"""Runs a script whose `numba.cuda` is the emulator's, and says on stderr how far kernels are that take long."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nbep.emulator import EmulatorError
from nbep.emulator.machine.source import kernel_frame

from . import session
from .installing import install
from .reports import describe, kernel_name, line


def run(path: Path, arguments: Sequence[str] = ()) -> None:
    """Run it as `python path arguments` does, and what it has not waited for, however it ends."""
    install()
    before = sys.argv[:], sys.path[:]
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with session.finishing(forgives=False), _ending(path.resolve().parent):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv[:], sys.path[:] = before


class _AtOnce(SystemExit):
    """What os._exit raises in a script."""


@contextlib.contextmanager
def _ending(folder: Path) -> Iterator[None]:
    """Do at a program's end what Python does at the end of a process: wait for threads, call functions of atexit.

    Only those that files of its folder register: others may be needed by this process.
    """
    process, threads = os.getpid(), set(threading.enumerate())
    plain = atexit.register, atexit.unregister, os._exit
    handlers: list[tuple[Callable[..., Any], Any, Any]] = []

    def register(function: Callable[..., Any], *args: Any, **named: Any) -> Callable[..., Any]:
        file = Path(sys._getframe(1).f_code.co_filename).resolve()
        if "site-packages" in file.parts or not file.is_relative_to(folder):
            return plain[0](function, *args, **named)
        handlers.append((function, args, named))
        return function

    def unregister(function: Callable[..., Any]) -> None:
        handlers[:] = [one for one in handlers if one[0] != function]
        plain[1](function)

    def leave(status: int) -> None:
        if os.getpid() != process:
            plain[2](status)
        raise _AtOnce(status)

    def finish() -> None:
        for thread in set(threading.enumerate()) - threads:
            if not thread.daemon:
                thread.join()
        while handlers:
            function, args, named = handlers.pop()
            try:
                function(*args, **named)
            except (EmulatorError, KeyboardInterrupt):
                raise
            except BaseException:
                traceback.print_exc()

    atexit.register, atexit.unregister, os._exit = register, unregister, leave  # type: ignore[assignment]
    try:
        yield
    except (KeyboardInterrupt, EmulatorError, _AtOnce):
        raise
    except BaseException:
        finish()
        raise
    else:
        finish()
    finally:
        atexit.register, atexit.unregister, os._exit = plain


def explore(path: Path, seen: Any, on_failure: Callable[[BaseException], object] | None, **options: Any) -> None:
    """Run it under one schedule. What it prints goes nowhere. seen: takes note of the world; options: the session's"""
    output = sys.stdout

    def loud(error: BaseException) -> None:
        if on_failure is not None:
            with contextlib.redirect_stdout(output):
                on_failure(error)

    options["on_failure"] = loud if on_failure else None
    try:
        with session.options(**options), contextlib.redirect_stdout(io.StringIO()):
            run(path)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"the script ends with exit status {end.code}") from None
    finally:
        seen.world = session.latest_world()


# --- how far it is: from a thread of its own, of which the run itself notices nothing ---------------------------------
FIRST_S = 5.0  # until the first word, then twice as long each time


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Meanwhile say how far kernels are."""
    over = threading.Event()
    threading.Thread(target=_tell, args=(over, threading.get_ident()), daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _tell(over: threading.Event, runs_in: int) -> None:
    began, wait = time.monotonic(), FIRST_S
    while not over.wait(wait):
        wait = time.monotonic() - began
        with contextlib.suppress(Exception):  # the run goes on meanwhile: what is looked at may be gone
            for text in how_far(wait, sys._current_frames().get(runs_in)):
                print(f"nbep: after {wait:.3g} s: {text}", file=sys.stderr, flush=True)


def how_far(seconds: float, frame: Any) -> Iterator[str]:
    """A line for each kernel under way. frame: where the thread of Python is that runs it"""
    world = session.latest_world()  # without the lock, which the thread that runs kernels has
    for launch in [] if world is None else list(world.launches):
        left = launch.grid - launch.live
        waiting = launch.grid - len(launch.blocks)
        text = f"{kernel_name(launch.name, launch.number)}: {left} of {launch.grid} blocks have left"
        text += f", {waiting} wait for an SM" if waiting else ""
        if left:
            more = seconds * launch.live / left
            text += f"; at this pace it takes {f'{more:.0f} s' if more < 7200 else f'{more / 3600:.0f} hours'} more"
        here, current = kernel_frame(frame), world.current
        if here is not None and "_t" in here.f_code.co_varnames and current.block.launch is launch:
            text += f"; {describe(current)} is at {line((here.f_code, here.f_lasti))}"
        yield text
