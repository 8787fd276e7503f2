"""What a kernel has reported: until the caller has got it, and as an exception that names the cause.

 kernel: a wait times out --report_fault--> FaultReport --KernelReport--> a verb, an event, a hook, or destroy raises

A wait may have timed out because its peer has ended with an error: another rank has made another call. Then this rank
is told of that, with both values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from nbep.device.layout.intranode import CALL_BYTES, CALL_WORDS, MAX_NVL_PEERS, RELAYED_WORDS, TOLD
from nbep.device.protocols.calls import TOLD_WORDS
from nbep.device.protocols.waits import IBGDA_ERROR, OF_NODE, REPORT_WORDS, FaultReport
from nbep.host.calls import relayed_error
from nbep.host.faults import PeerTimeout, fault_error
from nbep.host.low_latency.calls import late_difference
from nbep.host.target.base import HostWords

if TYPE_CHECKING:
    from nbep.host.symmetric import NodeMemory


class KernelReport:
    """The first failure of a rank's kernels. Every call of the buffer raises it, or at last destroy."""

    def __init__(self, memory: NodeMemory, words: HostWords):
        self._memory = memory
        self._words = words
        self._error: Exception | None = None
        self._is_raised = False

    def is_there(self) -> bool:
        """Whether a kernel has reported something."""
        return self._words.poll_word(0) != 0

    def check(self) -> None:
        """Raise it, if there is one."""
        if self._error is not None or self._words.poll_word(0) != 0:
            self._read()
            assert self._error is not None
            self._is_raised = True
            raise self._error

    def warn(self) -> None:
        """Say it where nothing can be raised, unless a call has raised it."""
        if self.is_there() and not self._is_raised and not self._memory.runtime.is_failing:
            self._read()
            self._is_raised = True
            warnings.warn(f"no call has raised what a kernel reported: {self._error}", RuntimeWarning, stacklevel=3)

    def keep(self) -> None:
        """The memory is about to go: an event of the buffer may still ask, and other memory tells more now."""
        with suppress(Exception):
            self._read()
        self._words = HostWords(self._words.read() if self.is_there() else np.zeros(REPORT_WORDS, np.int32))

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


def error_of(memory: NodeMemory, report: FaultReport) -> Exception:
    """What a rank raises whose kernel has reported something."""
    if report.site in OF_NODE:  # they count the ranks of the node
        report = report._replace(peer=report.peer + memory.first_in_node)
    transport = memory.transport if memory.rdma is None else memory.rdma.transport
    network = transport.describe(report.peer) if report.peer >= 0 else []
    if report.site == IBGDA_ERROR:  # its completion may be that of an entry which was flushed
        refused = transport.first_refused(report.peer, report.channel)
        report = report if refused is None else report._replace(expected=refused[0], seen=refused[1])
    gone = memory.who_is_gone()
    error = fault_error(memory.rank, report, memory.timeout_ms, network, gone)
    if isinstance(error, PeerTimeout) and not memory.runtime.is_capturing:
        with suppress(RuntimeError):  # a GPU that has failed
            error = _late_difference(memory) or _passed_on(memory) or error
    return error


def _late_difference(memory: NodeMemory) -> Exception | None:
    """What words of low-latency calls say that no kernel has come to compare."""
    report = None if memory.low_latency is None else late_difference(memory.low_latency)
    return None if report is None else fault_error(memory.rank, report, memory.timeout_ms)


def _passed_on(memory: NodeMemory) -> ValueError | None:
    """What another rank of this node has passed on of a call that differs; see kernels.internode.meet_nodes."""
    read, signals = memory.symmetric.read, memory.num_nvl_bytes
    for peer in read(signals + TOLD, MAX_NVL_PEERS, np.int32).nonzero()[0].tolist():
        own, relayed = (
            read(signals + start + CALL_BYTES * peer, TOLD_WORDS, np.int32) - 1 for start in (CALL_WORDS, RELAYED_WORDS)
        )
        error = relayed_error(memory.rank, own.tolist(), relayed.tolist())
        if error is not None:
            return error
    return None
