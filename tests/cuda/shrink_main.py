"""A process that exits between two low-latency calls, one process per GPU: the others go on without it.

    mpiexec -disable-auto-cleanup -n 3 python tests/cuda/shrink_main.py [--deduplicate]
        [--transport direct|ibgda] [--num-nvl-peers 1] [--num-qps 24]

Each of the others prints "rank r is done". Rank 1 exits with status 3, so mpiexec's status is not 0.
"""

import argparse
import os
import sys
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("NBEP_TIMEOUT_MS", "5000")
sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
import numpy as np
from arrays import to_numpy, to_target
from low_latency import HOOK, Options, Trip, make_buffer, make_low_latency_case
from masked import check_survivor
from mpi4py import MPI
from network_options import add_network_options, network_arguments

GONE = 1
STATUS = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--deduplicate", action="store_true")
    add_network_options(parser)
    return parser.parse_args()


def run(comm: MPI.Intracomm, given: argparse.Namespace) -> None:
    """The trips of this rank. Rank 1 does not come back from the second one."""
    num_tokens = [(5 * rank + 3) % 8 for rank in range(comm.size)]
    cases = [
        make_low_latency_case(seed, num_ranks=comm.size, num_tokens=num_tokens, num_topk=3, hidden=512)
        for seed in range(4)
    ]
    options = Options(use_fp8=True, deduplicate=given.deduplicate, dispatch_as=HOOK, combine_as=HOOK)
    # Memory that a file descriptor stands for lives until the last process that has mapped it lets go of it.
    trips = [(case, options) for case in cases]
    buffer = make_buffer(comm, trips, enable_shrink=True, handle_type="posix_fd", **network_arguments(given))
    outcomes = [Trip(buffer, cases[0], options).whole()]
    trip = Trip(buffer, cases[1], options)
    trip.send_dispatch()
    trip.receive_dispatch()
    comm.barrier()  # all have mapped what they need, and no rank waits for the one that goes
    if comm.rank == GONE:
        os._exit(STATUS)
    trip.send_combine()
    trip.receive_combine()
    outcomes.append(trip.outcome)
    outcomes += [Trip(buffer, case, options).whole() for case in cases[2:]]
    status = to_target(np.zeros(comm.size, np.int32))
    buffer.low_latency_query_mask_buffer(status)
    assert to_numpy(status).tolist() == [int(rank == GONE) for rank in range(comm.size)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer.destroy()
    assert any(f"destroy does not wait for rank {GONE}, masked" in str(warning.message) for warning in caught)
    check_survivor(cases[0], options, comm.rank, outcomes[0], [], [])
    check_survivor(cases[1], options, comm.rank, outcomes[1], [], [GONE])
    for case, outcome in zip(cases[2:], outcomes[2:], strict=True):
        check_survivor(case, options, comm.rank, outcome, [GONE], [GONE])


def main() -> None:
    comm, given = MPI.COMM_WORLD, parse()
    try:
        mpi_main.take_gpu(comm)
        run(comm, given)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
    print(f"rank {comm.rank} is done", flush=True)
    os._exit(0)  # at its usual end Python finalizes MPI, which waits for the rank that is gone


if __name__ == "__main__":
    main()
