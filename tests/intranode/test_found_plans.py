"""On the emulator, too, a call like the one before finds its plan; what is in its arrays is checked all the same."""

import ml_dtypes
import numpy as np
import pytest

import nbep

NUM_RANKS, NUM_TOKENS, HIDDEN, NUM_EXPERTS = 2, 6, 128, 4
CONFIG = nbep.Config(2, 2, 8)


def arguments(comm, buffer):
    """Of a dispatch that sends every other token to the other rank: as many come as go."""
    topk_idx = np.arange(NUM_TOKENS)[:, None] % NUM_RANKS * 2 + np.arange(2)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    return {**counts, "topk_idx": topk_idx, "topk_weights": np.ones((NUM_TOKENS, 2), np.float32), "config": CONFIG}


def rows(number):
    return np.full((NUM_TOKENS, HIDDEN), number, ml_dtypes.bfloat16)


def num_plans(buffer):
    memory = buffer._memory
    return [len(plans) for plans in (memory.counted_plans, memory.cached_plans, memory.combine_plans)]


def test_later_calls_find_the_plans_of_the_first():
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 18)
        given = arguments(comm, buffer)
        for number in (1, 2, 3):
            recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(rows(number), **given)
            again = buffer.dispatch(rows(number), handle=handle, config=CONFIG)[0]
            combined, weights, _ = buffer.combine(recv_x, handle, recv_weights, config=CONFIG)
            assert (again == recv_x).all()
            assert (combined == rows(number)).all()
            assert (weights == 1).all()
        # Which dispatch a handle is of is part of what the ranks compare, so each handle has its own two.
        return num_plans(buffer)

    assert nbep.spawn(main, NUM_RANKS, target="emulator") == [[1, 3, 3]] * NUM_RANKS


def test_a_call_with_another_option_has_a_plan_of_its_own():
    """Each differs from the first in one option alone, with the same arrays. Kernels do not tell handles apart here."""
    more = nbep.Config(4, 2, 8)
    changes = [
        ({}, (6, [6, 6], 1, 2)),
        ({"expert_alignment": 4}, (6, [8, 8], 1, 2)),
        ({"num_worst_tokens": 20}, (20, [], 1, 2)),
        ({"config": more}, (6, [6, 6], 2, 2)),
        ({"topk_idx": None, "topk_weights": None}, (6, [6, 6], 1, 0)),
    ]

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 18, check_calls=False)
        given = arguments(comm, buffer)
        handles = []
        for change, wanted in changes:
            recv_x, recv_idx, _, per_expert, handle, _ = buffer.dispatch(rows(1), **{**given, **change})
            num_topk = 0 if recv_idx is None else recv_idx.shape[1]
            assert (len(recv_x), per_expert, handle.num_channels, num_topk) == wanted
            handles.append(handle)
        for k, num_plans_now in ((0, 1), (3, 2), (4, 2)):  # of one channel, of two, of one
            buffer.dispatch(rows(1), handle=handles[k])
            buffer.combine(rows(1), handles[k])
            assert num_plans(buffer)[1:] == [num_plans_now] * 2
        buffer.combine(rows(1), handles[0], config=CONFIG)
        with pytest.raises(ValueError, match=r"^config\.num_sms: got 4"):
            buffer.combine(rows(1), handles[0], config=more)

    nbep.spawn(main, NUM_RANKS, target="emulator")


def spoilt(what, buffer, given, handle, weights):
    """A call that would find a plan, of which one thing is wrong."""
    x, in_rings = rows(1), buffer.get_local_buffer_tensor(ml_dtypes.bfloat16, (NUM_TOKENS, HIDDEN))
    if what in given:
        array = given[what].copy()
        array.reshape(-1)[0] = {"is_token_in_rank": False, "topk_idx": 99}.get(what, array.reshape(-1)[0] + 1)
        return lambda: buffer.dispatch(x, **{**given, what: array})
    if what.startswith("handle."):
        array = getattr(handle, what.removeprefix("handle."))
        array.reshape(-1)[0] += 1
        return lambda: buffer.dispatch(x, handle=handle, config=CONFIG)
    if what == "x":
        return lambda: buffer.dispatch(in_rings, **given)
    over = handle.send_head.reshape(-1).view(np.float32).reshape(weights.shape)
    return lambda: buffer.combine(x, handle, over, config=CONFIG)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("num_tokens_per_rank", r"^num_tokens_per_rank: got \[4, 3\]; must be \[3, 3\], as is_token_in_rank says"),
        ("is_token_in_rank", r"^num_tokens_per_rank: got"),
        ("num_tokens_per_expert", r"^num_tokens_per_expert\[0\]: got 4"),
        ("topk_idx", r"^topk_idx\[0, 0\]: got 99"),
        ("handle.channel_prefix_matrix", r"^handle.channel_prefix_matrix"),
        ("handle.send_head", r"^handle.send_head"),
        ("x", "^x: got memory of the buffer through which the call sends"),
        ("overlap", "^handle.send_head: got memory that topk_weights lies in too"),
    ],
)
def test_what_is_wrong_in_a_later_call_is_refused(what, message):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 18)
        given = arguments(comm, buffer)
        recv_x, _, weights, _, handle, _ = buffer.dispatch(rows(1), **given)
        buffer.dispatch(rows(1), handle=handle, config=CONFIG)
        buffer.combine(recv_x, handle, weights, config=CONFIG)
        before = num_plans(buffer)
        with pytest.raises(ValueError, match=message):
            spoilt(what, buffer, given, handle, weights)()
        assert num_plans(buffer) == before == [1, 1, 1]

    nbep.spawn(main, NUM_RANKS, target="emulator")
