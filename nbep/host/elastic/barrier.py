"""ElasticBuffer.barrier: all ranks meet in a kernel."""

from __future__ import annotations

from nbep.host.calls import ELASTIC_BARRIER, make_call
from nbep.host.intranode.notify import prepare_reset
from nbep.host.node import Node, Order


def barrier(memory: Node, use_comm_stream: bool, with_cpu_sync: bool) -> None:
    """See ElasticBuffer.barrier."""
    memory.check_faults()
    if with_cpu_sync:
        memory.runtime.current_stream.synchronize()
    memory.allocate(Order(None, use_comm_stream, False), None)
    call = make_call(memory.rank, (ELASTIC_BARRIER, *(0,) * 12))
    memory.compare(call)
    prepare_reset(memory, memory.peers, 0, call).launch(memory.stream)
    memory.finish(False)
    if with_cpu_sync:
        memory.stream.synchronize()
        memory.check_faults()
