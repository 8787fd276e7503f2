"""Bad arguments get a ValueError that names the argument, what came and what is allowed, before anything starts.

Each array with another dtype, rows, strides or alignment: test_prepared_calls.
"""

import re

import ml_dtypes
import numpy as np
import pytest
from arrays import array_name, to_target
from refusals import check_refused
from target import spawn

import nbep
from nbep.host.arguments import ROW_DTYPES

ARRAY = array_name()
BF16 = ml_dtypes.bfloat16
FP8 = ml_dtypes.float8_e4m3fn


# On a GPU the host does not look into arrays, and torch has none that run backwards.
emulator_only = pytest.mark.emulator_only("the host looks into arrays")
emulator_array = pytest.mark.emulator_only("torch has no negative strides")


def bf16(*shape):
    return np.ones(shape, BF16)


def event():
    return nbep.Buffer.capture()


def membership(rows):
    """is_token_in_rank, and the counts that go with it."""
    return {
        "is_token_in_rank": np.array(rows, bool),
        "num_tokens_per_rank": np.array(rows, np.int32).sum(axis=0, dtype=np.int32),
    }


LAYOUT = {
    "list": ({"topk_idx": [[0]]}, "topk_idx: got list; must be an array of int64 [num_tokens, num_topk]"),
    "dtype": ({"topk_idx": np.zeros((3, 2), np.int32)}, "topk_idx: got int32 [3, 2]; must be int64 [num_tokens,"),
    "dimensions": ({"topk_idx": np.zeros(3, np.int64)}, "topk_idx: got int64 [3]; must be int64 [num_tokens,"),
    "strided": ({"topk_idx": np.zeros((3, 4), np.int64)[:, ::2]},
        "topk_idx: got a strided int64 [3, 2]; must be row-major"),
    "no choices": ({"topk_idx": np.zeros((3, 0), np.int64)}, "topk_idx: got 0 choices a token; must be 1 to 32"),
    "33 choices": ({"topk_idx": np.zeros((3, 33), np.int64)}, "topk_idx: got 33 choices a token; must be 1 to 32"),
    "index too large": pytest.param({"topk_idx": np.array([[0, 1], [4, 0]])},
        "topk_idx[1, 0]: got 4; must be -1 (unused) or an expert", marks=emulator_only),
    "index too small": pytest.param({"topk_idx": np.array([[0, -2]])},
        "topk_idx[0, 1]: got -2; must be -1 (unused) or an expert", marks=emulator_only),
    "no experts": ({"num_experts": 0}, "num_experts: got 0; must be an integer of at least 1"),
    "float experts": ({"num_experts": 4.0}, "num_experts: got 4.0; must be an integer"),
    "odd experts": ({"num_experts": 5}, "num_experts: got 5; must be a multiple of 2 (ranks) of at most 256"),
    "129 local experts": ({"num_experts": 258}, "num_experts: got 258; must be a multiple of 2 (ranks) of at most 256"),
    "event": ({"previous_event": 1}, "previous_event: got int; must be an EventOverlap or None"),
    "event inside": ({"previous_event": nbep.EventOverlap(3)},
        "previous_event.event: got int; must be an EventHandle or None"),
    "comm stream": ({"allocate_on_comm_stream": True}, "allocate_on_comm_stream: got True without previous_event"),
    "comm stream without async": (lambda _: {"allocate_on_comm_stream": True, "previous_event": event()},
        "allocate_on_comm_stream: got True without previous_event and async_finish"),
    "comm stream without an event": (
        {"allocate_on_comm_stream": True, "async_finish": True, "previous_event": nbep.EventOverlap()},
        "allocate_on_comm_stream: got True without previous_event and async_finish"),
}  # fmt: skip

