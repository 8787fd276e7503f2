"""Programs of programs.py that are about the memory of buffers."""

import gc
import re
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from cases import make_case
from intranode import Options, dispatch

import nbep
from nbep.host.target import mpi
from nbep.host.target.process import process_runtime


def show_rows(comm, buffer):
    """Arrays that show the memory of a buffer, with what is in each of them."""
    case = make_case(21, num_ranks=comm.size, num_tokens=4, hidden=256)
    options = Options(zero_copy=True)
    recv_x = dispatch(buffer, case, options, comm.rank).recv_x
    own = buffer.get_local_buffer_tensor(np.int32)[8:24].reshape(4, 4)
    own[:] = 7 + comm.rank
    of_network = buffer.get_local_buffer_tensor(ml_dtypes.bfloat16, use_rdma_buffer=True)[:64]
    of_network[:] = 3
    arrays = [recv_x, own, of_network]
    return arrays, [np.array(array) for array in arrays]


def arrays_that_outlive_their_buffer(comm):
    """The memory stays while an array shows it on any rank, and goes with the next buffer behind that."""
    runtime = process_runtime(comm)
    sizes = {"num_nvl_bytes": 1 << 16, "num_rdma_bytes": 1 << 18, "num_zero_copy_bytes": 1 << 17}
    for way in ("dropped", "destroyed", "shown on rank 0"):
        buffer = nbep.Buffer(comm, **sizes)
        arrays, before = show_rows(comm, buffer)
        if way == "dropped":
            del buffer
            gc.collect()
        else:
            if way == "shown on rank 0" and comm.rank != 0:
                del arrays[:]
            buffer.destroy()
            buffer = None
        for _ in range(2):  # what is made next takes other memory
            nbep.Buffer(comm, **sizes).destroy()
            assert len(runtime.dropped) == 1
            for array, was in zip(arrays, before, strict=False):
                np.testing.assert_array_equal(array, was)
        array = None
        del arrays[:]
        nbep.Buffer(comm, **sizes).destroy()
        assert runtime.dropped == {}
        assert runtime.space.segments == {}


def windows_without_room(comm):
    """Refused on all ranks before anything is written; with the room that the error asks for they are made."""
    size = 1 << 20
    before = nbep.Buffer(comm, num_nvl_bytes=size)  # whose pages were never written

    message = (
        rf"^ranks [0-9, ]+: rdma_buffer: {comm.size} ranks on .* need \d+ bytes of /.*, which has room for \d+; start"
    )
    with pytest.MonkeyPatch.context() as patch:
        megabytes = 2 * comm.size

        def room(_):
            blocks = (megabytes << 20) // 4096
            return SimpleNamespace(f_frsize=4096, f_blocks=blocks, f_bavail=blocks)

        patch.setattr(mpi.os, "statvfs", room)
        sizes = {"num_nvl_bytes": size // 2, "num_rdma_bytes": size}
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message) as refused:
                nbep.Buffer(comm, **sizes)
        megabytes = int(re.search(r"--shm-size=(\d+)m", str(refused.value))[1])
        nbep.Buffer(comm, **sizes).destroy()
    before.destroy()
