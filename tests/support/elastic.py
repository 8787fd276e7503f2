"""`nbep.specimens.workloads.elastic` on the target of the tests, with its arrays: see target.py and arrays.py."""

# ruff: noqa: F401  # tests import from here what is the same on all targets

from collections import Counter
from typing import Any

import pytest
from arrays import LIBRARY
from calls import hold_back
from cases import Case
from target import spawn

import nbep
from nbep.emulator.machine.names import NIC_NUMBERS
from nbep.specimens.workloads.elastic import (
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
    received_trips,
    round_trip,
)


class Crossings:
    """A tracer that counts what comes to the RDMA buffers of ranks, and from where, by what `find` makes of it."""

    def __init__(self) -> None:
        self.found: Counter[tuple[int, ...]] = Counter()

    def on_copy(self, thread, allocation, offset, data, site):
        self._note(thread, allocation, offset)

    def on_store(self, thread, allocation, offset, kind, value, order, scope):
        self._note(thread, allocation, offset)

    def _note(self, thread, allocation, offset):
        if allocation.name == "rdma_buffer":
            key = self.find(allocation.describe(offset), thread.rank % NIC_NUMBERS, allocation.rank)
            if key is not None:
                self.found[key] += 1

    def find(self, name: str, src: int, dst: int) -> tuple[int, ...] | None:
        """What to count for a cell, by its name, of rank dst, to which rank src or its NIC has stored; or None."""
        raise NotImplementedError


def run(case: Case, options: ElasticOptions | None = None, *, fn=round_trip, seed: int = 0, **spawn_options) -> list:
    """Run fn(comm, case, options) on every rank and compare what it returns with the reference."""
    options = options or ElasticOptions()
    if options.fp8 is not None and LIBRARY == "cupy":
        pytest.skip("CuPy has no float8 dtype")
    outcomes = spawn(fn, case.num_ranks, (case, options), seed, **spawn_options)
    check(case, options, outcomes, f"schedule {seed}")
    return outcomes


def time_outs(case: Case, options: ElasticOptions, kernel: str, **spawn_options: Any) -> list[nbep.PeerTimeout]:
    """What ranks raise, in turn, if rank 1 launches a kernel only after another one has given up."""
    raised: list[nbep.PeerTimeout] = []

    def main(comm: Any) -> None:
        buffer = make_elastic_buffer(comm, [(case, options)])
        trip = Trip(buffer, case, options)
        with pytest.MonkeyPatch.context() as patch:
            if comm.rank == 1:
                hold_back(patch, kernel, raised)
            try:
                trip.dispatch()
                trip.receive()
                trip.combine()
                trip.end()
            except nbep.PeerTimeout as error:
                raised.append(error)
        buffer.destroy()

    spawn(main, case.num_ranks, on_deadlock="expire", **spawn_options)
    return raised
