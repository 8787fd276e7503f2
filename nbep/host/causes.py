"""What a kernel has reported: until the caller has got it, and as an exception that names the cause.

 kernel: a wait times out --report_fault--> FaultReport --KernelReport--> a verb, an event, a hook, or destroy raises

A wait may have timed out because its peer has ended with an error: another rank has made another call. Then this rank
is told of that, with both values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from nbep.device.kernels.elastic.dispatch import ELASTIC_ROWS
from nbep.device.kernels.low_latency.calls import LOW_LATENCY_CALLS_DIFFER
from nbep.device.kernels.low_latency.coordinator import LOW_LATENCY_HALF, UNCLEAN
from nbep.device.kernels.low_latency.dispatch_sender import LOW_LATENCY_CHOICE
from nbep.device.kernels.parts.arrivals import number_of
from nbep.device.kernels.parts.calls import CALLS_DIFFER, TOLD_WORDS
from nbep.device.layout.intranode import CALL_BYTES, CALL_WORDS, MAX_NVL_PEERS, RELAYED_WORDS, TOLD
from nbep.device.layout.low_latency import WORDS_OF_CALL, call_offset
from nbep.device.network.ibgda.completion import IBGDA_ERROR
from nbep.device.protocols.waits import DISPATCH_RECEIVER_ROWS, OF_NODE, SITES, FaultReport
from nbep.host import calls
from nbep.host.faults import NetworkError, noting, with_gone
from nbep.host.low_latency import calls as low_latency_calls
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.node import Node
from nbep.host.ranks.processes import NOBODY, Gone
from nbep.host.ranks.timeouts import PeerTimeout, saved_calls
from nbep.host.target.memory import HostWords

REPORT_WORDS = len(FaultReport._fields)


class KernelReport:
    """The first failure of a rank's kernels. Every call of the buffer raises it, or at last destroy."""

    def __init__(self, memory: Node, words: HostWords):
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
            raise _copy_of(self._error)

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


def _copy_of(error: Exception) -> Exception:
    """To be raised in its place: what is raised keeps the frames that it has passed, with their arrays."""
    copied = type(error).__new__(type(error), *error.args)
    vars(copied).update(vars(error))
    if hasattr(error, "__notes__"):
        copied.__notes__ = list(error.__notes__)
    return copied


def error_of(memory: Node, report: FaultReport) -> Exception:
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
            error = _late_error(memory) or _passed_on(memory) or error
    if isinstance(error, PeerTimeout):
        memory.add_reports(error)
        if saved_calls:
            error.add_note(f"the call that was saved last, on the emulator: {saved_calls[-1]}")
        elif memory.runtime.target == "cuda" and memory.has_verbs:
            error.add_note("nbep.debug.save_call before a call keeps its routing, to run it on the emulator")
    return error


def _late_error(memory: Node) -> Exception | None:
    """What words of low-latency calls say that no kernel has come to compare."""
    report = None if memory.low_latency is None else _late_difference(memory.low_latency)
    return None if report is None else fault_error(memory.rank, report, memory.timeout_ms)


def _late_difference(mode: LowLatencyMemory) -> FaultReport | None:
    """What the teller would have reported, had it come that far: another call than this rank's in a received half."""
    for half, own in mode.received_calls():
        rows = [call_offset(mode.num_rdma_bytes, mode.num_ranks, half, 0, index) for index in range(WORDS_OF_CALL)]
        words = np.stack([mode.symmetric.read(row, mode.num_ranks, np.int32) for row in rows], axis=1)
        for (peer, index), value in np.ndenumerate(words):
            if value < 0 and number_of(value) != own[index]:
                return FaultReport(1, LOW_LATENCY_CALLS_DIFFER, peer, own[index], number_of(int(value)), 0, 0, index)
    return None


def _passed_on(memory: Node) -> ValueError | None:
    """What another rank of this node has passed on of a call that differs; see kernels.internode.meet_nodes."""
    read, signals = memory.symmetric.read, memory.num_nvl_bytes
    for peer in read(signals + TOLD, MAX_NVL_PEERS, np.int32).nonzero()[0].tolist():
        own, relayed = (
            read(signals + start + CALL_BYTES * peer, TOLD_WORDS, np.int32) - 1 for start in (CALL_WORDS, RELAYED_WORDS)
        )
        error = calls.relayed_error(memory.rank, own.tolist(), relayed.tolist())
        if error is not None:
            return error
    return None


def fault_error(
    rank: int, report: FaultReport, timeout_ms: float, network: Sequence[str] = (), gone: Gone = NOBODY
) -> Exception:
    """The exception for a report whose status is not 0.

    network: what is known of the network to the peer; gone: ranks that do nothing any more
    """
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel == ELASTIC_ROWS:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, the rows that came: "
            f"tokens name an expert more than once. do_cpu_sync=True makes room for all"
        )
    if report.site == DISPATCH_RECEIVER_ROWS and report.channel < 0:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, the tokens that came. "
            f"Either num_worst_tokens or, if none was given, num_zero_copy_bytes at construction is too small"
        )
    if report.site == DISPATCH_RECEIVER_ROWS:
        return ValueError(
            f"recv_x: got {report.seen} rows on rank {rank}; must be at least {report.expected}, "
            f"the tokens that came up to channel {report.channel} of rank {report.peer}. Either num_worst_tokens is "
            f"too small or, if none was given, rank {report.peer} sends more tokens (is_token_in_rank) than it "
            f"announced (num_tokens_per_rank, or the handle)"
        )
    if report.site == CALLS_DIFFER:
        return calls.difference_error(rank, report)
    if report.site == LOW_LATENCY_CALLS_DIFFER:
        return low_latency_calls.difference_error(rank, report)
    if report.site == LOW_LATENCY_HALF and report.expected == UNCLEAN:
        return ValueError(
            f"low-latency calls: got a replay of a CUDA graph on rank {rank} after masks were taken off; must come "
            f"after clean_low_latency_buffer on all ranks"
        )
    if report.site == LOW_LATENCY_HALF:
        return ValueError(
            f"low-latency calls: got one in half {report.seen} on rank {rank}; must be in half {report.expected}: "
            f"calls take the halves in turn, and a CUDA graph holds an even number of them"
        )
    if report.site == LOW_LATENCY_CHOICE:
        return ValueError(
            f"topk_idx[{report.channel}, {report.expected}]: got {report.seen} on rank {rank}; must be -1 or an expert "
            f"that there is, each once for a token. If it is so, calls did not take the halves in turn and used slots "
            f"of another call: a CUDA graph holds an even number of calls"
        )
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
