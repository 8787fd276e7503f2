"""Ranks in processes of their own that make low-latency calls which differ: each reports what both have passed.

Here they live in one process, which would compare them before; that is switched off.
"""

import ml_dtypes
import numpy as np
import pytest
from parts import both_parts

import nbep
from nbep.device.kernels.low_latency.calls import LOW_LATENCY_CALLS_DIFFER, ComparedCall
from nbep.device.kernels.parts.arrivals import ABSENT, LEAST_ABSENT, MAX_TAGS
from nbep.device.layout.low_latency import MAX_EXPERTS, MAX_TOPK, DeduplicatedShape, LowLatencyShape, shape_of
from nbep.device.protocols.waits import FaultReport
from nbep.host.calls import CallLog
from nbep.host.causes import cause_of
from nbep.host.low_latency.calls import COMBINE, DISPATCH, ORIGINS, VERBS, words_of
from nbep.lab.trace import Trace

pytestmark = pytest.mark.emulator_only("a GPU's virtual ranks live in one process: what they launch is compared before")
MODELS = ["sc", "delayed", "checked"]
TOPK_IDX = np.array([[0, 2], [1, 3], [2, 0]])
WEIGHTS = np.ones((3, 2), np.float32)


@pytest.fixture(autouse=True)
def like_processes(monkeypatch):
    monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))


def dispatch(buffer, hidden=256, num_max_tokens=4, num_experts=4, topk_idx=TOPK_IDX, **options):
    x = np.ones((3, hidden), ml_dtypes.bfloat16)
    return buffer.low_latency_dispatch(x, topk_idx, num_max_tokens, num_experts, **options)


def combine(buffer, received, **options):
    (recv_x, _), _, handle, *_ = received
    rows = np.ones(recv_x.shape, ml_dtypes.bfloat16)
    return buffer.low_latency_combine(rows, TOPK_IDX, WEIGHTS, handle, **options)


def outcome_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def run(main, memory_model="sc", seed=0, num_ranks=2):
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

    return nbep.spawn(of_rank, num_ranks, "emulator", seed=seed, memory_model=memory_model, on_deadlock="expire")


def check_refused(outcomes, named):
    """Each rank reports what both have passed."""
    name, own, theirs = named
    for rank, (mine, other) in enumerate(((own, theirs), (theirs, own))):
        text = f"{name}: got {mine} on rank {rank}, {other} on rank {1 - rank} in the same "
        assert outcomes[rank].startswith(text), outcomes


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


@pytest.mark.parametrize("memory_model", both_parts(MODELS[2:], thorough=MODELS[:2]))
@pytest.mark.parametrize("seed", both_parts([], thorough=range(1, 3), long=range(3, 6)))
def test_so_it_is_under_every_memory_model(memory_model, seed):
    outcomes = run(dispatches_that_differ("shorter rows"), memory_model, seed)
    check_refused(outcomes, DISPATCHES["shorter rows"][1])
    check_refused(run(in_another_format, memory_model, seed), LOGFMT)


def test_a_rank_to_which_no_token_goes_raises_too():
    def main(buffer, is_last, _):
        only_own = np.array([[0, 1], [1, 0], [0, 1]]) + 2 * is_last  # the experts of this rank
        dispatch(buffer, topk_idx=only_own, num_max_tokens=7 if is_last else 4)

    check_refused(run(main), DISPATCHES["more tokens"][1])


@pytest.mark.parametrize("which", both_parts(["once a rank"], thorough=["more tokens", "more experts", "bf16"]))
def test_all_ranks_name_the_one_that_differs(which):
    outcomes = run(dispatches_that_differ(which), num_ranks=4)
    name, own, theirs = DISPATCHES[which][1]
    for rank in range(3):
        assert outcomes[rank].startswith(f"{name}: got {own} on rank {rank}, {theirs} on rank 3 in the same "), outcomes
    assert outcomes[3].startswith(f"{name}: got {theirs} on rank 3, {own} on rank "), outcomes


@pytest.mark.parametrize(
    ("options", "num_max_tokens"), [({}, 4), (OF_ONE, 4), ({}, 7)], ids=["", "deduplicate", "other shape"]
)
def test_no_rank_goes_on_with_the_handle_of_another_dispatch(options, num_max_tokens):
    def main(buffer, is_last, _):
        received = [dispatch(buffer, num_max_tokens=number, **options) for number in (4, num_max_tokens)]
        combine(buffer, received[is_last])

    of = "that of low-latency call {} (modulo 15)"
    check_refused(run(main), ("handle", of.format(4), of.format(5)))


def test_a_peer_that_does_not_come_is_a_time_out_whatever_its_earlier_calls_have_left():
    def main(buffer, is_last, _):
        if is_last:
            raise RuntimeError("gone")
        dispatch(buffer, hidden=512)

    first, last = run(main)
    assert last == "gone"
    assert "waited more than" in first
    assert "for rank 1" in first


# The words of a call

SHAPE = shape_of(2, 64, 128, 7168, 8, 1, 1, 0)
OTHERS = {
    "num_experts": (MAX_EXPERTS, f"num_experts: got 64 on rank 0, {MAX_EXPERTS} on rank 1"),
    "num_max_tokens": (MAX_TAGS, f"num_max_dispatch_tokens_per_rank: got 128 on rank 0, {MAX_TAGS} on rank 1"),
    "hidden": (58368, "hidden size of x: got 7168 on rank 0, 58368 on rank 1"),
    "num_topk": (MAX_TOPK, f"topk_idx: got 8 choices a token on rank 0, {MAX_TOPK} choices a token on rank 1"),
    "use_fp8": (0, "use_fp8: got True on rank 0, False on rank 1"),
    "deduplicate": (0, "deduplicate: got True on rank 0, False on rank 1"),
    "use_logfmt": (1, "use_logfmt: got False on rank 0, True on rank 1"),
    "round_scale": (1, "round_scale: got False on rank 0, True on rank 1"),
    "origin": (15, "handle: got one of unknown origin on rank 0, that of low-latency call 14 (modulo 15) on rank 1"),
}


