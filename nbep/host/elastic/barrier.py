"""ElasticBuffer.barrier: all ranks meet in a kernel."""

from __future__ import annotations

from nbep.device.kernels.elastic.meet_combine import elastic_meet_combine
from nbep.device.kernels.parts.calls import Call
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import BARRIER, make_call
from nbep.host.intranode.notify import prepare_reset
from nbep.host.node import Node, Order
from nbep.host.target.base import PreparedLaunch


def barrier(memory: Node, use_comm_stream: bool, with_cpu_sync: bool) -> None:
    """See ElasticBuffer.barrier."""
    memory.check_faults()
    if with_cpu_sync:
        memory.runtime.current_stream.synchronize()
    memory.allocate(Order(None, use_comm_stream, False), None)
    call = make_call(BARRIER)
    memory.compare(call)
    assert memory.elastic is not None
    between_nodes = memory.elastic.rdma is not None
    meeting = prepare_meeting(memory, 0, call) if between_nodes else prepare_reset(memory, memory.peers, 0, call)
    meeting.launch(memory.stream)
    memory.finish(False)
    if with_cpu_sync:
        memory.stream.synchronize()
        memory.check_faults()


def prepare_meeting(memory: Node, num_chunks: int, call: Call) -> PreparedLaunch:
    """The launch of the kernel in which ranks of several nodes meet; see kernels.elastic.meet_combine."""
    elastic, runtime = memory.elastic, memory.runtime
    assert elastic is not None
    assert elastic.rdma is not None
    arguments = num_chunks, elastic.rdma.network, memory.bounds, elastic.nodes, call
    kernel = elastic.rdma.kernel(elastic_meet_combine)
    return runtime.prepare(kernel, 1, block_sizes(runtime).notify, 0, *arguments)
