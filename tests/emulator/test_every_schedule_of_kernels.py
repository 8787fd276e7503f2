"""What the tree of all schedules says of nbep's own functions, in programs small enough to be gone through."""

import gc
import importlib.util
import pathlib
from typing import NamedTuple

import numpy as np
import pytest
from every_schedule import all_of
from parts import both_parts

import nbep
from nbep.device import primitives as ptx
from nbep.device.jit import kernel, over
from nbep.device.kernels.internode.arguments import Context, Here
from nbep.device.kernels.internode.coordinator import Column, begin_block, board_row, publish_slots
from nbep.device.kernels.network_push import NETWORK_PUSH, fill_stage, wait_pushed
from nbep.device.network.seam import Network, Place, amo_add, keep_message, own_ptr, peer_ptr, put_nbi_warp, quiet
from nbep.device.protocols.barrier import barrier_block, wait_signal_not_positive
from nbep.device.protocols.board import note_progress
from nbep.device.protocols.grid_barrier import barrier_grid
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.protocols.waits import Waiter, is_at_least, wait_or_report
from nbep.device.types import I32
from nbep.emulator import DataRace, World
from nbep.lab.check.faults import NOTHING, Fault, broken

RING = pathlib.Path(__file__).resolve().parents[2] / "docs/examples/ring.py"


@kernel(max_threads=32)
def meet(peers: Peers, bounds: Bounds):
    if ptx.thread_idx() == 0:
        for peer in range(peers.num_ranks):
            ptx.st_weak_s32(buffer_of(peers, peer) + 4 * peers.rank, 7)
    barrier_block(peers, bounds)
    if ptx.thread_idx() == 0:
        for peer in range(peers.num_ranks):
            assert ptx.ld_weak_s32(buffer_of(peers, peers.rank) + 4 * peer) == 7
    barrier_block(peers, bounds)


def meet_twice(comm):
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000)
    comm.barrier()
    memory.runtime.launch(memory.comm_stream, meet, 1, comm.size, 0, memory.peers, memory.bounds)
    memory.wait()
    memory.close()


@pytest.mark.parametrize(("num_ranks", "schedules", "redundant"), [(2, 1, 2), (3, 1, 6), (4, 1, 12)])
def test_ranks_meet_twice(num_ranks, schedules, redundant):
    *_, (tree, _) = all_of(meet_twice, num_ranks)
    assert tree.is_whole
    assert (tree.schedules, tree.redundant) == (schedules, redundant)


@kernel(max_threads=1)
def meet_of_grid(peers: Peers, bounds: Bounds):
    arrivals = buffer_of(peers, 0)
    ptx.st_weak_s32(arrivals + 4 + 4 * ptx.block_idx(), 7)
    barrier_grid(arrivals, bounds)
    for block in range(ptx.grid_dim()):
        assert ptx.ld_weak_s32(arrivals + 4 + 4 * block) == 7


def blocks_meet(comm, num_blocks):
    memory = nbep.SharedMemory.create(comm, 128)
    memory.runtime.launch(memory.comm_stream, meet_of_grid, num_blocks, 1, 0, memory.peers, memory.bounds)
    memory.wait()
    memory.close()


def test_all_blocks_meet_in_one_schedule_whoever_comes_last():
    *_, (tree, _) = all_of(blocks_meet, 1, 5)
    assert tree.is_whole
    assert tree.schedules == 1


BROKEN = [
    Fault("release", "release", barrier_block, "atom_add_release_sys_s32", 0, "relaxed"),
    Fault("acquire", "acquire", wait_signal_not_positive, "ld_acquire_sys_s32", 0, "relaxed"),
    Fault("syncthreads", "syncthreads", barrier_block, "syncthreads", 0, NOTHING),
    Fault("wait", "wait", barrier_block, "wait_signal_not_positive", 0, NOTHING),
]


@pytest.mark.parametrize("fault", BROKEN, ids=str)
def test_a_broken_barrier_is_a_race(fault):
    with broken(fault), pytest.raises(DataRace):
        list(all_of(meet_twice, 2))


