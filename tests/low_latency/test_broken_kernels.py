"""Low-latency kernels broken on purpose are caught: every step that orders memory is left out once.

`steps` finds them in the source, so a new one is tested, too. A few of them order nothing: NOT_NEEDED says why. The
steps of queue pairs and of the software NIC are left out by tests/network/test_broken_steps.py.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from cases import Case
from low_latency import HOOK, Options, Outcome, Trip, check, make_buffer, make_low_latency_case, prepare
from parts import both_parts
from steps import Step, change, steps_of
from target import spawn

import nbep
from nbep.device.kernels.low_latency import journal

pytestmark = pytest.mark.emulator_only("the kernels are broken in Python")

KERNELS = "nbep.device.kernels.low_latency"
SENDING = ("dispatch", "dispatch_sender", "dispatch_receiver")
MODULES = [
    *(f"{KERNELS}.{name}" for name in SENDING),
    *(f"{KERNELS}.{name}" for name in ("send_once", "expand")),
    *(f"{KERNELS}.{name}" for name in ("combine", "combine_sender", "combine_receiver", "sum_first")),
    *(f"{KERNELS}.{name}" for name in ("journal", "clean_low_latency_buffer")),
    "nbep.device.network.direct",
    "nbep.device.protocols.arrivals",
]


class Program(NamedTuple):
    """What is run: calls of one kind, on one buffer."""

    fn: Callable[..., list[Outcome]]
    options: Options
    shape: dict[str, Any]  # of make_low_latency_case

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in vars(self.options).items() if value != getattr(Options(), name)]
        return "-".join([self.fn.__name__, *options, *(f"{name}={value}" for name, value in self.shape.items())])

    def cases(self) -> list[Case]:
        shape = {"num_tokens": (7, 4), "num_topk": 3, "hidden": 256, **self.shape}
        return [make_low_latency_case(seed, **shape) for seed in range(3)]

    def run(self, seed: int, memory_model: str) -> None:
        """Raises: AssertionError for wrong results; EmulatorError"""
        cases = self.cases()
        outcomes = spawn(self.fn, cases[0].num_ranks, (cases, self.options), seed, memory_model=memory_model)
        for i, case in enumerate(cases):
            check(case, self.options, [of_rank[i] for of_rank in outcomes], f"trip {i}, schedule {seed}")


def one_by_one(comm, cases: Sequence[Case], options: Options) -> list[Outcome]:
    """Trips in turn."""
    prepare(comm, options)
    buffer = make_buffer(comm, [(case, options) for case in cases])
    outcomes = [Trip(buffer, case, options).whole() for case in cases]
    buffer.destroy()
    return outcomes


def two_at_a_time(comm, cases: Sequence[Case], options: Options) -> list[Outcome]:
    """All dispatches, then all combines, two calls under way: each is received when the next one is sent."""
    prepare(comm, options)
    options = replace(options, dispatch_as=HOOK, combine_as=HOOK)
    buffer = make_buffer(comm, [(case, options) for case in cases])
    trips = [Trip(buffer, case, options) for case in cases]
    trips[0].send_dispatch()
    for trip, following in pairwise(trips):
        following.send_dispatch()
        trip.receive_dispatch()
    trips[-1].receive_dispatch()
    trips[0].send_combine()
    for trip, following in pairwise(trips):
        following.send_combine()
        trip.receive_combine()
    trips[-1].receive_combine()
    buffer.destroy()
    return [trip.outcome for trip in trips]


def with_a_clean(comm, cases: Sequence[Case], options: Options) -> list[Outcome]:
    """clean_low_latency_buffer after each trip, and after a dispatch that nobody has received."""
    prepare(comm, options)
    comm.runtime.notify_threads = 128  # warps that do not know of each other by themselves
    buffer = make_buffer(comm, [(case, options) for case in cases])
    outcomes = []
    for case in cases:
        outcomes.append(Trip(buffer, case, options).whole())
        Trip(buffer, case, replace(options, dispatch_as=HOOK)).send_dispatch()
        buffer.clean_low_latency_buffer(max(case.num_tokens), case.hidden, case.num_experts)
    buffer.destroy()
    return outcomes


FP8 = Options(use_fp8=True)
ONCE = Options(use_fp8=True, deduplicate=True)
LOGFMT = Options(use_logfmt=True)
ONE_EXPERT = {"experts_per_rank": 1, "num_topk": 2}  # its rows are shared by all warps of a block


def without_engine(options: Options) -> Options:
    return replace(options, has_tma=False)


PROGRAMS = [
    Program(two_at_a_time, FP8, {}),
    Program(one_by_one, FP8, {}),
    Program(two_at_a_time, Options(), ONE_EXPERT),
    Program(two_at_a_time, ONCE, {}),
    Program(one_by_one, ONCE, {}),
    Program(one_by_one, LOGFMT, ONE_EXPERT),
    Program(two_at_a_time, without_engine(Options()), {}),
    Program(two_at_a_time, without_engine(ONCE), {}),
    Program(one_by_one, without_engine(LOGFMT), ONE_EXPERT),
    Program(with_a_clean, Options(), {}),
    Program(with_a_clean, ONCE, {}),
    # A block counts for two ranks; the stages of the send phase reach into those of the receive phase.
    Program(one_by_one, ONCE, {"num_ranks": 3, "num_tokens": 2}),
    Program(one_by_one, Options(), {"hidden": 2304, "num_tokens": 3}),
    Program(two_at_a_time, Options(use_fp8=True, over_nic=True), {}),
    Program(one_by_one, Options(deduplicate=True, over_nic=True), {"num_tokens": 6, **ONE_EXPERT}),
]


def special_programs(step: Step) -> list[Program]:
    """Those that do something special where the step is."""
    module = step.module.rpartition(".")[2]

    def is_special(program: Program) -> bool:
        if "clean" in module or step.function == "wait_peer":
            return program.fn is with_a_clean
        if "put_stage" in step.function or "encoded" in step.function:
            return program.options.use_logfmt
        if step.function == "end_send_phase":
            return "hidden" in program.shape
        return program.options.deduplicate and module in ("send_once", "expand", "sum_first")

    return [program for program in PROGRAMS if is_special(program)]


def is_caught(memory_model: str, programs: Sequence[Program], seeds: Sequence[int] = range(6)) -> bool:
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
    "arrivals.tell-amo_add-0": "only where an add is a message of its own: such a network orders it behind its queue",
    "combine_sender.put_row-syncwarp-0": "direct: a lane puts what it has written itself. Other transports need it",
    "send_once.count_ranks-syncwarp-1": "the one in may_warp_send comes before its loads, too",
    "send_once.tell_counts-syncwarp-0": "brings the lanes together again",
    "dispatch_sender.count_choices-syncwarp-0": "brings the lanes together again",
    "expand.expand_messages-syncwarp-0": "brings the lanes together again",
    "sum_first.announce_parts-syncwarp-0": "brings the lanes together again",
    "sum_first.send_sums-syncwarp-0": "the vote in the next part comes before its stores, too",
}
# Steps that no schedule of the emulator shows to be missing, and why.
NOT_SEEN = {
    "arrivals.tell-atom_add_acq_rel_gpu_s32-0": "orders atomics of a thread: the emulator keeps their order",
}
STEPS = [step for module in MODULES for step in steps_of(module)]


@pytest.mark.parametrize("memory_model", both_parts(["checked"], thorough=["sc", "delayed"]))
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_unbroken_kernels_are_not_caught(program, memory_model):
    program.run(1, memory_model)


@pytest.mark.parametrize("step", [step for step in STEPS if str(step) not in NOT_NEEDED | NOT_SEEN], ids=str)
def test_a_step_that_is_left_out_is_caught(step, monkeypatch):
    step.leave_out(monkeypatch)
    assert is_caught("checked", special_programs(step), range(12)) or is_caught("checked", PROGRAMS)


def test_a_count_that_is_not_acquired_goes_wrong_if_loads_may_be_early(monkeypatch):
    Step("nbep.device.protocols.arrivals", "wait_arrival", "ld_acquire_sys_s32", 0).leave_out(monkeypatch)
    assert is_caught("delayed", PROGRAMS[:2])


def test_no_step_is_said_to_be_needless_that_is_not_there():
    assert NOT_NEEDED.keys() | NOT_SEEN.keys() <= {str(step) for step in STEPS}


def credit_before_zeros(function: ast.FunctionDef) -> None:
    """Let the keeper give its credits before it empties the cells."""
    give = function.body.pop()
    assert "amo_add" in ast.unparse(give)
    first_loop = next(i for i, node in enumerate(function.body) if isinstance(node, ast.For))
    is_absent = next(node for node in function.body if ast.unparse(node).startswith("is_absent ="))
    function.body[first_loop:first_loop] = [is_absent, give]


@pytest.mark.parametrize("memory_model", ["sc", "checked"])
def test_a_credit_that_is_given_before_the_cells_are_empty_is_caught(memory_model, monkeypatch):
    change(journal.empty_half, credit_before_zeros, monkeypatch)
    assert is_caught(memory_model, [PROGRAMS[0], PROGRAMS[3]], range(20))


@pytest.mark.parametrize("memory_model", ["sc", "checked"])
@pytest.mark.parametrize("program", [PROGRAMS[0], PROGRAMS[3]], ids=str)
def test_senders_that_do_not_wait_for_credits_overwrite_what_is_under_way_and_are_caught(
    program, memory_model, monkeypatch
):
    monkeypatch.setattr(journal, "wait_credit", lambda *_: True)
    assert is_caught(memory_model, [program], range(20))


@pytest.mark.parametrize("program", [PROGRAMS[0], PROGRAMS[3]], ids=str)
def test_credits_that_are_not_taken_are_caught(program, monkeypatch):
    monkeypatch.setattr(journal, "s32", lambda uses: uses - 1)
    assert is_caught("sc", [program], range(20))


@pytest.mark.parametrize("what", ["clear_words", "empty_cell"])
@pytest.mark.parametrize("program", [PROGRAMS[0], PROGRAMS[3]], ids=str)
def test_cells_that_are_not_emptied_are_caught(program, what, monkeypatch):
    monkeypatch.setattr(journal, what, lambda *_: None)
    assert is_caught("sc", [program])
