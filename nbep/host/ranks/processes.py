"""Which processes the ranks are, so that a rank that waits in vain can tell whether its peers still run.

 rank 0: 4711 --+                          rank 1 waits too long for rank 0, and looks:
                +--> every rank knows all      process 4711 is gone     "rank 0 has ended"
 rank 1: 4712 --+                              it does nothing          "rank 0 is stopped"

A rank waits for many, and the one that it names is the first that it misses: that one may itself wait for the process
that was killed. Linux tells of processes of the same host; of others nothing is said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nbep.host.ranks.timeouts import join_ranks

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
