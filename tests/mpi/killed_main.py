"""What test_kills.py runs, once per rank: calls on buffers, until one rank is killed.

python killed_main.py VICTIM STEP
"""

import os
import signal
import sys
from itertools import count

from cases import make_case
from intranode import Options, combine, dispatch, num_nvl_bytes
from mpi4py import MPI

import nbep


def main(victim: int, last_step: int) -> None:
    """The victim ends before its step of this number, or within it, while its kernels run."""
    comm, steps = MPI.COMM_WORLD, count()
    case, options = make_case(21, num_ranks=comm.size, num_tokens=3), Options(nbep.Config(2, 2, 4))

    def step() -> None:
        if next(steps) == last_step and comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    while True:
        step()
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
        step()
        outcome = dispatch(buffer, case, options, comm.rank)
        step()
        combine(buffer, case, options, comm.rank, outcome)
        step()
        buffer.dispatch(case.x[comm.rank], outcome.handle, config=options.config, async_finish=True)
        step()
        buffer.destroy()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