DISPATCH = {
    "double x": ({"x": np.zeros((3, 128))},
        f"x: got float64 [3, 128]; must be {' or '.join(ROW_DTYPES)} [num_tokens, hidden]"),
    "big-endian x": pytest.param({"x": np.zeros((3, 128), ">f4")},
        "x: got byte-swapped float32 [3, 128]; must be bfloat16", marks=emulator_array),
    "float hidden": ({"x": np.zeros((3, 6), np.float32)}, "hidden size of x: got 6; must be a positive multiple of 4"),
    "no array": ({"x": None}, "x: got NoneType; must be an array of bfloat16"),
    "hidden": ({"x": bf16(3, 12)}, "hidden size of x: got 12; must be a positive multiple of 8"),
    "no hidden": ({"x": bf16(3, 0)}, "hidden size of x: got 0; must be a positive multiple of 8"),
    "tuple of three": ({"x": (1, 2, 3)}, "x: got a tuple of 3; must be an array, or a tuple of an array and its"),
    "double scales": ({"x": (bf16(3, 128), np.ones((3, 1)))}, "x[1]: got float64 [3, 1]; must be float32 or int32"),
    "fp8 hidden": ({"x": (np.zeros((3, 136), FP8), np.ones((3, 1), np.float32))},
        "hidden size of x[0]: got 136; must be a positive multiple of 16"),
    "too many scales": ({"x": (np.zeros((3, 128), FP8), np.ones((3, 1025), np.float32))},
        "x[1]: got 1025 scales a token; must be 1 to 1024 scales a token: a warp's stage holds them"),
    "no scales": ({"x": (np.zeros((3, 128), FP8), np.ones((3, 0), np.float32))},
        "x[1]: got 0 scales a token; must be 1 to 1024 scales a token"),
    "big-endian scales": pytest.param({"x": (np.zeros((3, 128), FP8), np.ones((3, 1), ">f4"))},
        "x[1]: got byte-swapped float32 [3, 1]; must be float32 or int32", marks=emulator_array),
    "scales dtype": ({"x": (np.zeros((3, 128), FP8), np.ones((3, 1)))},
        "x[1]: got float64 [3, 1]; must be float32 or int32 [3, num_scales]"),
    "scales rows": ({"x": (np.zeros((3, 128), FP8), np.ones((2, 1), np.float32))},
        "x[1]: got float32 [2, 1]; must be float32 or int32 [3, num_scales]"),
    "scales backwards": pytest.param({"x": (np.zeros((3, 256), FP8), np.ones((3, 2), np.float32)[:, ::-1])},
        "x[1]: got strides (2, -1); must be of strides that are not negative", marks=emulator_array),
    "no counts": ({"num_tokens_per_rank": None}, "num_tokens_per_rank: got None; must be given unless there is a"),
    "no membership": ({"is_token_in_rank": None}, "is_token_in_rank: got None; must be given unless there is a"),
    "no expert counts": ({"num_tokens_per_expert": None}, "num_tokens_per_expert: got None; must be given unless"),
    "wrong counts": pytest.param({"num_tokens_per_rank": np.array([7, 8], np.int32)},
        "num_tokens_per_rank: got [7, 8]; must be [", marks=emulator_only),
    "wrong membership": pytest.param(
        lambda a: {"topk_idx": np.array([[0, 2], [0, 3], [2, 2]])} | membership([[1, 1], [1, 0], [0, 1]]),
        "is_token_in_rank[1, 1]: got False; must be True, as topk_idx[1] says: [0, 3]", marks=emulator_only),
    "membership of unused": pytest.param(
        lambda a: {"topk_idx": np.array([[0, 2], [-1, -1], [2, 2]])} | membership([[1, 1], [0, 1], [0, 1]]),
        "is_token_in_rank[1, 1]: got True; must be False, as topk_idx[1] says: [-1, -1]", marks=emulator_only),
    "wrong expert counts": pytest.param(lambda a: {"topk_idx": np.array([[0, 2], [-1, 3], [2, 2]]),
            "num_tokens_per_expert": np.array([1, 0, 2, 1], np.int32), **membership([[1, 1], [0, 1], [0, 1]])},
        "num_tokens_per_expert[2]: got 2; must be 3, the choices of topk_idx that are 2", marks=emulator_only),
    "expert counts": ({"num_tokens_per_expert": np.zeros(3, np.int32)},
        "size of num_tokens_per_expert: got 3; must be a multiple of 2 (ranks)"),
    "129 local experts": ({"num_tokens_per_expert": np.zeros(258, np.int32)},
        "size of num_tokens_per_expert: got 258; must be a multiple of 2 (ranks) of at most 256"),
    "indices alone": ({"topk_weights": None}, "topk_weights: got None; must be given together with topk_idx"),
    "weights alone": ({"topk_idx": None}, "topk_idx: got None; must be given together with topk_weights"),
    "33 choices": ({"topk_idx": np.zeros((3, 33), np.int64), "topk_weights": np.zeros((3, 33), np.float32)},
        "topk_idx: got 33 choices a token; must be 1 to 32 choices a token"),
    "big-endian indices": pytest.param(lambda a: {"topk_idx": a["topk_idx"].astype(">i8")},
        "topk_idx: got byte-swapped int64 [3, 2]; must be int64 [3, num_topk]", marks=emulator_array),
    "big-endian weights": pytest.param(lambda a: {"topk_weights": a["topk_weights"].astype(">f4")},
        "topk_weights: got byte-swapped float32 [3, 2]; must be float32 [3, 2]", marks=emulator_array),
    "big-endian counts": pytest.param(lambda a: {"num_tokens_per_expert": a["num_tokens_per_expert"].astype(">i4")},
        "num_tokens_per_expert: got byte-swapped int32 [4]; must be int32 [num_experts]", marks=emulator_array),
    "flag": ({"async_finish": 1}, "async_finish: got 1; must be True or False"),
    "index too large": pytest.param({"topk_idx": np.full((3, 2), 4)},
        "topk_idx[0, 0]: got 4; must be -1 (unused) or an expert", marks=emulator_only),
    "alignment": ({"expert_alignment": 0}, "expert_alignment: got 0; must be an integer of at least 1"),
    "negative worst": ({"num_worst_tokens": -1}, "num_worst_tokens: got -1; must be an integer of at least 0"),
    "worst without top-k": ({"num_worst_tokens": 9, "topk_idx": None, "topk_weights": None},
        "num_worst_tokens: got 9; must be 0 without topk_idx and topk_weights"),
    "too few worst": pytest.param({"num_worst_tokens": 2, "topk_idx": np.array([[0, 2]] * 3),
            "is_token_in_rank": np.ones((3, 2), bool), "num_tokens_per_rank": np.array([3, 3], np.int32),
            "num_tokens_per_expert": np.array([3, 0, 3, 0], np.int32)},
        "num_worst_tokens: got 2; must be at least 3, the tokens that this rank sends to itself, and more for what",
        marks=emulator_only),
    "config type": ({"config": (2, 2, 4)}, "config: got tuple; must be an nbep.Config or None"),
    "odd SMs": ({"config": nbep.Config(3, 2, 4)}, "config.num_sms: got 3; must be even and at least 2"),
    "no SMs": ({"config": nbep.Config(0, 2, 4)}, "config.num_sms: got 0; must be even and at least 2"),
    "threads": ({"config": nbep.Config(2, 2, 4, num_threads=96)},
        "config.num_threads: got 96; must be a multiple of 64 (a warp a rank) from 64 to 768"),
    "too many threads": ({"config": nbep.Config(2, 2, 4, num_threads=1024)},
        "config.num_threads: got 1024; must be a multiple of 64 (a warp a rank) from 64 to 768"),
    "buffer too small": ({"config": nbep.Config(20, 6, 256)},
        "num_nvl_bytes: got 131072 at construction; must be at least 1"),
    "event": ({"previous_event": 1}, "previous_event: got int; must be an EventOverlap or None"),
    "comm stream": ({"allocate_on_comm_stream": True}, "allocate_on_comm_stream: got True without previous_event"),
}  # fmt: skip

