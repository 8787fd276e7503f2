"""Random low-latency rounds with one process per GPU: each with fresh routing, sizes and options, all on one buffer.

    mpirun -n 4 python tests/cuda/low_latency_main.py [--rounds 3000] [--seed 0]
        [--handle-type ipc|posix_fd|fabric|host] [--transport direct|ibgda|nvshmem] [--num-nvl-peers 2] [--num-qps 24]

Every rank compares what it gets bit for bit, rows in LogFMT up to their rounding. The first round that is wrong on any
rank ends the run. The exit code is 0 if none is.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
from low_latency_rounds import Sizes, make_plan, num_rdma_bytes, run_plan
from mpi4py import MPI
from network_options import add_network_options, network_arguments

import nbep
from nbep.host.target.memory import HandleType

SIZES = Sizes()
PROGRESS_S = 20.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--handle-type", default="ipc", choices=get_args(HandleType))
    add_network_options(parser)
    return parser.parse_args()


def run(comm: MPI.Intracomm, options: argparse.Namespace) -> int:
    """How many ranks were wrong in the last round that was run."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    buffer = nbep.Buffer(
        comm,
        num_rdma_bytes=num_rdma_bytes(comm.size, SIZES),
        low_latency_mode=True,
        handle_type=options.handle_type,
        **network_arguments(options),
    )
    rng = random.Random(options.seed)
    begin = last = time.monotonic()
    num_wrong = 0
    for number in range(options.rounds):
        plan = make_plan(rng, number, comm.size, SIZES)
        try:
            wrong = run_plan(buffer, plan)
        except (ValueError, RuntimeError) as error:  # the peers' waits are over in a while, and then they are here too
            wrong = [f"{type(error).__name__}: {error}"]
        everyone = comm.allgather(wrong)
        num_wrong = sum(1 for names in everyone if names)
        if num_wrong:
            say(f"wrong: {plan}")
            for rank, names in enumerate(everyone):
                say(f"  rank {rank}: {', '.join(names) or 'right'}", flush=True)
            break
        if time.monotonic() - last >= PROGRESS_S:
            last = time.monotonic()
            say(f"{number + 1} of {options.rounds} rounds are right, {last - begin:.0f} s", flush=True)
    else:
        say(f"{options.rounds} low-latency rounds on {comm.size} GPUs: 0 wrong, {time.monotonic() - begin:.0f} s")
    buffer.destroy()
    return num_wrong


def main() -> int:
    comm, options = MPI.COMM_WORLD, parse()
    return 1 if mpi_main.on_own_gpu(comm, lambda: run(comm, options)) else 0


if __name__ == "__main__":
    sys.exit(main())
