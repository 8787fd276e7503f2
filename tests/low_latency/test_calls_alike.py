"""Ranks in processes of their own that make low-latency calls which differ: none of them goes on with what came.

Here they live in one process, which would compare them before; that is switched off. Who waits for a message that the
other call does not send is told of a time-out.
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
DIFFERENT = "have made different ones, where they must make the same"
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


def check_refused(outcomes):
    assert all(outcomes), outcomes
    assert any(DIFFERENT in outcome for outcome in outcomes), outcomes
    assert all(DIFFERENT in outcome or "waited more than" in outcome for outcome in outcomes), outcomes


OF_ONE = {"deduplicate": True, "topk_weights": WEIGHTS}
DISPATCHES = {
    "shorter rows": {"hidden": 128},
    "longer rows": {"hidden": 512},
    "more tokens": {"num_max_tokens": 7},
    "more experts": {"num_experts": 8},
    "bf16": {"use_fp8": False},
    "powers of two": {"round_scale": True},
    "once a rank": OF_ONE,
}


@pytest.mark.parametrize("which", both_parts(["shorter rows", "once a rank"], thorough=list(DISPATCHES)[1:-1]))
def test_no_rank_goes_on_with_tokens_of_another_dispatch(which):
    check_refused(run(lambda buffer, is_last, _: dispatch(buffer, **(DISPATCHES[which] if is_last else {}))))


def test_no_rank_goes_on_where_one_has_dispatched_with_deduplicate_and_other_rows():
    check_refused(run(lambda buffer, is_last, _: dispatch(buffer, hidden=512 if is_last else 256, **OF_ONE)))


def in_another_format(buffer, is_last, received):
    combine(buffer, received, use_logfmt=is_last)


def test_no_rank_goes_on_with_rows_in_another_format():
    check_refused(run(in_another_format))


def test_no_rank_goes_on_where_one_dispatches_and_the_other_combines():
    check_refused(
        run(lambda buffer, is_last, received: dispatch(buffer) if is_last else combine(buffer, received)),
    )


def test_a_message_of_an_earlier_call_is_not_taken_for_one_that_lies_elsewhere():
    def main(buffer, is_last, _):
        only_second = np.full((3, 1), 1) + 2 * np.arange(2)  # of the two experts of each rank
        for _ in range(2):
            dispatch(buffer, topk_idx=only_second)
        dispatch(buffer, topk_idx=only_second, num_max_tokens=7 if is_last else 4)

    check_refused(run(main))


@pytest.mark.parametrize("memory_model", MODELS)
@pytest.mark.parametrize("seed", both_parts([1], thorough=range(2, 6)))
def test_so_it_is_under_every_memory_model(memory_model, seed):
    options = DISPATCHES["shorter rows"]
    check_refused(run(lambda buffer, is_last, _: dispatch(buffer, **(options if is_last else {})), memory_model, seed))
    check_refused(
        run(lambda buffer, is_last, received: combine(buffer, received, use_logfmt=is_last), memory_model, seed)
    )


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