CACHED = {
    "indices": ({"topk_idx": np.zeros((3, 2), np.int64)}, f"topk_idx: got {ARRAY}; must be None together with"),
    "weights": ({"topk_weights": np.zeros((3, 2))}, f"topk_weights: got {ARRAY}; must be None together with"),
    "tokens": ({"x": bf16(4, 128)}, "x: got 4 tokens; must be 3 tokens, as in the dispatch of the handle"),
    "other SMs": ({"config": nbep.Config(4, 2, 4)}, "config.num_sms: got 4; must be 2, as in the dispatch that made"),
    "type": ({"handle": 5}, "handle: got int; must be the handle that dispatch returned, or a tuple of its six"),
    "short tuple": ({"handle": (1, 2)}, "handle: got tuple; must be the handle that dispatch returned"),
}

COMBINE = {
    "hidden": (lambda a: {"x": bf16(len(a["x"]), 4)}, "hidden size of x: got 4; must be a positive multiple of 8"),
    "33 weights": (
        lambda a: {"topk_weights": np.zeros((len(a["x"]), 33), np.float32)},
        "topk_weights: got 33 choices a token; must be 1 to 32",
    ),
    "second bias": ({"bias": (bf16(3, 128), bf16(3, 8))}, "bias_1: got bfloat16 [3, 8]; must be bfloat16 [3, 128]"),
    "three biases": ({"bias": (None, None, None)}, "bias: got a tuple of 3; must be an array, a tuple of two, or None"),
    "other SMs": ({"config": nbep.Config(4, 2, 4)}, "config.num_sms: got 4; must be 2, as in the dispatch that made"),
    "threads": (
        {"config": nbep.Config(2, 2, 4, num_threads=32)},
        "config.num_threads: got 32; must be a multiple of 64 (a warp a rank) from 64 to 768",
    ),
    "buffer too small": (
        {"config": nbep.Config(2, 2, 4096)},
        "num_nvl_bytes: got 131072 at construction; must be at least 2",
    ),
    "no handle": ({"handle": None}, "handle: got NoneType; must be the handle that dispatch returned"),
    "event": ({"previous_event": 1}, "previous_event: got int; must be an EventOverlap or None"),
    "comm stream": ({"allocate_on_comm_stream": True}, "allocate_on_comm_stream: got True without previous_event"),
}


