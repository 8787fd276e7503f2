"""Entries a doorbell: the network says how many, and what does not fill a batch leaves with what follows."""

import numpy as np
import pytest
from target import spawn

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.queue_pair import DEFAULT_BATCH, RECORD, field, queue_pair_of
from nbep.device.network.ibgda.transport import IbgdaNetwork, post_add, post_write, wait_written
from nbep.device.network.seam import Place, own_ptr
from nbep.device.primitives import byteswap_u32, ld_weak_s32, st_weak_s32, syncwarp, thread_idx
from nbep.device.types import I32

pytestmark = pytest.mark.emulator_only("tests/cuda/network_main.py is about GPUs")

ROW = 16
ROWS = 4096
FLAG = 8192
SEEN = 8320
NUM_BYTES = 16384


@kernel()
def put_rows(network: IbgdaNetwork, num_rows: I32, peer: I32):
    """Put rows that need not leave at once; note how many the record tells of; add to a flag behind them."""
    lane = thread_idx()
    for i in range(num_rows):
        if lane < ROW // 4:
            st_weak_s32(own_ptr(network, ROW * i + 4 * lane), 100 * network.rank + i)
        syncwarp(0xFFFFFFFF)
        post_write(network, Place(ROWS + ROW * i, ROW * i, peer, 0), ROW, False, lane)
    if lane == 0:
        record = ld_weak_s32(field(queue_pair_of(network, peer, 0), RECORD))
        st_weak_s32(own_ptr(network, SEEN), byteswap_u32(record))
        wait_written(network, peer, 0, post_add(network, FLAG, 1, False, peer, 0))


def put(comm, num_rows, nic):
    memory = nbep.SharedMemory.create(comm, NUM_BYTES, transport="ibgda", num_nvl_peers=1, nic=nic)
    memory.runtime.launch(memory.comm_stream, put_rows, 1, 32, 0, memory.network, num_rows, 1 - comm.rank)
    memory.wait()
    comm.barrier()
    rows = memory.symmetric.read(ROWS, num_rows * ROW // 4, np.int32).reshape(num_rows, -1)
    flag, seen = (int(memory.symmetric.read(at, 1, np.int32)[0]) for at in (FLAG, SEEN))
    memory.close()
    return rows, flag, seen


@pytest.mark.parametrize(("batch", "rung"), [(1, 6), (2, 6), (4, 4), (8, 0), (32, 0)])
def test_only_whole_batches_ring_before_something_must_leave(batch, rung):
    for rank, (rows, flag, seen) in enumerate(spawn(put, 2, (6, nbep.NicOptions(num_entries=64, batch=batch)))):
        assert seen == rung
        assert flag == 1
        assert (rows == 100 * (1 - rank) + np.arange(6)[:, None]).all()


def test_a_full_queue_of_the_largest_batches_goes_on():
    for rows, flag, _ in spawn(put, 2, (150, nbep.NicOptions(num_entries=64, batch=32))):
        assert flag == 1
        assert len(set(rows[:, 0])) == 150


def test_a_batch_has_as_many_entries_as_deepep_takes_unless_one_says_otherwise():
    assert nbep.NicOptions().batch == DEFAULT_BATCH == 4
    assert nbep.NicOptions.parse("batch=16,num_entries=64").batch == 16


@pytest.mark.parametrize("batch", [0, 3, 64, 1.0])
def test_a_batch_that_fills_more_than_half_of_the_queue_or_is_no_power_of_two_is_refused(batch):
    with pytest.raises(ValueError, match="nic: batch"):
        nbep.NicOptions(num_entries=64, batch=batch)