def words(verb, round_scale=0, origin=0, **other):
    kind = DeduplicatedShape if other.pop("deduplicate", 1) else LowLatencyShape
    return words_of(verb, kind(*SHAPE._replace(**other)), bool(round_scale), origin)


def reported(own, theirs):
    """What rank 0 reports that has called `own`, for each word that differs."""
    return [
        str(cause_of(0, FaultReport(1, LOW_LATENCY_CALLS_DIFFER, 1, mine, other, 0, 0, index)))
        for index, (mine, other) in enumerate(zip(own, theirs, strict=True))
        if mine != other
    ]


@pytest.mark.parametrize(
    ("name", "verb"),
    [(name, DISPATCH) for name in OTHERS if name not in ("use_logfmt", "origin")]
    + [(name, COMBINE) for name in OTHERS if name not in ("use_fp8", "round_scale")],
)
def test_every_argument_is_in_a_word_of_its_own_bits_and_is_named_with_both_values(name, verb):
    value, text = OTHERS[name]
    (error,) = reported(words(verb), words(verb, **{name: value}))
    values = text.partition(": ")[2]
    assert f": {values} in the same {VERBS[verb]}; must be the same" in error
    if verb == DISPATCH:
        assert error.startswith(text)


def test_of_two_arguments_of_a_word_the_first_is_named():
    (error,) = reported(words(DISPATCH), words(DISPATCH, use_fp8=0, num_experts=128))
    assert error.startswith("use_fp8: got True on rank 0, False on rank 1 in the same low_latency_dispatch")


def test_a_choice_less_is_not_named_beside_deduplicate():
    (error,) = reported(words(DISPATCH), words(DISPATCH, deduplicate=0, num_topk=0))
    assert "topk_idx" not in error


def test_another_verb_differs_in_both_words():
    for error in reported(words(DISPATCH), words(COMBINE)):
        assert "got low_latency_dispatch on rank 0, low_latency_combine on rank 1 in the same call" in error
    assert len(reported(words(DISPATCH), words(COMBINE))) == len(words(DISPATCH))


def test_a_late_word_leaves_a_cell_that_was_given_up_as_it_is():
    largest = SHAPE._replace(
        num_experts=MAX_EXPERTS, num_max_tokens=MAX_TAGS, hidden=1 << 16, num_topk=MAX_TOPK, use_logfmt=1
    )
    for word in words_of(COMBINE, largest, True, ORIGINS):
        assert LEAST_ABSENT < ABSENT - 4 * (word + 1) < ABSENT


# Without the comparison


def spawn_uncompared(monkeypatch, main, **options):
    """Two ranks whose kernels do not compare calls, as on GPUs: a setting of the environment says so."""
    monkeypatch.setenv("NBEP_CHECK_CALLS", "0")
    return nbep.spawn(main, 2, "emulator", on_deadlock="expire", **options)


@pytest.mark.parametrize("deduplicate", both_parts([False], thorough=[True]))
def test_calls_that_are_not_compared_send_no_words(monkeypatch, deduplicate):
    options = OF_ONE if deduplicate else {}

    def main(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=1 << 18, low_latency_mode=True)
        for _ in range(3):
            received = dispatch(buffer, **options)
            out = combine(buffer, received)[0]
        buffer.destroy()
        return received[1], out

    trace = Trace()
    results = spawn_uncompared(monkeypatch, main, tracer=trace)
    assert [list(counts) for counts, _ in results] == [[4, 2], [4, 2]]
    assert all((np.asarray(out, np.float32) == 2).all() for _, out in results)
    assert not trace.events(cell="calls")


def test_a_call_that_differs_times_out_if_calls_are_not_compared(monkeypatch):
    def main(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=1 << 18, low_latency_mode=True)
        return outcome_of(lambda: dispatch(buffer, num_experts=8 if comm.rank else 4))

    assert all("must be the same on all ranks" not in outcome for outcome in spawn_uncompared(monkeypatch, main))


@pytest.mark.parametrize(
    ("given", "variable", "is_compared"), [(None, None, True), (None, "0", False), (True, "0", True)]
)
def test_the_argument_says_whether_calls_are_compared_or_else_the_environment_or_the_target(
    monkeypatch, given, variable, is_compared
):
    monkeypatch.delenv("NBEP_CHECK_CALLS", raising=False)
    if variable is not None:
        monkeypatch.setenv("NBEP_CHECK_CALLS", variable)

    def main(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=1 << 18, low_latency_mode=True, check_calls=given)
        return buffer._memory.low_latency.call_type is ComparedCall

    assert nbep.spawn(main, 2, "emulator") == [is_compared] * 2


def test_a_wrong_value_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("NBEP_CHECK_CALLS", "yes")

    def main(comm):
        with pytest.raises(ValueError, match="NBEP_CHECK_CALLS: got 'yes'"):
            nbep.Buffer(comm, num_rdma_bytes=1 << 18, low_latency_mode=True)

    nbep.spawn(main, 2, "emulator")
