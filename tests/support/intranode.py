"""`nbep.workloads.intranode` on the target of the tests, with its arrays: see target.py and arrays.py."""

# ruff: noqa: F401  # tests import from here what is the same on all targets

import pytest
from arrays import LIBRARY
from cases import Case
from target import spawn

from nbep.workloads.compare import Report
from nbep.workloads.intranode import (
    CONFIG,
    DEFAULTS,
    FACTORS,
    Expected,
    Options,
    Outcome,
    biases,
    cached_round_trip,
    check,
    check_handle,
    check_layout,
    check_received,
    check_x,
    combine,
    copied_heads,
    dispatch,
    dispatch_arguments,
    dispatch_input,
    expected_combine,
    expected_dispatch,
    expert_output,
    expert_weights,
    kept,
    make_buffer,
    make_buffer_for,
    num_nvl_bytes,
    num_zero_copy_bytes,
    outcome_of,
    round_trip,
    with_channels,
)


def run(case: Case, options: Options | None = None, *, fn=round_trip, seed: int = 0, **spawn_options) -> list[Outcome]:
    """Run fn(comm, case, options) on every rank and compare what it returns with the reference."""
    options = options or Options()
    if options.fp8 is not None and LIBRARY == "cupy":
        pytest.skip("CuPy has no float8 dtype")
    outcomes = spawn(fn, case.num_ranks, (case, options), seed, **spawn_options)
    check(case, options, outcomes, seed)
    return outcomes
