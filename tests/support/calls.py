"""Many calls of all shapes on one buffer, made from a seed: one after the other, or with hosts that run ahead."""

import random
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import internode
import pytest
from arrays import to_target
from cases import NODE_ROUTINGS, ROUTINGS, Case, make_case
from intranode import (
    Expected,
    Options,
    Outcome,
    combine,
    dispatch,
    dispatch_arguments,
    dispatch_input,
    expert_output,
    make_buffer_for,
)
from target import spawn
from trips import cached_dispatch

import nbep
from nbep.device.primitives import globaltimer
from nbep.emulator import current_thread
from nbep.host.target.base import current_runtime

NUM_CALLS = 5
Call = tuple[Case, Options, bool, bool]


def make_calls(seed: int, num_ranks: int, num_nodes: int = 1, mixed: bool = False, **options: Any) -> list[Call]:
    """(case, options, whether a cached dispatch and a combine follow) of some rounds, each of other sizes.

    mixed: some go through rings, some do not
    """
    rng, ways = random.Random(seed), random.Random(seed)
    calls = []
    for _ in range(NUM_CALLS):
        chunk = rng.randint(1, 4)
        fp8 = rng.choice([None, "row", "column"])
        case = make_case(
            rng.getrandbits(20),
            num_ranks=num_ranks,
            num_tokens=[rng.choice([0, 1, 7, 12]) for _ in range(num_ranks)],
            hidden=rng.choice([128, 256]) if fp8 else rng.choice([8, 24, 136]),
            num_topk=rng.randint(1, 4),
            routing=rng.choice(ROUTINGS if num_nodes == 1 else ROUTINGS + NODE_ROUTINGS),
            num_nodes=num_nodes,
        )
        if num_nodes == 1:
            config = nbep.Config(2 * rng.randint(1, 3), chunk, chunk + rng.randint(1, 3), mix_roles=rng.random() < 0.5)
        else:
            config = internode.random_config(rng, num_nodes)
        kind = Options if num_nodes == 1 else internode.Options
        if mixed:
            options["zero_copy"] = ways.random() < 0.6
        calls.append(
            (
                case,
                kind(config, with_topk=rng.random() < 0.5, fp8=fp8, **options),
                rng.random() < 0.5,
                rng.random() < 0.7,
            )
        )
    return calls


def one_after_the_other(comm, calls: Sequence[Call]) -> list[Outcome]:
    """All calls on one buffer; the outcomes."""
    buffer = make_buffer_for(comm, [call[:2] for call in calls])
    outcomes = []
    for case, options, with_cached, with_combine in calls:
        outcome = dispatch(buffer, case, options, comm.rank)
        if with_cached:
            x = to_target(dispatch_input(case, options, comm.rank))
            outcome.cached_x = cached_dispatch(buffer, x, outcome.handle, options)
        if with_combine:
            combine(buffer, case, options, comm.rank, outcome)
        outcomes.append(outcome)
    buffer.destroy()
    return outcomes


def check_calls(seed: int, calls: Sequence[Call], **spawn_options: Any) -> None:
    """Run calls one after the other, and compare what each gives with the reference."""
    ranks = spawn(one_after_the_other, calls[0][0].num_ranks, (calls,), seed, **spawn_options)
    for number, (case, options, *_) in enumerate(calls):
        expected = Expected(case, options)
        for rank, outcomes in enumerate(ranks):
            expected.check(rank, outcomes[number], f"inputs and schedule {seed}, call {number}, rank {rank}")


Round = tuple[Case, Options]
Step = tuple[str, int]


def make_steps(seed: int, calls: Sequence[Call]) -> tuple[list[Round], list[Step]]:
    """(case, options) of some dispatches; steps: (what, number of the dispatch), each dispatch before its others."""
    rng = random.Random(seed)
    rounds: list[Round] = []
    steps: list[Step] = []
    for case, options, *_ in calls:
        if rng.random() < 0.6:
            options = replace(options, with_topk=True, num_worst_tokens=sum(case.num_tokens) + 1)
        rounds.append((case, options))
        steps.append(("dispatch", len(rounds) - 1))
        steps += [(what, rng.randrange(len(rounds))) for what in rng.sample(["cached", "combine", "combine"], 2)]
    return rounds, steps


def run_ahead(comm, rounds: Sequence[Round], steps: Sequence[Step]) -> list:
    """All steps without waiting for any but the last; what each gave."""
    rank = comm.rank
    buffer = make_buffer_for(comm, rounds)
    expected = [Expected(case, options).dispatched[rank] for case, options in rounds]
    handles, outcomes = {}, []
    for what, number in steps:
        (case, options), wanted = rounds[number], expected[number]
        later = {"config": options.config, "async_finish": True, **options.way}
        if what == "dispatch":
            _, arguments = dispatch_arguments(buffer, case, options, rank)
            outcome, *_, handles[number], event = buffer.dispatch(**arguments, async_finish=True)
        elif what == "cached":
            outcome, *_, event = buffer.dispatch(dispatch_input(case, options, rank), handle=handles[number], **later)
        else:
            recv_x = wanted.recv_x if wanted.recv_x_scales is None else (wanted.recv_x, wanted.recv_x_scales)
            outcome, _, event = buffer.combine(expert_output(case, options, recv_x, rank), handles[number], **later)
        outcomes.append(outcome[0] if isinstance(outcome, tuple) else outcome)
    event.current_stream_wait()
    buffer.destroy()
    return outcomes


def check_steps(seed: int, rounds: Sequence[Round], steps: Sequence[Step], **spawn_options: Any) -> None:
    """Run steps ahead, and compare what each gives with the reference."""
    ranks = spawn(run_ahead, rounds[0][0].num_ranks, (rounds, steps), seed, **spawn_options)
    for step, (what, number) in enumerate(steps):
        expected = Expected(*rounds[number])
        for rank, outcomes in enumerate(ranks):
            wanted = expected.combined[rank][0]
            if what != "combine":
                wanted = expected.dispatched[rank].recv_x[: len(expected.dispatched[rank].recv_src_rank)]
            got = outcomes[step][: len(wanted)]
            assert got.tobytes() == wanted.tobytes(), (seed, step, what, rank)


class SlowRank:
    """Makes functions of kernels slow on one rank: they read the clock some times first."""

    def __init__(self, patch: pytest.MonkeyPatch, places: Sequence[tuple[str, str]]):
        """places: (module, function)"""
        self.rank, self.reads = 0, 0
        for name, function in places:
            module = import_module(name)
            patch.setattr(module, function, self._slowly(getattr(module, function)))

    def _slowly(self, function):
        def slow_function(*args):
            for _ in range(self.reads if current_thread().rank == self.rank else 0):
                globaltimer()
            return function(*args)

        return slow_function


def hold_back(patch: pytest.MonkeyPatch, kernel: str, arrived: list) -> None:
    """Launch this rank's kernel of that name only when `arrived` is not empty."""
    runtime = current_runtime()
    name = "start" if hasattr(runtime, "start") else "launch"
    launch = getattr(runtime, name)

    def late(stream, function, *args):
        if function.__name__ == kernel:
            runtime.wait_until(lambda: bool(arrived), lambda: "the fault of the other rank")
        launch(stream, function, *args)

    patch.setattr(runtime, name, late)
