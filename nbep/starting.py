"""Ctrl-C while the command `nbep` still imports what it needs: one line, as later on.

An import is no good place for an exception: some libraries make another one of it, and who waits sees a page of text.
Nothing has been started that would have to be undone.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C has ended
PIPE_CLOSED = 141  # and of one whose reader has gone, as `| head` does


def is_command() -> bool:
    """Whether this process is the command: `nbep`, or `python -m nbep`."""
    name = sys.argv[0] if sys.argv else ""
    return Path(name).name in ("nbep", "nbep.exe") or (name == "-m" and "nbep" in sys.orig_argv)


def end_at_interrupts() -> None:
    """Until let_raise: Ctrl-C ends the process. Where somebody else handles it, or ignores it, that stays so."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def let_raise() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(*_: object) -> NoReturn:
    os.write(2, b"nbep: interrupted\n")
    os._exit(INTERRUPTED)


end_at_interrupts()
