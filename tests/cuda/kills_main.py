"""Ranks that are killed or stopped at random moments, with a GPU each; see tests/mpi/killed_main.py.

    python tests/cuda/kills_main.py [--kills 30] [--stops 10] [--at-once 10] [--seed 0] [--target cuda]

A run is four processes under MPICH's mpiexec; several runs share the GPUs, and the next one starts as soon as one has
ended. The exit code is 0 if all survivors ended by themselves and named the rank, and nothing stayed in the temporary
folder and in /dev/shm, but MPICH's own files.
"""

import argparse
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path[:0] = [str(folder) for folder in (HERE.parents[1], HERE.parent / "support")]

from kills import MPICH_FILE, NUM_RANKS, PROGRAM, last_words, who_does_not_name
from processes import run_within, surviving_mpirun

KINDS = ("intranode", "nodes", "internode")
LONGEST_MS = 2000  # a process makes its first buffer in about one second, and later ones at once
MOST_STEPS = 20
LIMIT_S = 60.0


class Plan(NamedTuple):
    """The arguments of killed_main.py."""

    victim: int
    signal: str
    kind: str
    when: str
    number: int


class Outcome(NamedTuple):
    plan: Plan
    seconds: float  # from the signal to the end of the last process
    faults: list[str]  # what is not as it must be
    output: str


def make_plans(rng: random.Random, name: str, number: int) -> list[Plan]:
    """Half of the moments are steps of the program, between and before its calls; half are times, inside of any."""
    plans = []
    for i in range(number):
        when, most = (("step", MOST_STEPS), ("after", LONGEST_MS))[i % 2]
        plans.append(Plan(rng.randrange(NUM_RANKS), name, KINDS[i // 2 % len(KINDS)], when, rng.randrange(most)))
    return plans


def run(plan: Plan, command: Sequence[str], target: str) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="run") as folder:
        status, output = run_within(
            LIMIT_S,
            [*command, sys.executable, str(PROGRAM), *map(str, plan)],
            NBEP_TARGET=target,
            NBEP_TEST_TARGET=target,
            TMPDIR=folder,
        )
        if status is None:
            return Outcome(plan, LIMIT_S, [f"not done after {LIMIT_S} s"], output)
        faults = [f"{path} stayed" for path in Path(folder).iterdir()]
    faults += [f"rank {rank} does not name it" for rank in who_does_not_name(plan.victim, last_words(output))]
    moment = re.search(r"^at (\d+\.\d+)", output, re.MULTILINE)
    return Outcome(plan, time.time() - float(moment[1]) if moment else 0.0, faults, output)


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if MPICH_FILE not in path.name}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=("cuda", "emulator"), default="cuda")
    options = parser.parse_args()
    os.environ.setdefault("NBEP_TIMEOUT_MS", "2000")
    rng = random.Random(options.seed)
    plans = make_plans(rng, "KILL", options.kills) + make_plans(rng, "STOP", options.stops)
    before, command = shared_files(), surviving_mpirun(NUM_RANKS)
    start, wrong, longest = time.monotonic(), 0, 0.0
    with ThreadPoolExecutor(options.at_once) as pool:
        for done in as_completed([pool.submit(run, plan, command, options.target) for plan in plans]):
            outcome = done.result()
            longest = max(longest, outcome.seconds)
            wrong += bool(outcome.faults)
            print(*outcome.plan, f"{outcome.seconds:.1f} s", *outcome.faults, flush=True)
            if outcome.faults:
                print(outcome.output, flush=True)
    if stayed := shared_files() - before:
        wrong += 1
        print(f"in /dev/shm stayed {', '.join(sorted(stayed))}")
    print(
        f"{options.kills} kills and {options.stops} stops of {NUM_RANKS} processes: {wrong} wrong; from the signal to "
        f"the end of the last process {longest:.1f} s at most; {time.monotonic() - start:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
