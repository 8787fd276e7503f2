"""A NIC that is to stop serves what was rung for before; so a kernel may end with its entries under way."""

import ast

import numpy as np
import pytest
from parts import both_parts, dear
from primitives_of import replace_primitives
from target import spawn

import nbep
from nbep.device.jit import kernel
from nbep.device.network import nic
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_value
from nbep.device.primitives import ld_weak_s32, thread_idx
from nbep.device.types import I32
from nbep.lab.check import broken
from nbep.lab.check.faults import edited

pytestmark = pytest.mark.emulator_only("each launch waits for its NIC on a GPU, see tests/host/test_gpu_nic.py")

NUM_QUEUES = 4


@kernel()
def post_and_leave(network: IbgdaNetwork, peer: I32):
    """A number on each queue, and no thread waits for it."""
    post_value(network, 8 * thread_idx(), 1 + thread_idx(), 8, peer, thread_idx())


def leave(comm):
    options = nbep.NicOptions(max_delay_ns=200)
    memory = nbep.SharedMemory.create(comm, 128, transport="ibgda", num_nvl_peers=1, num_qps=NUM_QUEUES, nic=options)
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


@dear
@pytest.mark.parametrize("step", both_parts(["scope of the fence"], thorough=["fence_acq_rel_sys"]))
def test_a_nic_that_does_not_order_its_last_look_behind_the_stop_is_caught(step):
    with broken(f"network.nic.must_stop: {step}"):
        results = [spawn(leave, 2, seed=seed, memory_model="delayed") for seed in range(10)]
    assert any(came.tolist() != [1, 2, 3, 4] for of_run in results for came in of_run)


def a_weak_look(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "ld_relaxed_sys_s32":
            node.id = "ld_weak_s32"


@pytest.mark.parametrize("seed", both_parts(range(2), thorough=range(2, 5), long=range(5, 17)))
def test_a_nic_that_polls_the_cpus_word_too_weakly_is_a_data_race(seed, monkeypatch):
    replace_primitives(monkeypatch, nic, ld_weak_s32=ld_weak_s32)
    for broken_look in (edited(nic.must_stop, a_weak_look), broken("network.nic.must_stop: scope of stop")):
        with broken_look, pytest.raises(nbep.DataRace, match=r"`NIC` of the NIC of rank \d: stop"):
            spawn(leave, 2, seed=seed, memory_model="checked")


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(20))
def test_a_nic_whose_last_look_may_be_early_serves_what_was_rung_for(seed):
    for came in spawn(leave, 2, seed=seed, memory_model="delayed"):
        assert came.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_nic_that_has_been_idle_while_another_ended_is_stopped_too(order):
    def main(comm):
        memories = [nbep.SharedMemory.create(comm, 128, transport="ibgda", num_nvl_peers=1) for _ in order]
        comm.barrier()
        for which in order:
            memories[which].close()

    spawn(main, 2)
