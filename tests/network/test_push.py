"""`network_push` writes what it says, over each network, so that its time is that of all the bytes."""

import numpy as np
import pytest
from parts import crossed
from target import MEMORY_MODELS, spawn

import nbep
from nbep.device.jit import over
from nbep.device.kernels.network_push import (
    STAGE_BYTES,
    PushSizes,
    buffer_bytes,
    messages_bytes,
    network_push,
    smem_bytes,
)

pytestmark = pytest.mark.emulator_only("`nbep bench network` runs it on GPUs")

DIRECT = {"transport": "direct"}
IBGDA = {"transport": "ibgda", "num_nvl_peers": 1}
NIC = nbep.NicOptions(num_entries=64, seed=5, max_delay_ns=50)
ROUNDS = 2


def push(comm, grid, block, sizes, network):
    """What has come to this rank, as vectors of four words, [warps, messages, vectors, 4]."""
    num_warps = grid * block // 32
    num_bytes = buffer_bytes(num_warps, sizes)
    memory = nbep.SharedMemory.create(comm, -(-num_bytes // 128) * 128, num_qps=sizes.num_queues, **network)
    kernel = over(network_push, memory.transport.network_type)
    for number in range(1, 1 + ROUNDS):
        args = (sizes._replace(round=number), memory.network, memory.bounds)
        memory.runtime.launch(memory.comm_stream, kernel, grid, block, smem_bytes(block, sizes.num_bytes), *args)
    memory.wait()
    shape = (num_warps, sizes.num_messages, sizes.num_bytes // 16, 4)
    came = memory.symmetric.read(0, messages_bytes(num_warps, sizes) // 4, np.int32).reshape(shape)
    memory.close()
    return came


NETWORKS = {
    "direct": DIRECT,
    "ibgda": {**IBGDA, "nic": NIC},
    "ibgda, batches of 1": {**IBGDA, "nic": nbep.NicOptions(batch=1)},
}
SHAPES = (2, 2, 64, 16, 5, 3), (3, 1, 32, 1040, 2, 1)


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(
    ("network", "shape"),
    crossed([("direct", SHAPES[1]), ("ibgda, batches of 1", SHAPES[0]), ("ibgda", SHAPES[1])], NETWORKS, SHAPES),
)
def test_every_message_is_there_when_the_launch_ends(shape, network, memory_model):
    num_ranks, grid, block, num_bytes, num_messages, num_queues = shape
    sizes = PushSizes(num_bytes, num_messages, num_queues, 0)
    results = spawn(push, num_ranks, (grid, block, sizes, NETWORKS[network]), memory_model=memory_model)
    check(results, num_bytes)


def test_a_message_longer_than_a_stage_comes_in_parts():
    sizes = PushSizes(STAGE_BYTES + 256, 1, 1, 0)
    check(spawn(push, 2, (1, 32, sizes, DIRECT)), sizes.num_bytes)


def check(results, num_bytes):
    offsets = 16 * np.arange(num_bytes // 16) % STAGE_BYTES
    for rank, came in enumerate(results):
        num_warps = len(came)
        assert (came[..., 0] == (rank - 1) % len(results)).all()
        assert (came[..., 1] == np.arange(num_warps)[:, None, None]).all()
        assert (came[..., 2] == offsets).all()
        assert (came[..., 3] == 0x5EED).all()
