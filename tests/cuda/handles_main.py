"""Memory of one handle type between processes: every rank reads and writes every peer's. GPUs may be shared.

    mpirun -n 4 python tests/cuda/handles_main.py [ipc|posix_fd|fabric|host]

Only copies, no kernels: processes that share a GPU take turns, and kernels that wait for each other would not.
The exit code is 0 if all was right, or if every rank raised because the driver does not offer the type.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
import numpy as np
import pytest
from cuda.bindings import driver as cu
from mpi4py import MPI

import nbep
from nbep.host.target.cuda.driver import Device, check

NUM_BYTES = 3 << 20
ROUNDS = 3


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def check_memory(comm: MPI.Intracomm, handle_type: str) -> None:
    """Zeros at first; then cell [s] of each rank's memory holds what rank s wrote there."""
    buffer = nbep.Buffer(comm, num_nvl_bytes=NUM_BYTES, handle_type=handle_type)
    memory = buffer._memory
    symmetric, size = memory.symmetric, comm.size
    table = np.zeros(size, np.int64)
    check("cuMemcpyDtoH", cu.cuMemcpyDtoH(table.ctypes.data, memory.peers.buffer_ptrs, table.nbytes))
    assert table[comm.rank] == symmetric.address
    assert len(set(table.tolist())) == size
    assert not symmetric.read(0, NUM_BYTES, np.uint8).any()
    comm.barrier()
    for peer, address in enumerate(table.tolist()):
        mine = np.array([100 * comm.rank + peer], np.int32)
        check("cuMemcpyHtoD", cu.cuMemcpyHtoD(address + 4 * comm.rank, mine.ctypes.data, 4))
    check("cuCtxSynchronize", cu.cuCtxSynchronize())
    comm.barrier()
    assert symmetric.read(0, size, np.int32).tolist() == [100 * source + comm.rank for source in range(size)]
    seen = np.zeros(size, np.int32)
    for peer, address in enumerate(table.tolist()):
        check("cuMemcpyDtoH", cu.cuMemcpyDtoH(seen.ctypes.data, address, seen.nbytes))
        assert seen.tolist() == [100 * source + peer for source in range(size)]
    comm.barrier()
    buffer.destroy()


def check_failures(comm: MPI.Intracomm, handle_type: str) -> None:
    """What fails on rank 1 alone raises on all ranks."""
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(Device, "can_reach", lambda self, bus_id: False)
        if handle_type == "host":  # goes where GPUs do not reach each other
            nbep.Buffer(comm, num_nvl_bytes=NUM_BYTES, handle_type=handle_type).destroy()
        else:
            with pytest.raises(RuntimeError, match=r"^rank 1: GPU \S+ cannot reach GPU \S+ of rank 0: no peer access"):
                nbep.Buffer(comm, num_nvl_bytes=NUM_BYTES, handle_type=handle_type)
    if handle_type != "ipc":
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:
                patch.setattr(Device, "attribute", lambda self, attribute: 0)
            with pytest.raises(RuntimeError, match=rf"^rank 1: handle_type: got {handle_type}; .* does not offer it"):
                nbep.Buffer(comm, num_nvl_bytes=NUM_BYTES, handle_type=handle_type)


def refusal(comm: MPI.Intracomm, handle_type: str) -> str | None:
    """What this rank's error says if it cannot have memory of the type."""
    try:
        nbep.Buffer(comm, num_nvl_bytes=NUM_BYTES, handle_type=handle_type).destroy()
    except RuntimeError as error:
        return str(error)
    return None


def run(comm: MPI.Intracomm, handle_type: str) -> str:
    """What came of it, in words."""
    reason = refusal(comm, handle_type)
    if reason is not None:
        assert comm.allgather(reason) == [reason] * comm.size
        assert f"handle_type: got {handle_type}; GPU" in reason, reason
        assert "does not offer it" in reason, reason
        check_memory(comm, "ipc")  # the refusal is in the way of no other type
        return f"not offered: {reason}"
    files = []
    for _ in range(ROUNDS):
        check_memory(comm, handle_type)
        check_failures(comm, handle_type)
        files.append(num_open_files())
    assert files == files[:1] * ROUNDS
    return "all right"


def main() -> int:
    comm = MPI.COMM_WORLD
    handle_type = sys.argv[1] if len(sys.argv) > 1 else "ipc"

    def run_all() -> str:
        outcome = run(comm, handle_type)
        comm.barrier()  # what rank 0 prints is true of all
        return outcome

    outcome = mpi_main.on_own_gpu(comm, run_all)
    if comm.rank == 0:
        print(f"{handle_type} handles between {comm.size} processes: {outcome}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
