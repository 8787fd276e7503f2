"""Push writes what it says, so that its time is that of all the bytes."""

import numpy as np
import pytest
from target import spawn

import nbep
from nbep.device.kernels.intranode.push import AT_HOME, BOTH, ROW_BYTES, TO_PEERS, push
from nbep.device.layout.intranode import ALIGNMENT_BYTES

pytestmark = pytest.mark.emulator_only("`nbep bench intranode` runs it on GPUs")

OFFSET = 4 * ALIGNMENT_BYTES


@pytest.mark.parametrize("destination", [TO_PEERS, AT_HOME, BOTH])
@pytest.mark.parametrize(("num_ranks", "grid", "num_rows"), [(2, 2, 3), (4, 3, 2)])
def test_every_region_holds_the_rows_of_its_source(num_ranks, grid, num_rows, destination):
    num_regions = 2 * num_ranks - 1

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=OFFSET + num_regions * num_rows * ROW_BYTES)
        memory = buffer._memory
        local = buffer.get_local_buffer_tensor(np.int32)
        local[:] = -1
        row = np.arange(num_rows * ROW_BYTES // 4, dtype=np.int32)
        src = row + 1_000_000 * comm.rank
        comm.barrier()
        stream = memory.runtime.current_stream
        memory.runtime.launch(stream, push, grid, 64 * num_ranks, 0, src, OFFSET, num_rows, destination, memory.peers)
        stream.synchronize()
        comm.barrier()
        regions = local[OFFSET // 4 :].reshape(num_regions, -1).copy()
        buffer.destroy()
        return regions, row

    for rank, (regions, row) in enumerate(spawn(main, num_ranks)):
        for number, region in enumerate(regions):
            if number < num_ranks:
                written, source = destination != AT_HOME and number != rank, number
            else:
                written, source = destination != TO_PEERS, rank
            assert (region == (row + 1_000_000 * source if written else -1)).all(), (rank, number)
