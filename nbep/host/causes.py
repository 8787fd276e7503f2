"""The exception for what a kernel has reported, with the cause as far as this rank's memory tells it.

A wait may be over time because its peer has ended with an error: another rank has made another call. Then this rank is
told of that, with both values.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from nbep.device.layout.intranode import CALL_BYTES, CALL_WORDS, MAX_NVL_PEERS, RELAYED_WORDS, TOLD
from nbep.device.protocols.calls import TOLD_WORDS
from nbep.device.protocols.waits import IBGDA_ERROR, OF_NODE, FaultReport
from nbep.host.calls import relayed_error
from nbep.host.faults import PeerTimeout, fault_error
from nbep.host.low_latency.calls import late_difference

if TYPE_CHECKING:
    from nbep.host.symmetric import NodeMemory


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
