"""Trips of `nbep.specimens.workloads.low_latency` on the target of the tests, with its arrays: see target.py and
arrays.py."""

# ruff: noqa: F401  # tests import from here what is the same on all targets

from collections.abc import Sequence

import pytest
from arrays import LIBRARY
from cases import ROUTINGS, Case
from target import TARGET, spawn

from nbep.device.cards import SM90
from nbep.specimens.workloads import low_latency
from nbep.specimens.workloads.cases import make_low_latency_case
from nbep.specimens.workloads.low_latency import (
    ASYNC,
    BOTH,
    FACTORS,
    HOOK,
    STATS_BEFORE,
    Options,
    Outcome,
    Trip,
    check_combined,
    check_dispatched,
    expected_combine,
    expected_dispatch,
    expert_output,
    make_buffer,
    num_max_tokens,
    num_rdma_bytes,
)

LOW_LATENCY_ROUTINGS = (*ROUTINGS, "one_expert")


def prepare(comm, options: Options) -> None:
    """Set up the world of a rank; before it makes its buffer."""
    if TARGET == "emulator":
        comm.runtime.world.compute_capability = options.compute_capability


def round_trip(comm, case: Case, options: Options) -> Outcome:
    """One rank's dispatch and combine with a buffer of its own."""
    prepare(comm, options)
    buffer = make_buffer(comm, [(case, options)])
    outcome = Trip(buffer, case, options).whole()
    buffer.destroy()
    return outcome


def run(case: Case, options: Options | None = None, *, fn=round_trip, seed: int = 0, **spawn_options) -> list[Outcome]:
    """Run fn(comm, case, options) on every rank and compare what it returns with the reference."""
    options = options or Options()
    skip_what_the_target_lacks(options)
    outcomes = spawn(fn, case.num_ranks, (case, options), seed, **spawn_options)
    check(case, options, outcomes, f"inputs {case.seed}, schedule {seed}")
    return outcomes


def check(case: Case, options: Options, outcomes: Sequence[Outcome], where: str) -> None:
    """Compare all outputs of all ranks. A failure names seeds, options, rank, array and the first wrong token's way."""
    low_latency.check(case, options, outcomes, f"{where}, {options}")


def skip_what_the_target_lacks(*all_options: Options) -> None:
    if LIBRARY == "cupy" and any(options.use_fp8 for options in all_options):
        pytest.skip("CuPy has no float8 dtype")
    if TARGET != "emulator" and not all(options.compute_capability == SM90 for options in all_options):
        pytest.skip("a GPU has its copy engine or has it not")
