"""Round trips with one process per GPU: every rank compares what it gets with the reference.

    mpirun -n 8 python tests/cuda/mpi_main.py [ipc|posix_fd|fabric|host]

The exit code is 0 if every rank got everything right.
"""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path[:0] = [str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[1] / "support")]
os.environ["NBEP_TARGET"] = "cuda"
os.environ["NBEP_TEST_TARGET"] = "cuda"
os.environ["NBEP_TIMEOUT_MS"] = os.environ.get("NBEP_TIMEOUT_MS", "30000")

import torch
from mpi4py import MPI
from rounds import rounds, wrong_rounds

Result = TypeVar("Result")


def take_gpu(comm: MPI.Intracomm) -> None:
    """Make the GPU with this process's number on its host the current one."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    torch.cuda.set_device(node.rank % torch.cuda.device_count())
    node.Free()
    torch.zeros(1, device="cuda")


def on_own_gpu(comm: MPI.Intracomm, fn: Callable[[], Result]) -> Result:
    """What fn() returns, with a GPU of its own as this process's current one. If it fails, all processes end."""
    try:
        take_gpu(comm)
        return fn()
    except BaseException:  # the peers would wait for this rank for ever
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
        raise


def main() -> int:
    comm = MPI.COMM_WORLD
    handle_type = sys.argv[1] if len(sys.argv) > 1 else "ipc"
    wrong = on_own_gpu(comm, lambda: comm.allreduce(wrong_rounds(comm, comm.rank, comm.size, handle_type)))
    if comm.rank == 0:
        print(f"{len(rounds(comm.size))} {handle_type} rounds on {comm.size} GPUs: {wrong} wrong", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
