"""Kernels over queue pairs of the software NIC, one process per GPU; see network_programs.py.

    mpirun -n 2 python tests/cuda/network_main.py

The exit code is 0 if nothing was wrong on any rank.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
from mpi4py import MPI
from network_programs import PROGRAMS

ORDER = [*PROGRAMS, "writes"]  # again, after the faults


def run(comm: MPI.Intracomm) -> int:
    """How many programs went wrong on any rank."""
    num_wrong = 0
    for name in ORDER:
        wrong = PROGRAMS[name](comm)
        for text in wrong:
            print(f"{name}, rank {comm.rank}: {text}", flush=True)
        num_wrong += any(comm.allgather(bool(wrong)))
    return num_wrong


def main() -> int:
    comm = MPI.COMM_WORLD
    num_wrong = mpi_main.on_own_gpu(comm, lambda: run(comm))
    if comm.rank == 0:
        print(f"{len(ORDER)} network programs on {comm.size} GPUs: {num_wrong} wrong", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