def test_layout_refuses(on_two_ranks, starts_nothing):
    def main(buffer):
        arguments = {"topk_idx": to_target(np.zeros((3, 2), np.int64)), "num_experts": 4}
        buffer.get_comm_stream(), event()  # both streams exist
        check_refused(buffer.get_dispatch_layout, arguments, LAYOUT, starts_nothing)

    on_two_ranks(main)


def test_dispatch_refuses(on_two_ranks, inputs, starts_nothing):
    on_two_ranks(lambda buffer: check_refused(buffer.dispatch, inputs(buffer), DISPATCH, starts_nothing))


def test_cached_dispatch_refuses(on_two_ranks, inputs, starts_nothing):
    def main(buffer):
        arguments = inputs(buffer)
        handle = buffer.dispatch(**arguments)[4]
        arguments = {"x": arguments["x"], "handle": handle, "config": arguments["config"]}
        check_refused(buffer.dispatch, arguments, CACHED, starts_nothing)

    on_two_ranks(main)


def test_combine_refuses(on_two_ranks, inputs, starts_nothing):
    def main(buffer):
        arguments = inputs(buffer)
        recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        arguments = {"x": recv_x, "handle": handle, "config": arguments["config"]}
        check_refused(buffer.combine, arguments, COMBINE, starts_nothing)

    on_two_ranks(main)


HANDLE_FIELDS = {
    "rank_prefix_matrix": np.zeros((2, 3), np.int32),
    "channel_prefix_matrix": np.zeros((3, 1), np.int32),
    "recv_channel_prefix_matrix": np.zeros((2, 2), np.int32),
    "recv_src_idx": np.zeros(4, np.int64),
    "is_token_in_rank": np.zeros((3, 2), np.uint8),
    "send_head": np.zeros((2, 2), np.int32),
}


