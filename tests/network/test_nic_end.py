"""A NIC that is told to stop serves what was rung for before; so a kernel may end with its entries under way."""

import numpy as np
import pytest
from parts import both_parts
from target import spawn

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_value
from nbep.device.primitives import thread_idx
from nbep.device.types import I32

pytestmark = pytest.mark.emulator_only("each launch waits for its NIC on a GPU, see tests/host/test_gpu_nic.py")

NUM_QUEUES = 4


@kernel()
def post_and_leave(network: IbgdaNetwork, peer: I32):
    """A number on each queue, and nobody waits for it."""
    post_value(network, 8 * thread_idx(), 1 + thread_idx(), 8, peer, thread_idx())


def leave(comm):
    nic = nbep.NicOptions(max_delay_ns=200)
    memory = nbep.NodeMemory.create(comm, 128, transport="ibgda", num_nvl_peers=1, num_qps=NUM_QUEUES, nic=nic)
    memory.runtime.launch(memory.comm_stream, post_and_leave, 1, NUM_QUEUES, 0, memory.network, 1 - comm.rank)
    memory.wait()
    memory.transport.close()
    comm.barrier()
    came = memory.symmetric.read(0, NUM_QUEUES, np.int64)
    memory.close()
    return came


@pytest.mark.parametrize("seed", both_parts(range(20), thorough=range(20, 60)))
def test_what_was_rung_for_before_the_stop_is_served(seed):
    for came in spawn(leave, 2, seed=seed):
        assert came.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_nic_that_has_been_idle_while_another_ended_is_stopped_too(order):
    def main(comm):
        memories = [nbep.NodeMemory.create(comm, 128, transport="ibgda", num_nvl_peers=1) for _ in order]
        comm.barrier()
        for which in order:
            memories[which].close()

    spawn(main, 2)
