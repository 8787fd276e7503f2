"""Calls of all shapes follow each other on one buffer.

A notify kernel resets the rings of its rank while peers may still be in the call before, whose rings lay elsewhere. So
what a late store, a late poll or a missing barrier would do shows here.
"""

import random
from dataclasses import replace
from importlib import import_module

import pytest
from arrays import to_target
from cases import ROUTINGS, make_case
from intranode import (
    Expected,
    Options,
    combine,
    dispatch,
    dispatch_arguments,
    dispatch_input,
    expert_output,
    num_nvl_bytes,
)
from parts import both_parts
from target import MEMORY_MODELS, spawn

import nbep
from nbep.device.primitives import globaltimer
from nbep.emulator import current_thread

NUM_CALLS = 5


def make_calls(seed, num_ranks):
    """(case, options, whether a cached dispatch and a combine follow) of some rounds, each of other sizes."""
    rng = random.Random(seed)
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
            routing=rng.choice(ROUTINGS),
        )
        options = Options(
            nbep.Config(2 * rng.randint(1, 3), chunk, chunk + rng.randint(1, 3), mix_roles=rng.random() < 0.5),
            with_topk=rng.random() < 0.5,
            fp8=fp8,
        )
        calls.append((case, options, rng.random() < 0.5, rng.random() < 0.7))
    return calls


def one_after_the_other(comm, calls):
    """All calls on one buffer; the outcomes."""
    buffer = nbep.Buffer(comm, num_nvl_bytes=max(num_nvl_bytes(case, options) for case, options, *_ in calls))
    outcomes = []
    for case, options, with_cached, with_combine in calls:
        outcome = dispatch(buffer, case, options, comm.rank)
        if with_cached:
            x = to_target(dispatch_input(case, options, comm.rank))
            outcome.cached_x = buffer.dispatch(x, handle=outcome.handle, config=options.config)[0]
        if with_combine:
            combine(buffer, case, options, comm.rank, outcome)
        outcomes.append(outcome)
    buffer.destroy()
    return outcomes


def check_calls(seed, num_ranks, **spawn_options):
    calls = make_calls(seed, num_ranks)
    ranks = spawn(one_after_the_other, num_ranks, (calls,), seed, **spawn_options)
    for number, (case, options, *_) in enumerate(calls):
        expected = Expected(case, options)
        for rank, outcomes in enumerate(ranks):
            expected.check(rank, outcomes[number], f"inputs and schedule {seed}, call {number}, rank {rank}")


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    both_parts([(2, range(2))], thorough=[(2, range(2, 18)), (4, range(7))]),
)
def test_every_call_gets_the_references_bits(num_ranks, seeds, memory_model):
    for seed in seeds:
        check_calls(seed, num_ranks, memory_model=memory_model)


SLOW_PLACES = [
    ("notify_dispatch", "sum_counts"),
    ("notify_dispatch", "count_channel_tokens"),
    ("dispatch", "send_tokens"),
    ("dispatch", "receive_offsets"),
    ("dispatch", "copy_own_tokens"),
    ("combine", "send_tokens"),
    ("combine", "list_rows"),
]


def make_steps(seed, num_ranks):
    """(case, options) of some dispatches; steps: (what, number of the dispatch), each dispatch before its others."""
    rng = random.Random(seed)
    rounds, steps = [], []
    for case, options, *_ in make_calls(seed, num_ranks):
        if rng.random() < 0.6:
            options = replace(options, with_topk=True, num_worst_tokens=sum(case.num_tokens) + 1)
        rounds.append((case, options))
        steps.append(("dispatch", len(rounds) - 1))
        steps += [(what, rng.randrange(len(rounds))) for what in rng.sample(["cached", "combine", "combine"], 2)]
    return rounds, steps


def run_ahead(comm, rounds, steps):
    """All steps without waiting for any but the last; what each gave."""
    rank = comm.rank
    buffer = nbep.Buffer(comm, num_nvl_bytes=max(num_nvl_bytes(case, options) for case, options in rounds))
    expected = [Expected(case, options).dispatched[rank] for case, options in rounds]
    handles, outcomes = {}, []
    for what, number in steps:
        (case, options), wanted = rounds[number], expected[number]
        later = {"config": options.config, "async_finish": True}
        if what == "dispatch":
            _, arguments = dispatch_arguments(buffer, case, options, rank)
            outcome, *_, handles[number], event = buffer.dispatch(**arguments, async_finish=True)
        elif what == "cached":
            outcome, *_, event = buffer.dispatch(dispatch_input(case, options, rank), handle=handles[number], **later)
        else:
            recv_x = wanted.recv_x if wanted.recv_x_scales is None else (wanted.recv_x, wanted.recv_x_scales)
            outcome, _, event = buffer.combine(expert_output(recv_x, rank), handles[number], **later)
        outcomes.append(outcome[0] if isinstance(outcome, tuple) else outcome)
    event.current_stream_wait()
    buffer.destroy()
    return outcomes


@pytest.mark.emulator_only("one rank is made slow")
@pytest.mark.parametrize("memory_model", ["sc", "delayed", "checked"])
@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    both_parts([(2, range(2, 3))], thorough=[(2, range(2)), (2, range(3, 15)), (4, range(7))]),
)
def test_hosts_that_run_ahead_of_a_slow_rank_get_the_references_bits(num_ranks, seeds, memory_model, monkeypatch):
    slow = {"rank": 0, "reads": 0}

    def slowly(function):
        def slow_function(*args):
            for _ in range(slow["reads"] if current_thread().rank == slow["rank"] else 0):
                globaltimer()
            return function(*args)

        return slow_function

    for kernel, name in SLOW_PLACES:
        module = import_module(f"nbep.device.kernels.intranode.{kernel}")
        monkeypatch.setattr(module, name, slowly(getattr(module, name)))
    for seed in seeds:
        rounds, steps = make_steps(seed, num_ranks)
        slow.update(rank=seed % num_ranks, reads=(0, 5, 50)[seed % 3])
        ranks = spawn(run_ahead, num_ranks, (rounds, steps), seed, memory_model=memory_model)
        for step, (what, number) in enumerate(steps):
            expected = Expected(*rounds[number])
            for rank, outcomes in enumerate(ranks):
                wanted = expected.combined[rank][0]
                if what != "combine":
                    wanted = expected.dispatched[rank].recv_x[: len(expected.dispatched[rank].recv_src_rank)]
                got = outcomes[step][: len(wanted)]
                assert got.tobytes() == wanted.tobytes(), (seed, step, what, rank)


@pytest.mark.emulator_only("a wrong kernel may hang a GPU")
@pytest.mark.parametrize("kernel", ["notify_dispatch", "cached_notify_dispatch", "cached_notify_combine"])
def test_a_notify_kernel_without_its_barrier_is_caught(kernel, monkeypatch):
    module = import_module(f"nbep.device.kernels.intranode.{kernel}")
    monkeypatch.setattr(module, "barrier_block", lambda peers, bounds: None)
    with pytest.raises((AssertionError, nbep.EmulatorError)):  # noqa: PT012
        for seed in range(12):
            check_calls(seed, 2, memory_model="checked")
