"""Kernels without rings, broken on purpose, are caught: every step that orders memory is left out once.

`faults_of` finds them in the source, so a new one is tested, too. A few of them order nothing: NOT_NEEDED says why.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from cases import make_case
from intranode import (
    Options,
    Outcome,
    check,
    combine,
    dispatch,
    dispatch_arguments,
    dispatch_input,
    make_buffer_for,
)
from parts import both_parts
from table import LEFT_OUT
from target import spawn
from trips import cached_dispatch

import nbep
from nbep.check import broken
from nbep.check.catalogue import faults_of
from nbep.device import primitives
from nbep.device.kernels.intranode import direct_combine, direct_dispatch
from nbep.device.protocols import staged_sums, waits

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")

FAULTS = [
    fault
    for fault in faults_of(direct_dispatch, direct_combine, staged_sums, waits.wait_blocks_arrived, waits.wait_landed)
    if fault.kind in LEFT_OUT
]


class Program(NamedTuple):
    """What is run on one buffer: two rounds of dispatch, cached dispatch and combine."""

    options: Options
    shape: dict[str, Any]  # of make_case
    has_tma: bool = True

    def run(self, seed: int, memory_model: str) -> None:
        """Raises: AssertionError for wrong results; EmulatorError"""
        shape = {"num_tokens": (9, 5), "num_topk": 2, "routing": "everywhere", **self.shape}
        rounds = [(make_case(i, **shape), self.options) for i in range(2)]

        def main(comm) -> list[Outcome]:
            comm.runtime.world.has_tma = self.has_tma
            buffer = make_buffer_for(comm, rounds)
            outcomes = []
            for case, options in rounds:
                outcome = dispatch(buffer, case, options, comm.rank)
                outcome.cached_x = cached_dispatch(
                    buffer, dispatch_input(case, options, comm.rank), outcome.handle, options
                )
                combine(buffer, case, options, comm.rank, outcome)
                outcomes.append(outcome)
            buffer.destroy()
            return outcomes

        by_rank = spawn(main, rounds[0][0].num_ranks, (), seed, memory_model=memory_model)
        for (case, options), outcomes in zip(rounds, zip(*by_rank, strict=True), strict=True):
            check(case, options, list(outcomes), seed)


TWO_WARPS = nbep.Config(2, 2, 3, num_threads=64)
PROGRAMS = [
    Program(Options(TWO_WARPS, zero_copy=True), {}),
    Program(Options(nbep.Config(4, 1, 3), fp8="row", zero_copy=True), {"hidden": 512}),
    Program(Options(TWO_WARPS, zero_copy=True), {}, has_tma=False),
    # A row takes two stages, and a sum several pieces.
    Program(Options(TWO_WARPS, num_biases=1, zero_copy=True), {"hidden": 4608, "num_tokens": (3, 2)}),
]


def is_caught(memory_model: str, programs: Sequence[Program] = PROGRAMS, seeds: Sequence[int] = range(4)) -> bool:
    """Whether a program ends in wrong results or in an error of the emulator, under one of the schedules."""
    for seed in seeds:
        for program in programs:
            try:
                program.run(seed, memory_model)
            except (AssertionError, nbep.EmulatorError):
                return True
    return False


LISTED = "list_rows has one before the first copy"
UNSEEN = "on the emulator the engine sees an mbarrier at once"
NOT_NEEDED = {
    "intranode.direct_combine.sum_token: syncwarp": "the shuffle that brings the next token stands behind it, too",
    "staged_sums.open_sum_stage: syncwarp": LISTED,
    "staged_sums.open_sum_stage: fence_mbarrier_init": UNSEEN,
    "staged_sums.open_sum_stage: fence_proxy_async_shared": UNSEEN,
}
NEEDED = [fault for fault in FAULTS if fault.name not in NOT_NEEDED]
PAIRS = ("release", "acquire")  # and the other steps are thorough


@pytest.mark.thorough
@pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
def test_unbroken_kernels_are_not_caught(memory_model):
    assert not is_caught(memory_model, seeds=range(1))


@pytest.mark.parametrize(
    "fault",
    both_parts(
        [(fault.name,) for fault in NEEDED if fault.kind in PAIRS],
        thorough=[(fault.name,) for fault in NEEDED if fault.kind not in PAIRS],
    ),
)
def test_a_step_that_is_left_out_is_caught(fault):
    with broken(fault):
        assert is_caught("checked")


def test_slots_that_are_announced_while_their_copies_are_under_way_are_a_data_race(monkeypatch):
    """The stage has been read, which is enough for the next load only.

    In dispatch the emulator does not see it: what reads the rows comes behind the peers' next barrier, or is a host.
    """
    case = make_case(1, num_tokens=9, num_topk=2, routing="everywhere")
    options = Options(TWO_WARPS, zero_copy=True)

    def in_place(comm):
        buffer = make_buffer_for(comm, [(case, options)])
        recv_x, *_, handle, _ = buffer.dispatch(**dispatch_arguments(buffer, case, options, comm.rank)[1])
        buffer.combine(recv_x, handle, config=options.config, zero_copy=True)
        buffer.destroy()

    spawn(in_place, 2, (), 0, memory_model="checked")
    monkeypatch.setattr(
        importlib.import_module(direct_combine.__name__), "tma_store_wait_all", primitives.tma_store_wait_read_all
    )

    def run_all():
        for seed in range(20):
            spawn(in_place, 2, (), seed, memory_model="checked")

    with pytest.raises(nbep.DataRace, match="slot"):
        run_all()


def test_no_step_is_said_to_be_needless_that_is_not_there():
    assert NOT_NEEDED.keys() <= {fault.name for fault in FAULTS}