def test_a_tuple_with_a_wrong_array_is_refused_as_a_handle(on_two_ranks, inputs, starts_nothing):
    def main(buffer):
        arguments = inputs(buffer)
        recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        for i, (field, array) in enumerate(HANDLE_FIELDS.items()):
            wrong = list(handle)
            wrong[i] = to_target(array)
            with starts_nothing(), pytest.raises(ValueError, match=rf"^handle\.{field}: got"):
                buffer.combine(recv_x, tuple(wrong), config=arguments["config"])

    on_two_ranks(main)


def test_a_handle_of_another_buffer_is_refused(inputs, starts_nothing):
    def main(comm):
        first, second = (nbep.Buffer(comm, num_nvl_bytes=1 << 17) for _ in range(2))
        arguments = inputs(first)
        recv_x, _, _, _, handle, _ = first.dispatch(**arguments)
        message = (
            f"handle: got the handle of another buffer; must be a handle that this buffer made on rank {comm.rank}"
        )
        with starts_nothing():
            with pytest.raises(ValueError, match=message):
                second.combine(recv_x, handle, config=arguments["config"])
            with pytest.raises(ValueError, match=message):
                second.dispatch(arguments["x"], handle=handle, config=arguments["config"])
        first.destroy()
        second.destroy()

    spawn(main, 2)


def test_a_handle_of_another_rank_is_refused(on_two_ranks, inputs):
    def main(buffer):
        arguments = inputs(buffer)
        recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments)
        foreign = buffer.group.allgather(handle)[1 - buffer.rank]
        with pytest.raises(ValueError, match="handle: got the handle of another buffer"):
            buffer.combine(recv_x, foreign, config=arguments["config"])

    on_two_ranks(main)


@pytest.mark.parametrize("config", [nbep.Config(2, 2, 100), None])
def test_the_bytes_that_an_error_asks_for_are_enough(config, inputs):
    """The default config makes do with two slots a ring."""

    def main(comm, num_nvl_bytes):
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes)
        arguments = {**inputs(buffer), "config": config}
        try:
            buffer.dispatch(**arguments)
        except ValueError as error:
            return int(re.search(r"must be at least (\d+)", str(error))[1])
        finally:
            buffer.destroy()
        return None

    needed = spawn(main, 2, args=(4096,))[0]
    assert spawn(main, 2, args=(needed - 128,)) == [needed] * 2
    assert spawn(main, 2, args=(needed,)) == [None] * 2


CASTS = {
    "dtype": ((np.zeros((2, 128), np.float32),), "x: got float32 [2, 128]; must be bfloat16 [num_tokens, hidden]"),
    "hidden": ((bf16(2, 64),), "hidden size of x: got 64; must be a positive multiple of 128"),
}
CASTS_BACK = {
    "dtype": ((bf16(2, 128), np.ones((2, 1), np.float32)), "x_fp8: got bfloat16 [2, 128]; must be float8_e4m3fn"),
    "scales": ((np.zeros((2, 128), FP8), np.ones((2, 2), np.float32)),
        "scales: got float32 [2, 2]; must be float32 [2, 1]"),
    "backwards": pytest.param((np.zeros((2, 256), FP8), np.ones((2, 2), np.float32)[::-1]),
        "scales: got strides (-2, 1); must be of strides that are not negative", marks=emulator_array),
}  # fmt: skip


def check_cast_refused(cast, arguments, message, starts_nothing):
    def main(comm):
        arrays = to_target(arguments)
        with starts_nothing(), pytest.raises(ValueError, match="^" + re.escape(message)):
            cast(*arrays)

    spawn(main, 1)


@pytest.mark.parametrize(("change", "message"), CASTS.values(), ids=CASTS)
def test_cast_refuses(change, message, starts_nothing):
    check_cast_refused(nbep.per_token_cast_to_fp8, change, message, starts_nothing)


@pytest.mark.parametrize(("change", "message"), CASTS_BACK.values(), ids=CASTS_BACK)
def test_cast_back_refuses(change, message, starts_nothing):
    check_cast_refused(nbep.per_token_cast_back, change, message, starts_nothing)