@pytest.fixture
def ring():
    spec = importlib.util.spec_from_file_location("ring_of_every_schedule", RING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("slots", "rows", "lanes", "schedules", "redundant"),
    both_parts(
        [(2, 4, 1, 1, 2), (4, 3, 32, 1, 2)],
        thorough=[(2, 3, 1, 1, 1), (4, 3, 1, 1, 0), (4, 3, 3, 1, 2), (4, 10, 32, 1, 9)],
    ),
)
def test_lanes_of_a_ring_do_not_multiply_schedules(ring, monkeypatch, slots, rows, lanes, schedules, redundant):
    names = {"NUM_SLOTS": slots, "LANES": lanes, "FULL_MASK": (1 << lanes) - 1, "ROW_BYTES": 4 * lanes}
    for name, value in names.items():
        monkeypatch.setattr(ring, name, value)
    runs = list(all_of(ring.main, 2, rows))
    assert all(received == np.arange(rows * lanes).reshape(rows, lanes).tolist() for _, (_, received) in runs)
    tree = runs[-1][0]
    assert (tree.is_whole, tree.schedules, tree.redundant) == (True, schedules, redundant)


@kernel(max_threads=32)
def write_and_add(network: Network, bounds: Bounds):
    """Rank 0 writes 16 bytes to rank 1 and adds to a cell behind them; rank 1 waits for that."""
    lane = ptx.thread_idx()
    if network.rank == 0:
        fill_stage(ptx.smem_base(), 16, 0, 0, lane)
        keep_message(network, 16, ptx.smem_base(), 16, lane)
        put_nbi_warp(network, Place(0, 16, 1, 0), ptx.smem_base(), 16, lane)
        quiet(network, lane)
        if lane == 0:
            amo_add(network, 64, 1, 1, 0, True)
    elif lane == 0:
        wait_pushed(own_ptr(network, 64), 1, bounds, 0, 0)
        assert ptx.ld_weak_s32(own_ptr(network, 12)) == 0x5EED


def write_once(comm, messages):
    memory = nbep.SharedMemory.create(comm, 128, num_qps=1, transport="ibgda", num_nvl_peers=1)
    program = over(messages, memory.transport.network_type)
    memory.runtime.launch(memory.comm_stream, program, 1, 32, 16, memory.network, memory.bounds)
    memory.wait()
    memory.close()


def worlds_alive():
    gc.collect()
    return sum(type(one) is World for one in gc.get_objects())


def test_one_write_and_one_add_over_the_software_nic():
    before = worlds_alive()
    *_, (tree, _) = all_of(write_once, 2, write_and_add)
    assert tree.is_whole
    # Each of the two NICs looks, or does not look, at its doorbells between its last entry and the host's word to end.
    assert (tree.schedules, tree.redundant) == (16, 13)
    del tree
    assert worlds_alive() <= before  # also of runs that were given up while a host was between two polls


@kernel(max_threads=32)
def write_and_look(network: Network, bounds: Bounds, queue: I32):
    """The same, but the add may go over another queue; and rank 1 looks once, and keeps what it has seen."""
    lane = ptx.thread_idx()
    if network.rank == 0:
        fill_stage(ptx.smem_base(), 16, 0, 0, lane)
        keep_message(network, 16, ptx.smem_base(), 16, lane)
        put_nbi_warp(network, Place(0, 16, 1, 0), ptx.smem_base(), 16, lane)
        quiet(network, lane)
        if lane == 0:
            amo_add(network, 64, 1, 1, queue, True)
    elif lane == 0:
        count = ptx.ld_acquire_sys_s32(own_ptr(network, 64))
        ptx.st_weak_s32(own_ptr(network, 96), count)
        ptx.st_weak_s32(own_ptr(network, 100), ptx.ld_weak_s32(own_ptr(network, 12)) if count > 0 else 0)


def look_once(comm, queue):
    memory = nbep.SharedMemory.create(comm, 128, num_qps=queue + 1, transport="ibgda", num_nvl_peers=1)
    program = over(write_and_look, memory.transport.network_type)
    memory.runtime.launch(memory.comm_stream, program, 1, 32, 16, memory.network, memory.bounds, queue)
    memory.wait()
    seen = tuple(memory.symmetric.allocation.array(np.int32, 96, 2, writable=False).tolist())
    memory.close()
    return seen


