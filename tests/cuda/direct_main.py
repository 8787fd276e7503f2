"""Calls without rings, with one process per GPU: are they right, how fast are they, and what do they cost the CPU?

    mpirun -n 2 python tests/cuda/direct_main.py [--sms 4,6,8,12,16] [--rounds 300] [--out FOLDER]

In this order: round trips against the reference; rounds of the soak, through rings and without; a profile of the host
for cached dispatches of both ways; the benchmark without rings, splits of combine's SMs included; that of the rings.
Each part prints what it finds at once. The exit code is 0 if everything was right. It takes about two minutes.
"""

import argparse
import cProfile
import io
import pstats
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "tools")]

import bench_soak
import mpi_main  # sets the environment, so it comes first
from intranode import Expected
from mpi4py import MPI
from rounds import rounds_without_rings

import nbep
from nbep.bench import intranode
from nbep.bench.harness.command import numbers
from nbep.bench.harness.normal_calls import DISPATCH_BF16

NUM_PROFILED = 200


def say(comm: MPI.Intracomm, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)


def wrong_round_trips(comm: MPI.Intracomm) -> int:
    """How many round trips go wrong on this rank."""
    wrong = 0
    for number, (fn, case, options) in enumerate(rounds_without_rings(comm.size)):
        outcome = fn(comm, case, options)
        try:
            Expected(case, options).check(comm.rank, outcome, f"round {number}, rank {comm.rank}")
        except AssertionError:
            traceback.print_exc()
            wrong += 1
    return wrong


def profile_host(comm: MPI.Intracomm, zero_copy: bool) -> None:
    """Where the CPU's time for a cached dispatch goes, and how much it is without the profiler."""
    import torch

    flags = ["--tokens", "512", "--sms", "8", *(["--zero-copy"] if zero_copy else [])]
    setup = intranode.prepare(comm, intranode.parse(flags))
    config = nbep.Config(8, 4, 256)
    way = {"zero_copy": zero_copy}
    x = setup.inputs.xs[DISPATCH_BF16]
    handle = setup.buffer.dispatch(x, config=config, **setup.layout, **way)[4]
    spent = []
    profile = cProfile.Profile()
    for number in range(2 * NUM_PROFILED):
        torch.cuda.current_stream().synchronize()
        comm.barrier()
        if number >= NUM_PROFILED:
            profile.enable()
        start = time.perf_counter()
        setup.buffer.dispatch(x, handle=handle, config=config, **way)
        spent.append(1e6 * (time.perf_counter() - start))
        profile.disable()
    torch.cuda.current_stream().synchronize()
    spent = sorted(spent[NUM_PROFILED // 4 : NUM_PROFILED])
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    median, least = spent[len(spent) // 2], spent[0]
    say(comm, f"host cost of a cached dispatch, zero_copy={zero_copy}: median {median:.1f} us, least {least:.1f} us")
    say(comm, "\n".join(line for line in text.getvalue().splitlines() if line.strip())[:6000])
    setup.buffer.destroy()


def parts(comm: MPI.Intracomm, options: argparse.Namespace) -> int:
    """All parts on this rank; how many things were wrong."""
    wrong = comm.allreduce(wrong_round_trips(comm))
    say(comm, f"{len(rounds_without_rings(comm.size))} round trips on {comm.size} GPUs: {wrong} wrong")
    wrong += not bench_soak.soak(comm, argparse.Namespace(rounds=options.rounds, seed=0))
    for zero_copy in (False, True):
        profile_host(comm, zero_copy)
    sms = ",".join(map(str, options.sms))
    common = ["--sms", sms, "--repeat", "15"]
    for name, flags in (("zero_copy", ["--zero-copy", "--chunks", "4,8"]), ("rings", ["--chunks", "12,24,48"])):
        say(comm, f"{name}, {time.strftime('%X')}")
        intranode.measure_rank(comm, intranode.parse([*common, *flags, "--json", str(options.out / f"{name}.json")]))
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sms", type=numbers, default=[4, 6, 8, 12, 16])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    comm = MPI.COMM_WORLD
    wrong = mpi_main.on_own_gpu(comm, lambda: parts(comm, options))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
