"""Random rounds between nodes with one process per GPU: fresh routing, sizes, configs and options, all on one buffer.

    mpirun -n 4 python tests/cuda/internode_main.py [--rounds 500] [--seed 0] [--num-nvl-peers 2]
        [--transport direct|ibgda|nvshmem] [--num-qps 24]

Every rank compares what it gets bit for bit. The first round that is wrong on any rank ends the run. The exit code is 0
if none is.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mpi_main  # sets the environment, so it comes first
from internode_rounds import Sizes, make_round, num_bytes, wrong_in
from mpi4py import MPI
from network_options import add_network_options, network_arguments

import nbep

SIZES = Sizes()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    add_network_options(parser)
    parser.set_defaults(num_nvl_peers=2)
    return parser.parse_args()


def run(comm: MPI.Intracomm, options: argparse.Namespace) -> int:
    """How many ranks were wrong in the last round that was run."""
    say = print if comm.rank == 0 else lambda *_, **__: None
    num_nvl_peers = options.num_nvl_peers
    num_nodes = comm.size // num_nvl_peers
    buffer = nbep.Buffer(comm, **num_bytes(num_nodes, num_nvl_peers, SIZES), **network_arguments(options))
    rng = random.Random(options.seed)
    num_wrong = 0
    for number in range(options.rounds):
        a_round = make_round(rng, num_nodes, num_nvl_peers, SIZES)
        try:
            wrong = wrong_in(buffer, [a_round], f"round {number}")
        except (ValueError, RuntimeError) as error:  # the peers' waits are over in a while, and then they are here too
            wrong = [f"{type(error).__name__}: {error}"]
        everyone = comm.allgather(wrong)
        num_wrong = sum(1 for texts in everyone if texts)
        if num_wrong:
            say(f"wrong: round {number}, {a_round}")
            for rank, texts in enumerate(everyone):
                say(f"  rank {rank}: {'; '.join(texts) or 'right'}", flush=True)
            break
    else:
        nodes = f"{num_nodes} nodes of {num_nvl_peers} GPUs"
        say(f"{options.rounds} rounds between {nodes}: 0 wrong", flush=True)
    buffer.destroy()
    return num_wrong


def main() -> int:
    comm, options = MPI.COMM_WORLD, parse()
    return 1 if mpi_main.on_own_gpu(comm, lambda: run(comm, options)) else 0


if __name__ == "__main__":
    sys.exit(main())
