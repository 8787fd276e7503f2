"""How long one rank waits for another, what it raises then, and whether its peers still run.

 rank 0: 4711 --+                          rank 1 waits too long for rank 0, and looks:
                +--> every rank knows all      process 4711 is gone     "rank 0 has ended"
 rank 1: 4712 --+                              it does nothing          "rank 0 is stopped"

A rank waits for many, and the one that it names is the first that it misses: that one may itself wait for the process
that was killed. Linux tells of processes of the same host; of others nothing is said.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from nbep.device.protocols.waits import FaultReport
from nbep.host.arguments import refuse

DEFAULT_TIMEOUT_MS = 100_000.0  # DeepEP's 100 s
MAX_TIMEOUT_MS = 1e12  # 31 years: a GPU's clock, plus that in nanoseconds, fits into int64
MISSED_MEETING = "construction"  # role of a PeerTimeout: a rank did not come to make, or to destroy, a Buffer

saved_calls: list[str] = []  # the command that runs on the emulator what nbep.debug.save_call has kept, if it has


class PeerTimeout(RuntimeError):
    """This rank waited too long for a peer. What the call left behind is right or NaN; the buffer is of no use now.

    Attributes:
        rank: who waited
        peer: for whom, or for whom first
        role: the waiting role, e.g. "dispatch receiver"; "destroy" if the CPU waited for peers to destroy theirs,
            "zero copy" if it waited for its NIC, "atomic" if the emulator waited to make one
        cell: the cell that a kernel polled, e.g. "tail"; None if the CPU waited
        report: the whole FaultReport of a kernel; None if the CPU waited
        gone: ranks whose processes have ended or are stopped, as far as this host can tell
    """

    gone: tuple[int, ...] = ()

    def __init__(
        self, message: str, rank: int, peer: int, role: str, cell: str | None = None, report: FaultReport | None = None
    ):
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.role = role
        self.cell = cell
        self.report = report


def timeout_ns() -> int:
    """Longest time that a wait inside a kernel may take, as the environment says; a wrong one is refused elsewhere."""
    try:
        milliseconds = float(os.environ.get("NBEP_TIMEOUT_MS", DEFAULT_TIMEOUT_MS))
    except ValueError:
        milliseconds = DEFAULT_TIMEOUT_MS
    return int(1e6 * max(milliseconds, 1.0)) if milliseconds < MAX_TIMEOUT_MS else int(1e6 * MAX_TIMEOUT_MS)


def chosen_timeout_ms(name: str = "", seconds: Any = DEFAULT_TIMEOUT_MS / 1000) -> float:
    """The same for a new buffer: as the environment says, or else its argument of that name."""
    text = os.environ.get("NBEP_TIMEOUT_MS")
    return 1000 * timeout_ms(name, seconds) if text is None else timeout_ms("NBEP_TIMEOUT_MS", text)


def join_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", or "ranks 1, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def timeout_ms(name: str, value: Any) -> float:
    """The value, a number or what spells one, as a float."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number <= MAX_TIMEOUT_MS:
        refuse(name, repr(value), f"a positive number of milliseconds, at most {MAX_TIMEOUT_MS:g}")
    return number


# --- What is to be given back together with the other ranks, and what happens if one of them does not come to


class Undo(ExitStack):
    """An ExitStack that ends at a PeerTimeout: what is left stays as it is.

    The rank that is missing may use the memory still, and the steps that are left would wait for it too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_over = False

    def callback(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return super().callback(self._call, call, *args, **kwargs)

    def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._is_over:
            return
        try:
            call(*args, **kwargs)
        except PeerTimeout:
            self._is_over = True
            raise

    def __exit__(self, *error: Any) -> bool | None:
        self._is_over = self._is_over or isinstance(error[1], PeerTimeout)
        return super().__exit__(*error)


# --- Which processes the ranks are


PROC = Path("/proc")
STATE, STARTED = 0, 19  # fields of a process's file `stat`, behind its name
ENDED, STOPPED = "XZ", "Tt"


class Process(NamedTuple):
    """A process. host: where its number means something; started: when, as numbers are used again."""

    host: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> Process:
        try:
            boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
            namespace = str((PROC / "self/ns/pid").readlink())
        except OSError:  # nothing is said of it
            return cls("", os.getpid(), "")
        return cls(f"{boot} {namespace}", os.getpid(), _status(os.getpid())[STARTED])

    @property
    def state(self) -> str:
        """One of Linux's letters; X if the process is no more."""
        try:
            status = _status(self.pid)
        except OSError:
            return ENDED[0]
        return status[STATE] if status[STARTED] == self.started else ENDED[0]


def _status(pid: int) -> list[str]:
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


class Gone(NamedTuple):
    """The ranks whose processes have ended, and those whose processes are stopped.

    hosts: of all ranks, if they are on several
    """

    ended: list[int]
    stopped: list[int]
    hosts: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ended or self.stopped)

    def __str__(self) -> str:
        said = []
        for ranks, singular, plural in ((self.ended, "has", "have"), (self.stopped, "is", "are")):
            if ranks:
                verb = singular if len(ranks) == 1 else plural
                said.append(f"{join_ranks(ranks)} {verb} {'ended' if ranks is self.ended else 'stopped'}")
        return "; ".join(said)


NONE_GONE = Gone([], [])


def who_is_gone(processes: Sequence[Process]) -> Gone:
    """Which of the ranks do nothing any more; processes: by rank, one of them this."""
    here = Process.own().host
    states = [process.state if here and process.host == here else "" for process in processes]
    ended, stopped = (
        [rank for rank, state in enumerate(states) if state and state in kind] for kind in (ENDED, STOPPED)
    )
    return Gone(ended, stopped)