@pytest.mark.thorough
def test_who_looks_once_at_what_a_nic_adds_sees_it_or_not():
    """All outcomes: the message is there wherever the number is, which comes behind it on the same queue."""
    assert {seen for _, (_, seen) in all_of(look_once, 2, 0)} == {(0, 0), (1, 0x5EED)}


@pytest.mark.thorough
def test_an_add_on_another_queue_leaves_the_message_behind():
    """Nothing rings the doorbell of the queue that has the message, so the number comes alone."""
    assert {seen for _, (_, seen) in all_of(look_once, 2, 1)} == {(0, 0), (1, 0)}


@kernel(max_threads=32)
def write_and_add_to_each_other(network: Network, bounds: Bounds):
    """The same from each rank to the other one."""
    lane, peer = ptx.thread_idx(), 1 - network.rank
    fill_stage(ptx.smem_base(), 16, 0, 0, lane)
    keep_message(network, 16, ptx.smem_base(), 16, lane)
    put_nbi_warp(network, Place(0, 16, peer, 0), ptx.smem_base(), 16, lane)
    quiet(network, lane)
    if lane == 0:
        amo_add(network, 64, 1, peer, 0, True)
        wait_pushed(own_ptr(network, 64), 1, bounds, 0, 0)
        assert ptx.ld_weak_s32(own_ptr(network, 12)) == 0x5EED


@pytest.mark.thorough
def test_a_write_and_an_add_in_both_directions_over_the_software_nic():
    *_, (tree, _) = all_of(write_once, 2, write_and_add_to_each_other)
    assert tree.is_whole
    assert (tree.schedules, tree.redundant) == (64, 98)


def test_a_broken_doorbell_is_a_race():
    with broken("network.ibgda.queue_pair.ring: release of ibgda-doorbell"), pytest.raises(DataRace):
        list(all_of(write_once, 2, write_and_add))


class Sizes(NamedTuple):
    num_max_rdma_send_tokens: int


@kernel(max_threads=96)
def fill_and_tell(network: Network, bounds: Bounds, num_warps: I32, num_rows: I32):
    """The board's turn between nodes, of one rank each: rank 0's warps fill rows of rank 1, each its part of
    them, and the coordinator tells how many are there.
    """
    warp, lane = ptx.thread_idx() // 32, ptx.thread_idx() % 32
    begin_block(bounds)
    if lane == 0 and network.rank == 0 and warp < num_warps:
        for row in range(num_rows):
            ptx.st_weak_s32(peer_ptr(network, 16 * (num_warps * row + warp), 1), row + 1)
            note_progress(board_row(warp), row + 1)
    elif lane == 0 and network.rank == 0:
        here = Here(0, 0, 2, 1, 0, 1)
        context = Context(network, None, None, bounds, here, 1, Sizes(1), None, None, None)
        publish_slots(context, own_ptr(network, 496), 500, num_rows, Column(board_row(0), num_warps), 0)
    elif ptx.thread_idx() == 0:
        for row in range(num_rows):
            waiter = Waiter(NETWORK_PUSH, 0, 0)
            wait_or_report(ptx.ld_acquire_sys_s32, own_ptr(network, 500), is_at_least, row + 1, bounds, waiter)
            for other in range(num_warps):
                assert ptx.ld_weak_s32(own_ptr(network, 16 * (num_warps * row + other))) == row + 1


def tell_rows(comm, num_warps, num_rows):
    memory = nbep.SharedMemory.create(comm, 512, num_qps=1, transport="direct")
    program = over(fill_and_tell, memory.transport.network_type)
    args = memory.network, memory.bounds, num_warps, num_rows
    memory.runtime.launch(memory.comm_stream, program, 1, 32 * (num_warps + 1), 4096, *args)
    memory.wait()
    memory.close()


@pytest.mark.parametrize(
    ("num_warps", "num_rows", "schedules"), both_parts([(1, 2, 2), (2, 1, 1)], thorough=[(2, 2, 3)])
)
def test_a_board_tells_another_node_what_is_there(num_warps, num_rows, schedules):
    *_, (tree, _) = all_of(tell_rows, 2, num_warps, num_rows)
    assert tree.is_whole
    assert tree.schedules == schedules


def test_a_board_without_release_is_a_race():
    with broken("board.note_progress: release of board"), pytest.raises(DataRace):
        list(all_of(tell_rows, 2, 1, 1))
