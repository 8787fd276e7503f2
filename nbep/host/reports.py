"""What a kernel has reported: until the caller has got it, and as an exception.

kernel: a wait times out --report_fault--> FaultReport --KernelReport--> a call, an event, a hook, or close raises
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from nbep.device.network.ibgda.completion import IBGDA_ERROR
from nbep.device.protocols.waits import OF_NODE, SITES, FaultReport
from nbep.host.faults import NetworkError, noting, with_gone
from nbep.host.ranks.timeouts import NONE_GONE, Gone, PeerTimeout, saved_calls
from nbep.host.target.memory import HostWords

REPORT_WORDS = len(FaultReport._fields)


class KernelReport:
    """The first failure of a rank's kernels. Every call raises it, or at last the end of the memory, a SharedMemory."""

    def __init__(self, memory: Any, words: HostWords):
        self._memory = memory
        self._use(words)
        self._error: Exception | None = None
        self._is_raised = False

    def _use(self, words: HostWords) -> None:
        self._words = words
        self._poll = words.poller(0)  # each call asks it twice

    def is_there(self) -> bool:
        """Whether a kernel has reported something."""
        return self._poll() != 0

    def check(self) -> None:
        """Raise it, if there is one."""
        if self._error is not None or self._poll() != 0:
            self._read()
            assert self._error is not None
            self._is_raised = True
            # What is raised keeps the frames that it has passed, with their arrays: so a copy is.
            copied = type(self._error).__new__(type(self._error), *self._error.args)
            vars(copied).update(vars(self._error))
            if hasattr(self._error, "__notes__"):
                copied.__notes__ = list(self._error.__notes__)
            raise copied

    def warn(self) -> None:
        """Say it where nothing can be raised, unless a call has raised it."""
        if self.is_there() and not self._is_raised and not self._memory.runtime.is_failing:
            self._read()
            self._is_raised = True
            warnings.warn(f"no call has raised what a kernel reported: {self._error}", RuntimeWarning, stacklevel=3)

    def keep(self) -> None:
        """The memory is about to go: an event may still ask, and other memory tells more now."""
        with suppress(Exception):
            self._read()
        self._use(HostWords(self._words.read() if self.is_there() else np.zeros(REPORT_WORDS, np.int32)))

    @contextmanager
    def raised_at_last(self) -> Iterator[None]:
        """Around the end of the memory: raise what no call has raised, even if that end fails."""
        try:
            yield
        except Exception as error:
            self.keep()
            if self._error is None or self._is_raised:
                raise
            self._error.add_note(f"destroy failed, too: {error}")
        if not self._is_raised:
            self.check()

    def _read(self) -> None:
        if self._error is None and self.is_there():
            report = FaultReport(*(int(word) for word in self._words.read()))
            self._error = error_of(self._memory, report)


def error_of(memory: Any, report: FaultReport) -> Exception:
    """What a rank raises whose kernel has reported something."""
    if report.site in OF_NODE:  # they count the ranks of the node
        report = report._replace(peer=report.peer + memory.first_in_node)
    transport = memory.network_of_waits
    network = transport.describe(report.peer) if report.peer >= 0 else []
    if report.site == IBGDA_ERROR:  # its completion may be that of an entry which was flushed
        refused = transport.first_refused(report.peer, report.channel)
        report = report if refused is None else report._replace(expected=refused[0], seen=refused[1])
    gone = memory.who_is_gone()
    error = memory.cause_of(report) or wait_error(memory.rank, report, memory.timeout_ms, network, gone)
    if isinstance(error, PeerTimeout) and not memory.runtime.is_capturing:
        with suppress(RuntimeError):  # a GPU that has failed
            error = memory.known_cause(report) or error
    if isinstance(error, PeerTimeout):
        memory.add_reports(error)
        if saved_calls:
            error.add_note(f"the call that was saved last, on the emulator: {saved_calls[-1]}")
    return error


def wait_error(
    rank: int, report: FaultReport, timeout_ms: float, network: Sequence[str] = (), gone: Gone = NONE_GONE
) -> Exception:
    """The exception for a wait that timed out, or whose NIC has refused an entry.

    network: what is known of the network to the peer; gone: ranks that do nothing any more
    """
    if report.site == IBGDA_ERROR:
        return NetworkError(rank, report.peer, report.channel, report.expected, report.seen, network)
    role, cell, awaited = SITES.get(report.site) or ("kernel", f"a cell of site {report.site}", "it")
    where = f"block {report.block}, thread {report.thread}"
    if report.site not in OF_NODE:
        where += f", channel {report.channel}"
    message = (
        f"rank {rank}: the {role} ({where}) waited more than {timeout_ms:g} ms for rank {report.peer}: "
        f"{awaited}. It polled {cell}, expected {report.expected}, saw {report.seen}"
    )
    message = "\n  ".join((with_gone(message, gone), *network))
    return noting(PeerTimeout(message, rank, report.peer, role, cell, report), gone)
