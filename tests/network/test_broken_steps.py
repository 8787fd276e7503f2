"""Steps of queue pairs and of the software NIC that nbep's own kernels do not need: these here need them.

The other steps are broken by tests/check/test_table.py.
"""

import numpy as np
import pytest
from fault_reasons import ADDS_64_BITS, REASONS, SLOTS_ALONE
from own_network import FLAGS, RESULTS, SEEN, SOURCE, TARGET, fill_source, run, see, sent_by, wait_wide_flag

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.transport import IbgdaNetwork, fetched_32, fetched_64, post_add, post_write, wait_written
from nbep.device.network.seam import Place, own_ptr
from nbep.device.primitives import st_weak_s64, thread_idx
from nbep.device.types import I32
from nbep.lab.check import broken

pytestmark = pytest.mark.emulator_only("the device code is broken in Python")
NUM_ADDS, NUM_BYTES = 3, 512
NEEDED = [name for name, reason in REASONS.items() if reason in (SLOTS_ALONE, ADDS_64_BITS)]


@kernel()
def old_values(network: IbgdaNetwork, is_64_bits: I32):
    """One thread adds at the peer, and writes down what was there before."""
    peer = 1 - network.rank
    for i in range(NUM_ADDS):
        index = post_add(network, FLAGS, 1, is_64_bits != 0, peer, 0)
        wait_written(network, peer, 0, index)
        old = fetched_64(network, peer, 0) if is_64_bits != 0 else fetched_32(network, peer, 0)
        st_weak_s64(own_ptr(network, RESULTS + 8 * i), old)


@kernel()
def block_then_add(network: IbgdaNetwork):
    """A warp writes a block and adds to a flag of 64 bits; the other rank's warp waits for that, and looks."""
    lane, peer = thread_idx(), 1 - network.rank
    fill_source(network, SOURCE, NUM_BYTES, lane)
    post_write(network, Place(TARGET, SOURCE, peer, 0), NUM_BYTES, False, lane)
    if lane == 0:
        post_add(network, FLAGS, 1, True, peer, 0)
    wait_wide_flag(network, 0, 1, lane)
    see(network, 0, NUM_BYTES, lane)


def are_right(memory_model: str, seed: int) -> bool:
    options = {"memory_model": memory_model, "seed": seed, "nic": {"seed": seed, "max_delay_ns": 300}}
    try:
        for memory in (memory for wide in (0, 1) for memory in run(old_values, 1, 1, wide, **options)):
            assert memory[RESULTS : RESULTS + 8 * NUM_ADDS].view(np.int64).tolist() == [*range(NUM_ADDS)]
        for rank, memory in enumerate(run(block_then_add, 1, 32, **options)):
            assert memory[SEEN : SEEN + NUM_BYTES].tolist() == sent_by(1 - rank, SOURCE, NUM_BYTES)
    except (AssertionError, nbep.NetworkError, nbep.EmulatorError):
        return False
    return True


@pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
def test_unbroken_queues_are_not_caught(memory_model):
    assert are_right(memory_model, 1)


@pytest.mark.parametrize("name", NEEDED)
def test_a_step_that_is_left_out_is_caught(name):
    with broken(name):
        assert not all(are_right("checked", seed) for seed in range(1, 5))
