"""The exception for what a kernel has reported, with the cause as far as this rank's memory tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbep.device.protocols.waits import OF_NODE, FaultReport
from nbep.host.faults import fault_error
from nbep.host.low_latency.difference import call_error

if TYPE_CHECKING:
    from nbep.host.symmetric import NodeMemory


def error_of(memory: NodeMemory, report: FaultReport) -> Exception:
    """A wait for a rank that has made another call is no time-out: it is told what both have passed."""
    if report.site in OF_NODE:  # they count the ranks of the node
        report = report._replace(peer=report.peer + memory.first_in_node)
    transport = memory.transport if memory.rdma is None else memory.rdma.transport
    network = transport.describe(report.peer) if report.peer >= 0 else []
    gone = memory.who_is_gone()
    error = None if memory.low_latency is None else call_error(memory.low_latency, report)
    return error or fault_error(memory.rank, report, memory.timeout_ms, network, gone)
