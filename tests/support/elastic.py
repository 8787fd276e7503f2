"""`nbep.workloads.elastic` on the target of the tests, with its arrays: see target.py and arrays.py."""

# ruff: noqa: F401  # tests import from here what is the same on all targets

import pytest
from arrays import LIBRARY
from cases import Case
from target import spawn

from nbep.workloads.elastic import (
    ElasticExpected,
    ElasticOptions,
    ElasticOutcome,
    Trip,
    call,
    check,
    dispatch_arguments,
    form,
    make_elastic_buffer,
    num_max_tokens,
    round_trip,
)


def run(case: Case, options: ElasticOptions | None = None, *, fn=round_trip, seed: int = 0, **spawn_options) -> list:
    """Run fn(comm, case, options) on every rank and compare what it returns with the reference."""
    options = options or ElasticOptions()
    if options.fp8 is not None and LIBRARY == "cupy":
        pytest.skip("CuPy has no float8 dtype")
    outcomes = spawn(fn, case.num_ranks, (case, options), seed, **spawn_options)
    check(case, options, outcomes, f"schedule {seed}")
    return outcomes
