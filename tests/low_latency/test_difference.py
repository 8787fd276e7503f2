"""In what a peer's low-latency call differs is found: by its digest alone, and by where its messages lie."""

import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parts import both_parts

import nbep
from nbep.device.layout.low_latency import (
    NUM_HALVES,
    LowLatencyShape,
    message_stride,
    note_offset,
    quarter_bytes_needed,
)
from nbep.host.call_log import CallLog
from nbep.host.low_latency.difference import (
    COMBINE,
    DISPATCH,
    NAMES_OF_COMBINE,
    NAMES_OF_DISPATCH,
    Arrived,
    Passed,
    difference,
    matching,
)
from nbep.host.low_latency.digest import for_combine, for_dispatch


def make_call(verb, num_ranks=8, experts=32, num_max_tokens=128, blocks=56, num_topk=0, **flags) -> Passed:
    """A call; experts: of a rank; blocks: of 128 columns; num_topk is not 0 with deduplicate"""
    sizes = num_ranks, num_ranks * experts, num_max_tokens, 128 * blocks, num_topk
    of_shape = [int(flags.get(flag, False)) for flag in ("use_fp8", "use_logfmt")]
    shape = LowLatencyShape(*sizes, of_shape[0], int(num_topk > 0), of_shape[1])
    round_scale = int(flags.get("round_scale", False))
    return Passed(for_dispatch(shape, bool(round_scale)) if verb == DISPATCH else for_combine(shape), round_scale)


SIZES = {
    "experts": st.integers(1, 32),
    "num_max_tokens": st.integers(1, 512),
    "blocks": st.integers(1, 64),
    "num_topk": st.integers(0, 32),
}
CHOICES = {
    DISPATCH: SIZES | {"use_fp8": st.booleans(), "round_scale": st.booleans()},
    COMBINE: SIZES | {"use_logfmt": st.booleans()},
}


@st.composite
def calls_that_differ(draw, verb):
    """Two calls that differ in one argument, and a buffer that is large enough for both."""
    choices = CHOICES[verb]
    words = {name: draw(values) for name, values in choices.items()} | {"num_ranks": draw(st.sampled_from([2, 4, 16]))}
    name = draw(st.sampled_from(list(choices)))
    own = make_call(verb, **words)
    other = make_call(verb, **(words | {name: draw(choices[name])}))
    assume(own != other and own.is_allowed and other.is_allowed)
    needed = max(quarter_bytes_needed(call.shape) for call in (own, other))
    return own, other, 2 * NUM_HALVES * needed * draw(st.integers(1, 3))


@pytest.mark.parametrize("verb", [DISPATCH, COMBINE])
@settings(max_examples=40)
@given(st.data())
def test_what_the_peer_has_passed_is_among_what_fits_its_digest(verb, data):
    own, other, num_rdma_bytes = data.draw(calls_that_differ(verb))
    found = matching(own, num_rdma_bytes, [], lambda call: call.shape.digest == other.shape.digest)
    assert other in found
    assert all(call.shape.digest == other.shape.digest and call.is_allowed for call in found)


@settings(max_examples=40)
@given(st.data())
def test_what_the_peer_has_passed_is_found_by_where_one_of_its_messages_lies(data):
    own, other, num_rdma_bytes = data.draw(calls_that_differ(DISPATCH))
    shape = other.shape
    unit = data.draw(st.integers(0, 0 if shape.deduplicate else shape.num_experts // shape.num_ranks - 1))
    place = unit * shape.num_max_tokens * message_stride(shape) + note_offset(shape) + 4
    share = np.zeros(place // 4 + 1, np.int32)
    share[place // 4] = shape.digest
    arrived = Arrived([], share)
    assert other in matching(own, num_rdma_bytes, [], arrived.has_message_of)


@pytest.mark.parametrize("seed", both_parts(range(3), thorough=range(3, 100)))
def test_the_digest_of_a_dispatch_fits_one_call_alone(seed):
    rng = random.Random(seed)
    own = make_call(DISPATCH, num_max_tokens=rng.randrange(1, 128), blocks=rng.randrange(1, 56), use_fp8=True)
    words = {
        "num_max_tokens": rng.randrange(129, 256),
        "blocks": rng.randrange(57, 70),
        "experts": rng.randrange(1, 30),
    }
    name = rng.choice(list(words))
    field = {"num_max_tokens": "num_max_tokens", "blocks": "hidden", "experts": "num_experts"}[name]
    value = words[name] * {"num_max_tokens": 1, "blocks": 128, "experts": 8}[name]
    other = own.with_words(**{field: value})
    assert matching(own, 1 << 33, [], lambda call: call.shape.digest == other.shape.digest) == [other]


@pytest.mark.parametrize("field", NAMES_OF_DISPATCH)
def test_every_argument_of_a_dispatch_is_named_with_both_values(field):
    own = make_call(DISPATCH, num_topk=8, use_fp8=True)
    words = {
        "use_fp8": 0,
        "round_scale": 1,
        "deduplicate": 0,
        "num_topk": 4,
        "hidden": 4096,
        "num_max_tokens": 64,
        "num_experts": 128,
    }
    other = own.with_words(**({field: words[field]} | ({"num_topk": 0} if field == "deduplicate" else {})))
    text = {
        "use_fp8": "got True on rank 0, False on rank 3",
        "round_scale": "got False on rank 0, True on rank 3",
        "deduplicate": "got True on rank 0, False on rank 3",
        "num_topk": "got 8 choices a token on rank 0, 4 choices a token on rank 3",
        "hidden": "got 7168 on rank 0, 4096 on rank 3",
        "num_max_tokens": "got 128 on rank 0, 64 on rank 3",
        "num_experts": "got 256 on rank 0, 128 on rank 3",
    }
    assert matching(own, 1 << 33, [], lambda call: call.shape.digest == other.shape.digest) == [other]
    assert difference(own, other, 0, 3) == f"{NAMES_OF_DISPATCH[field]}: {text[field]}"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("use_logfmt", 1, "got False on rank 1, True on rank 0"),
        ("hidden", 4096, "got 7168 on rank 1, 4096 on rank 0"),
        ("num_max_tokens", 64, "got 128 on rank 1, 64 on rank 0"),
        ("num_experts", 128, "got 256 on rank 1, 128 on rank 0"),
    ],
)
def test_every_argument_of_a_combine_is_named_with_both_values(field, value, text):
    own = make_call(COMBINE)
    other = own.with_words(**{field: value})
    found = matching(own, 1 << 33, [], lambda call: call.shape.digest == other.shape.digest)
    assert f"{NAMES_OF_COMBINE[field]}: {text}" in [difference(own, call, 1, 0) for call in found]


def test_flags_are_named_before_sizes_and_one_argument_before_two():
    own = make_call(COMBINE)
    everything = matching(own, 1 << 30, [], lambda call: True)
    assert difference(own, everything[0], 0, 1) == "use_logfmt: got False on rank 0, True on rank 1"
    assert len(everything) > 100
    assert all(" and " not in difference(own, call, 0, 1) for call in everything if not call.shape.deduplicate)


def test_a_handle_of_another_call_of_this_rank_is_found_whatever_differs():
    own = make_call(COMBINE)
    other = own.with_words(hidden=4096, num_max_tokens=64, num_experts=128)
    is_it = [other].__contains__
    assert matching(own, 1 << 33, [make_call(DISPATCH).shape, own.shape, other.shape], is_it) == [other]
    assert matching(own, 1 << 33, [own.shape], is_it) == []


def test_two_arguments_are_named_if_one_is_a_flag():
    own = make_call(DISPATCH, use_fp8=True, round_scale=True)
    for words in ({"use_fp8": 0, "round_scale": 0}, {"round_scale": 0, "hidden": 1024}):
        other = own.with_words(**words)
        assert matching(own, 1 << 33, [], lambda call, other=other: call == other) == [other]
        assert difference(own, other, 0, 1).count(" on rank 1") == 2


# On the emulator; see test_calls_alike.py

emulator_only = pytest.mark.emulator_only(
    "a GPU's virtual ranks live in one process: what they launch is compared before"
)


@pytest.fixture
def like_processes(monkeypatch):
    monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))


