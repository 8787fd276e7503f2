"""Ranks in processes of their own that make low-latency calls which differ: none of them goes on with what came.

Here they live in one process, which would compare them before; that is switched off. Who waits for a message that the
other call does not send may be told of a time-out.
"""

import ml_dtypes
import numpy as np
import pytest
from parts import both_parts

import nbep
from nbep.device.layout.low_latency import LowLatencyShape
from nbep.device.protocols.arrivals import TAG, completion_with, is_complete, number_of
from nbep.device.protocols.waits import ONE
from nbep.host.call_log import CallLog
from nbep.host.low_latency import digest

pytestmark = pytest.mark.emulator_only("a GPU's virtual ranks live in one process: what they launch is compared before")
MODELS = ["sc", "delayed", "checked"]
SHAPE = LowLatencyShape(2, 4, 4, 256, 2, 1, 0, 0)
TOPK_IDX = np.array([[0, 2], [1, 3], [2, 0]])
WEIGHTS = np.ones((3, 2), np.float32)


@pytest.fixture(autouse=True)
def like_processes(monkeypatch):
    monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))


def dispatch(buffer, hidden=256, num_max_tokens=4, num_experts=4, topk_idx=TOPK_IDX, **options):
    x = np.ones((3, hidden), ml_dtypes.bfloat16)
    return buffer.low_latency_dispatch(x, topk_idx, num_max_tokens, num_experts, **options)


def combine(buffer, received, **options):
    rows = np.ones((2, 8, 256), ml_dtypes.bfloat16)
    return buffer.low_latency_combine(rows, TOPK_IDX, WEIGHTS, received[2], **options)


def outcome_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def run(main, memory_model="sc", seed=0):
    """What each rank's main(buffer, is_last) ends with, behind calls in both halves that all make alike."""

    def of_rank(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=1 << 18, low_latency_mode=True, num_qps_per_rank=4)
        for _ in range(2):  # what these leave behind is not taken for messages
            received = dispatch(buffer)
            combine(buffer, received)

        def call():
            main(buffer, comm.rank == comm.size - 1, received)
            buffer._memory.low_latency.synchronize()
            buffer._memory.check_faults()  # as the next call does

        return outcome_of(call)

    return nbep.spawn(of_rank, 2, "emulator", seed=seed, memory_model=memory_model, on_deadlock="expire")


def check_refused(outcomes, named):
    """Each rank is told what both have passed, or that it has waited in vain; the first is so for one of them."""
    name, own, theirs = named
    assert all(outcomes), outcomes
    texts = [
        f"{name}: got {mine} on rank {rank}, {other} on rank {1 - rank} in the same "
        for rank, mine, other in ((0, own, theirs), (1, theirs, own))
    ]
    is_named = [outcome.startswith(text) for outcome, text in zip(outcomes, texts, strict=True)]
    assert any(is_named), outcomes
    assert all(is_so or "waited more than" in outcome for is_so, outcome in zip(is_named, outcomes, strict=True)), (
        outcomes
    )


OF_ONE = {"deduplicate": True, "topk_weights": WEIGHTS}
# What the last rank passes in place of the defaults; the name; what the others and the last one have passed.
DISPATCHES = {
    "shorter rows": ({"hidden": 128}, ("hidden size of x", 256, 128)),
    "longer rows": ({"hidden": 512}, ("hidden size of x", 256, 512)),
    "more tokens": ({"num_max_tokens": 7}, ("num_max_dispatch_tokens_per_rank", 4, 7)),
    "more experts": ({"num_experts": 8}, ("num_experts", 4, 8)),
    "bf16": ({"use_fp8": False}, ("use_fp8", True, False)),
    "powers of two": ({"round_scale": True}, ("round_scale", False, True)),
    "once a rank": (OF_ONE, ("deduplicate", False, True)),
}


def dispatches_that_differ(which):
    return lambda buffer, is_last, _: dispatch(buffer, **(DISPATCHES[which][0] if is_last else {}))


@pytest.mark.parametrize("which", both_parts(["shorter rows", "once a rank"], thorough=list(DISPATCHES)[1:-1]))
def test_no_rank_goes_on_with_tokens_of_another_dispatch_and_both_values_are_named(which):
    check_refused(run(dispatches_that_differ(which)), DISPATCHES[which][1])


def test_no_rank_goes_on_where_one_has_dispatched_with_deduplicate_and_other_rows():
    outcomes = run(lambda buffer, is_last, _: dispatch(buffer, hidden=512 if is_last else 256, **OF_ONE))
    check_refused(outcomes, DISPATCHES["longer rows"][1])


LOGFMT = "use_logfmt", False, True


def in_another_format(buffer, is_last, received):
    combine(buffer, received, use_logfmt=is_last)


def test_no_rank_goes_on_with_rows_in_another_format():
    check_refused(run(in_another_format), LOGFMT)


def test_no_rank_goes_on_where_one_dispatches_and_the_other_combines():
    outcomes = run(lambda buffer, is_last, received: dispatch(buffer) if is_last else combine(buffer, received))
    check_refused(outcomes, ("buffer", "low_latency_combine", "low_latency_dispatch"))


def test_a_message_of_an_earlier_call_is_not_taken_for_one_that_lies_elsewhere():
    def main(buffer, is_last, _):
        only_second = np.full((3, 1), 1) + 2 * np.arange(2)  # of the two experts of each rank
        for _ in range(2):
            dispatch(buffer, topk_idx=only_second)
        dispatch(buffer, topk_idx=only_second, num_max_tokens=7 if is_last else 4)

    check_refused(run(main), DISPATCHES["more tokens"][1])


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("seed", both_parts([1], thorough=range(2, 6)))
def test_so_it_is_under_every_memory_model(memory_model, seed):
    outcomes = run(dispatches_that_differ("shorter rows"), memory_model, seed)
    check_refused(outcomes, DISPATCHES["shorter rows"][1])
    check_refused(run(in_another_format, memory_model, seed), LOGFMT)


@pytest.mark.parametrize("index", range(1, len(SHAPE) - 1))
def test_one_word_that_differs_makes_another_digest(index):
    other = SHAPE._replace(**{SHAPE._fields[index]: SHAPE[index] + 1})
    for of_verb in (lambda shape: digest.for_dispatch(shape, False), digest.for_combine):
        assert of_verb(SHAPE).digest != of_verb(other).digest
        assert of_verb(SHAPE)[:-1] == SHAPE[:-1]


def test_a_digest_is_not_taken_for_what_else_stands_there():
    assert digest.for_dispatch(SHAPE, False).digest >= ONE  # 0 is the word of a note that was read
    for number in (digest.LEAST_OF_COMBINE, digest.LEAST_OF_COMBINE + digest.DIGESTS_OF_COMBINE - 1):
        for count in (0, 5):
            told = completion_with(count, number)
            assert [is_complete(told + tags * TAG) for tags in range(count + 2)] == [*[False] * count, True, False]
            assert number_of(told + count * TAG) == number
