"""Calls of all shapes follow each other on one buffer.

A notify kernel resets the rings of its rank while peers may still be in the call before, whose rings lay elsewhere. So
what a late store, a late poll or a missing barrier would do shows here.
"""

import random
from importlib import import_module

import pytest
from arrays import to_target
from cases import ROUTINGS, make_case
from intranode import Expected, Options, combine, dispatch, dispatch_input, num_nvl_bytes
from target import spawn

import nbep

NUM_CALLS = 5


def make_calls(seed, num_ranks):
    """(case, options, whether a cached dispatch and a combine follow) of some rounds, no two of one shape."""
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


@pytest.mark.parametrize(
    "memory_model", ["sc", pytest.param("delayed", marks=pytest.mark.emulator_only("it delays stores"))]
)
@pytest.mark.parametrize(("num_ranks", "seeds"), [(2, range(12)), (4, range(4))])
def test_every_call_gets_the_references_bits(num_ranks, seeds, memory_model):
    for seed in seeds:
        check_calls(seed, num_ranks, memory_model=memory_model)


@pytest.mark.emulator_only("a wrong kernel may hang a GPU")
@pytest.mark.parametrize("kernel", ["notify_dispatch", "cached_notify_dispatch", "cached_notify_combine"])
def test_a_notify_kernel_without_its_barrier_is_caught(kernel, monkeypatch):
    module = import_module(f"nbep.device.kernels.intranode.{kernel}")
    monkeypatch.setattr(module, "barrier_block", lambda peers, bounds: None)
    with pytest.raises((AssertionError, nbep.EmulatorError)):  # noqa: PT012
        for seed in range(12):
            check_calls(seed, 2)