def errors_of(main, num_ranks=2):
    """What each rank's main(buffer, rank) ends with."""

    def of_rank(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=1 << 18, low_latency_mode=True, num_qps_per_rank=4)
        try:
            main(buffer, comm.rank)
            buffer._memory.low_latency.synchronize()
            buffer._memory.check_faults()  # as the next call does
        except (ValueError, RuntimeError) as error:
            return error
        return None

    return nbep.spawn(of_rank, num_ranks, "emulator", on_deadlock="expire")


def dispatch(buffer, hidden=256, topk_idx=((0, 2), (1, 3)), **options):
    x = np.ones((len(topk_idx), hidden), ml_dtypes.bfloat16)
    return buffer.low_latency_dispatch(x, np.array(topk_idx), 4, 4, **options)


@emulator_only
def test_who_waits_in_vain_for_another_call_is_told_of_it_too(like_processes):
    """Its counts never come, but what the peer has sent is there."""
    weights = np.ones((2, 2), np.float32)
    of_one = {"deduplicate": True, "topk_weights": weights}
    first, last = errors_of(lambda buffer, rank: dispatch(buffer, **(of_one if rank else {})))
    assert "deduplicate: got False on rank 0, True on rank 1 in the same low_latency_dispatch;" in str(first)
    assert "deduplicate: got True on rank 1, False on rank 0 in the same low_latency_dispatch;" in str(last)


@emulator_only
def test_a_peer_that_does_not_come_is_a_time_out_whatever_its_earlier_calls_have_left(like_processes):
    def main(buffer, rank):
        for hidden in (256, 512, 256, 128):
            dispatch(buffer, hidden)
        if rank == 0:
            dispatch(buffer, 512)
        else:
            raise RuntimeError("gone")

    error, _ = errors_of(main)
    assert isinstance(error, nbep.PeerTimeout)
    assert error.peer == 1


@emulator_only
def test_combines_with_handles_of_different_dispatches_are_told_what_differs(like_processes):
    def main(buffer, rank):
        topk_idx = ((0, 2), (1, 3))
        received = [dispatch(buffer, hidden) for hidden in (256, 512)]
        handle = received[rank][2]
        rows = np.ones((2, 8, handle.hidden), ml_dtypes.bfloat16)
        buffer.low_latency_combine(rows, np.array(topk_idx), np.ones((2, 2), np.float32), handle)

    for rank, error in enumerate(errors_of(main)):
        mine, other = (256, 512)[rank], (512, 256)[rank]
        assert f"handle.hidden: got {mine} on rank {rank}, {other} on rank {1 - rank}" in str(error)


@emulator_only
def test_calls_that_differ_in_more_than_is_tried_name_both_ranks_and_all_that_must_be_alike(like_processes):
    def main(buffer, rank):
        if rank == 0:
            x = np.ones((2, 256), ml_dtypes.bfloat16)
            buffer.low_latency_dispatch(x, np.array([[0, 5], [1, 6]]), 3, 8)
        else:
            dispatch(buffer, 512, use_fp8=False)

    for rank, error in enumerate(errors_of(main)):
        assert f"rank {rank} and rank {1 - rank} have made different ones" in str(error)
        assert "round_scale" in str(error)
