"""A message may touch more chunks than a send queue has slots."""

import ml_dtypes
import numpy as np
import pytest

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.queue_pair import MIN_ENTRIES
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_write, wait_written
from nbep.device.network.seam import Place
from nbep.device.primitives import thread_idx
from nbep.device.types import I32

CHUNK_BYTES, GOAL, MEMORY_BYTES = 256, 1 << 15, 1 << 16


@kernel(max_threads=32)
def put(network: IbgdaNetwork, num_bytes: I32, num_before: I32):
    """Some writes without a doorbell, then a message from the middle of a chunk on."""
    lane = thread_idx()
    for _ in range(num_before):
        post_write(network, Place(MEMORY_BYTES - 16, 0, 1, 0), 16, False, lane)
    last = post_write(network, Place(GOAL + 16, 128, 1, 0), num_bytes, True, lane)
    if lane == 0:
        wait_written(network, 1, 0, last)


def main(comm, num_bytes, num_before):
    options = nbep.NicOptions(chunk_bytes=CHUNK_BYTES, num_entries=MIN_ENTRIES)
    memory = nbep.SharedMemory.create(comm, MEMORY_BYTES, transport="ibgda", num_nvl_peers=1, nic=options)
    memory.symmetric.array(np.int32, 128, num_bytes // 4)[:] = np.arange(num_bytes // 4)
    comm.barrier()
    if comm.rank == 0:
        memory.runtime.launch(memory.comm_stream, put, 1, 32, 0, memory.network, num_bytes, num_before)
    memory.wait()
    comm.barrier()
    received = memory.symmetric.array(np.int32, GOAL + 16, num_bytes // 4).copy()
    memory.close()
    return received


@pytest.mark.parametrize(
    ("num_chunks", "num_before"), [(1, 0), (32, 3), (33, 1), (MIN_ENTRIES - 1, 3), (MIN_ENTRIES + 1, 0), (100, 2)]
)
def test_a_message_of_many_chunks_arrives_whatever_waits_for_a_ring(num_chunks, num_before):
    num_bytes = CHUNK_BYTES * num_chunks
    _, received = nbep.spawn(main, 2, "emulator", (num_bytes, num_before), on_deadlock="expire")
    assert (received == np.arange(num_bytes // 4)).all()


def test_low_latency_messages_of_too_many_chunks_are_refused_before_anything_is_launched():
    def low_latency(comm):
        hidden, num_experts = 4096, 2
        size = nbep.Buffer.get_low_latency_rdma_size_hint(1, hidden, 2, num_experts)
        options = nbep.NicOptions(chunk_bytes=CHUNK_BYTES)
        buffer = nbep.Buffer(
            comm, num_rdma_bytes=size, low_latency_mode=True, transport="ibgda", num_nvl_peers=1, nic=options
        )
        x, topk_idx = np.zeros((1, hidden), ml_dtypes.bfloat16), np.zeros((1, 1), np.int64)
        with pytest.raises(ValueError, match=r"nic: chunk_bytes: got 256; must be at least .* for messages of"):
            buffer.low_latency_dispatch(x, topk_idx, 1, num_experts)
        buffer.destroy()

    nbep.spawn(low_latency, 2, "emulator")
