"""Kernels between nodes broken on purpose are caught: every step that orders memory is left out once.

`steps` finds them in the source, so a new one is tested, too. A few of them order nothing: NOT_NEEDED says why. The
steps of queue pairs and of the software NIC are left out by tests/network/test_broken_steps.py.
"""

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from internode import Options, make_node_case
from intranode import Outcome, cached_round_trip, check, combine, dispatch, make_buffer_for
from steps import Step, steps_of
from target import spawn

import nbep
import nbep.device.kernels.internode as kernels
from nbep.device import primitives
from nbep.device.kernels.internode import notify_dispatch

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")

MODULES = [
    *(f"{kernels.__name__}.{module.name}" for module in pkgutil.iter_modules(kernels.__path__)),
    *(f"nbep.device.protocols.{name}" for name in ("board", "messages", "teams", "totals")),
]


class Program(NamedTuple):
    """What is run: calls of one kind, on one buffer."""

    fn: Callable[..., list[Outcome]]
    options: Options
    shape: dict[str, Any]  # of make_node_case
    has_tma: bool = True

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self.options).items() if value != getattr(Options(), name)]
        shape = [f"{name}={value}" for name, value in self.shape.items()]
        return "-".join([self.fn.__name__, *changed, *shape, *([] if self.has_tma else ["without_tma"])])

    def run(self, seed: int, memory_model: str) -> None:
        """Raises: AssertionError for wrong results; EmulatorError"""
        shape = {"num_tokens": (16, 0, 9, 5), "num_topk": 4, "routing": "everywhere", **self.shape}
        rounds = [(make_node_case(i, **shape), self.options) for i in range(2)]

        def main(comm):
            comm.runtime.world.has_tma = self.has_tma
            if self.options.config.num_threads is not None:
                comm.runtime.notify_threads = 128
            return self.fn(comm, rounds)

        by_rank = spawn(main, rounds[0][0].num_ranks, (), seed, memory_model=memory_model)
        for (case, options), outcomes in zip(rounds, zip(*by_rank, strict=True), strict=True):
            check(case, options, list(outcomes), seed)


def in_turn(comm, rounds) -> list[Outcome]:
    """Dispatch and combine of each."""
    buffer = make_buffer_for(comm, rounds)
    outcomes = []
    for case, options in rounds:
        outcomes.append(dispatch(buffer, case, options, comm.rank))
        combine(buffer, case, options, comm.rank, outcomes[-1])
    buffer.destroy()
    return outcomes


def cached(comm, rounds) -> list[Outcome]:
    """A cached dispatch between them."""
    return [cached_round_trip(comm, case, options) for case, options in rounds]


PROGRAMS = [
    Program(in_turn, Options(), {}),
    Program(in_turn, Options(nbep.Config(2, 2, 4, 2, 4), fp8="row"), {"hidden": 128}),
    Program(cached, Options(nbep.Config(2, 3, 8, 1, 8)), {}),
    Program(in_turn, Options(transport="ibgda"), {}),
    Program(in_turn, Options(), {}, has_tma=False),
    # A row takes two stages.
    Program(in_turn, Options(nbep.Config(2, 2, 4, 2, 4)), {"hidden": 4608, "num_tokens": (3, 0, 1, 1)}),
    Program(in_turn, Options(nbep.Config(2, 2, 4, 2, 4)), {"hidden": 4608, "num_tokens": (3, 0, 1, 1)}, has_tma=False),
    # Several warps a team and in notify, and batches in which there is nothing for a rank.
    Program(in_turn, Options(nbep.Config(4, 2, 4, 2, 4, num_threads=320)), {"routing": "grouped", "num_topk": 2}),
]


def is_caught(memory_model: str, programs: Sequence[Program] = PROGRAMS, seeds: Sequence[int] = range(4)) -> bool:
    """Whether a program ends in wrong results or in an error of the emulator, under one of the schedules."""
    for seed in seeds:
        for program in programs:
            try:
                program.run(seed, memory_model)
            except (AssertionError, ValueError, nbep.EmulatorError):  # a ValueError: what a kernel has reported
                return True
    return False


# Steps that can be left out, and why.
NOT_NEEDED = {
    "cached_notify.come_together-amo_add-0": "publishes nothing: what the peers fill next has been loaded before",
    "combine_rdma_receiver.receive_sums-syncwarp-0": "list_rows has one behind what lanes write down",
    "dispatch_rdma_sender.send_token-syncwarp-1": "the lane that fills a place again is the one that has read it",
    "notify_dispatch.send_message-syncwarp-1": "quiet has one before it",
}
STEPS = [step for module in MODULES for step in steps_of(module)]


@pytest.mark.thorough
@pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_unbroken_kernels_are_not_caught(program, memory_model):
    program.run(1, memory_model)


@pytest.mark.thorough
@pytest.mark.parametrize("step", [step for step in STEPS if str(step) not in NOT_NEEDED], ids=str)
def test_a_step_that_is_left_out_is_caught(step: Step, monkeypatch):
    step.leave_out(monkeypatch)
    assert is_caught("checked")


@pytest.mark.parametrize(
    ("module", "function"),
    [
        ("nbep.device.kernels.internode.dispatch_forwarder", "find_batch"),
        ("nbep.device.protocols.totals", "wait_total"),
    ],
)
def test_a_tail_that_is_not_acquired_goes_wrong_if_loads_may_be_early(module, function, monkeypatch):
    Step(module, function, "ld_acquire_sys_s32", 0).leave_out(monkeypatch)
    assert is_caught("delayed", PROGRAMS[:1])


def test_no_step_is_said_to_be_needless_that_is_not_there():
    assert NOT_NEEDED.keys() <= {str(step) for step in STEPS}


@pytest.mark.parametrize("weaker", ["st_weak_s32", "st_relaxed_gpu_s32"])
def test_counts_that_the_cpu_polls_and_that_need_not_reach_it_are_a_data_race(weaker, monkeypatch):
    monkeypatch.setattr(notify_dispatch, "st_relaxed_sys_s32", getattr(primitives, weaker))
    with pytest.raises(nbep.DataRace, match="the CPU polls 4 bytes"):
        PROGRAMS[0].run(0, "checked")
