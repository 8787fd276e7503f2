"""`nbep.specimens.workloads.intranode` on the target of the tests, with its arrays: see target.py and arrays.py."""

# ruff: noqa: F401  # tests import from here what is the same on all targets

import pytest
from arrays import LIBRARY, assert_kind, to_target
from cases import Case
from target import spawn

from nbep.specimens.workloads.cases import Report
from nbep.specimens.workloads.intranode import (
    CONFIG,
    DEFAULTS,
    FACTORS,
    Expected,
    Options,
    Outcome,
    biases,
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


def cached_round_trip(comm, case: Case, options: Options) -> Outcome:
    """Dispatch, cached dispatch of the same x, combine: with the rings used before each."""
    buffer = make_buffer(comm, case, options)
    outcome = dispatch(buffer, case, options, buffer.rank)
    x = to_target(dispatch_input(case, options, buffer.rank))
    cached_x, *nothing, event = buffer.dispatch(x, handle=outcome.handle, config=options.config, **options.way)
    outcome.cached_x = kept(options, cached_x)
    assert nothing == [None] * 4
    assert_kind(outcome.cached_x)
    assert event is not None
    combine(buffer, case, options, buffer.rank, outcome)
    buffer.destroy()
    return outcome


def run(case: Case, options: Options | None = None, *, fn=round_trip, seed: int = 0, **spawn_options) -> list[Outcome]:
    """Run fn(comm, case, options) on every rank and compare what it returns with the reference."""
    options = options or Options()
    if options.fp8 is not None and LIBRARY == "cupy":
        pytest.skip("CuPy has no float8 dtype")
    outcomes = spawn(fn, case.num_ranks, (case, options), seed, **spawn_options)
    check(case, options, outcomes, seed)
    return outcomes
