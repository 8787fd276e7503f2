"""How many blocks the kernels of an `ElasticBuffer` take, what they come behind, and where all ranks meet."""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.elastic.meet import elastic_meet_combine
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.elastic import THREADS_BEFORE_SM90
from nbep.device.layout.intranode import MAX_NVL_PEERS
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import BARRIER, make_call
from nbep.host.comm_work import Order
from nbep.host.events import handle_of
from nbep.host.intranode.dispatch import prepare_reset
from nbep.host.node import NodeMemory
from nbep.host.target.base import PastEvent, PreparedLaunch

WARP = 32


def num_threads(memory: NodeMemory) -> int:
    """Of a block."""
    threads = block_sizes(memory.runtime).ring(min(memory.num_ranks, MAX_NVL_PEERS))
    return threads if memory.runtime.has_tma else min(threads, THREADS_BEFORE_SM90)


def blocks_for(memory: NodeMemory, num_sms: int, num_items: int, threads: int) -> int:
    """num_sms, or fewer if there is no work for so many. A GPU is faster if each item has an SM, not only a warp."""
    items_of_block = 1 if memory.runtime.target == "cuda" else threads // WARP
    return max(1, min(num_sms, -(-num_items // items_of_block)))


def wait_before_epilogue(memory: NodeMemory, event: Any) -> None:
    """Let the call under way wait for an event: in nbep there is no epilogue of its own, so all of the call does."""
    handle = handle_of(event)
    if handle is not None and not isinstance(handle.event, PastEvent):
        memory.stream.wait(handle.event)


def barrier(memory: NodeMemory, use_comm_stream: bool, with_cpu_sync: bool) -> None:
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


def prepare_meeting(memory: NodeMemory, num_chunks: int, call: Call) -> PreparedLaunch:
    """The launch of the kernel in which ranks of several nodes meet; see kernels.elastic.meet."""
    elastic, runtime = memory.elastic, memory.runtime
    assert elastic is not None
    assert elastic.rdma is not None
    arguments = num_chunks, elastic.rdma.network, memory.bounds, elastic.nodes, call
    kernel = elastic.rdma.kernel(elastic_meet_combine)
    return runtime.prepare(kernel, 1, block_sizes(runtime).notify, 0, *arguments)
