"""Low-latency calls that differ, with one process per GPU: each rank reports what both have passed.

    mpirun -n 4 python tests/cuda/differ_main.py

The exit code is 0 if every report is right.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "mpi")]

import mpi_main  # sets the environment, so it comes first
from low_latency_programs import calls_that_differ
from mpi4py import MPI


def main() -> None:
    comm = MPI.COMM_WORLD
    mpi_main.on_own_gpu(comm, lambda: calls_that_differ(comm))
    comm.barrier()
    if comm.rank == 0:
        print(f"calls that differ on {comm.size} GPUs: 0 wrong", flush=True)


if __name__ == "__main__":
    main()
