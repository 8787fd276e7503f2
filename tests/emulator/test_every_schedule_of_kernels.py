"""What the tree of all schedules says of nbep's own functions, in programs small enough to be gone through."""

import importlib.util
import pathlib

import numpy as np
import pytest

import nbep
from nbep.check.faults import NOTHING, Fault, broken
from nbep.device.jit import kernel
from nbep.device.primitives import ld_weak_s32, st_weak_s32, thread_idx
from nbep.device.protocols.barrier import barrier_block, wait_signal_not_positive
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.emulator import DataRace
from nbep.emulator.schedule.every import Every, Redundant, Tree

RING = pathlib.Path(__file__).resolve().parents[2] / "docs/examples/ring.py"


def all_of(main, num_ranks, *args):
    """The tree of all schedules of a program. Yields the results of each run."""
    tree = Tree()
    while tree.begin():
        try:
            results = nbep.spawn(main, num_ranks, "emulator", args, memory_model="checked", strategy=Every(tree))
        except Redundant:
            tree.end(is_redundant=True)
        else:
            tree.end()
            yield tree, results


@kernel(max_threads=32)
def meet(peers: Peers, bounds: Bounds):
    if thread_idx() == 0:
        for peer in range(peers.num_ranks):
            st_weak_s32(buffer_of(peers, peer) + 4 * peers.rank, 7)
    barrier_block(peers, bounds)
    if thread_idx() == 0:
        for peer in range(peers.num_ranks):
            assert ld_weak_s32(buffer_of(peers, peers.rank) + 4 * peer) == 7
    barrier_block(peers, bounds)


def meet_twice(comm):
    memory = nbep.NodeMemory.create(comm, 128, timeout_ms=5000)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, meet, 1, comm.size, 0, memory.peers, memory.bounds)
    memory.wait()
    memory.close()


@pytest.mark.thorough
def test_two_ranks_meet_twice():
    *_, (tree, _) = all_of(meet_twice, 2)
    assert tree.is_whole
    assert tree.schedules == 15


BROKEN = [
    Fault("release", "release", barrier_block, "atom_add_release_sys_s32", 0, "relaxed"),
    Fault("acquire", "acquire", wait_signal_not_positive, "ld_acquire_sys_s32", 0, "relaxed"),
    Fault("wait", "wait", barrier_block, "wait_signal_not_positive", 0, NOTHING),
]


@pytest.mark.parametrize("fault", BROKEN, ids=str)
def test_a_broken_barrier_is_a_race(fault):
    with broken(fault), pytest.raises(DataRace):
        list(all_of(meet_twice, 2))


@pytest.fixture
def ring(monkeypatch):
    spec = importlib.util.spec_from_file_location("ring_of_every_schedule", RING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"NUM_SLOTS": 2, "LANES": 1, "FULL_MASK": 1, "ROW_BYTES": 4}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.thorough
def test_ring_of_two_slots_and_four_rows(ring):
    runs = list(all_of(ring.main, 2, 4))
    assert all(received == np.arange(4).reshape(4, 1).tolist() for _, (_, received) in runs)
    assert runs[-1][0].is_whole
