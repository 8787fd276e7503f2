"""NVSHMEM in one process, under torch: set up and torn down twice, and again after a buffer whose NIC is not there.

    mpirun -n 2 python tests/cuda/nvshmem_main.py

The exit code is 0 if every round trip was right on all ranks, and the missing NIC was named.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
from low_latency import Options, Trip, make_buffer, make_low_latency_case
from low_latency_rounds import wrong_names
from mpi4py import MPI


def round_trip(comm: MPI.Intracomm, seed: int, **network: object) -> list[str]:
    """What is wrong on this rank in a round trip with a buffer of its own."""
    options = Options(use_fp8=True)
    case = make_low_latency_case(seed, num_ranks=comm.size, num_tokens=[7] * comm.size, num_topk=3, hidden=512)
    buffer = make_buffer(comm, [(case, options)], num_nvl_peers=1, **network)
    outcome = Trip(buffer, case, options).whole()
    buffer.destroy()
    return wrong_names(case, options, comm.rank, outcome)


def run(comm: MPI.Intracomm) -> int:
    """How many steps went wrong on any rank."""
    num_wrong = 0
    for seed in range(3):
        wrong = round_trip(comm, seed, transport="nvshmem")
        for text in wrong:
            print(f"buffer {seed}, rank {comm.rank}: {text}", flush=True)
        num_wrong += any(comm.allgather(bool(wrong)))
    return num_wrong


def main() -> int:
    comm = MPI.COMM_WORLD
    num_wrong = mpi_main.on_own_gpu(comm, lambda: run(comm))
    if comm.rank == 0:
        print(f"NVSHMEM three times on {comm.size} GPUs: {num_wrong} wrong", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
