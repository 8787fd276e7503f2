"""Bad arguments of the low-latency verbs get a ValueError that names the argument, before anything starts.

Each wrong call is followed by correct ones: what was refused has left nothing behind.

Each array with another dtype, rows, strides or alignment: test_prepared_calls.
"""

import re

import ml_dtypes
import numpy as np
import pytest
from arrays import LIBRARY, array_name, to_numpy, to_target
from low_latency import HOOK, Options, Trip, check, make_buffer, make_low_latency_case
from refusals import check_refused
from target import spawn

import nbep

ARRAY = array_name()
BF16 = ml_dtypes.bfloat16
CASE = make_low_latency_case(1, num_tokens=3, hidden=512, unused=0)  # of 2 ranks, with 4 experts and 2 choices
TRIP = Options(spare=1, deduplicate=True)  # deduplicate for the size of the buffer

emulator_only = pytest.mark.emulator_only("the host looks into arrays")
emulator_array = pytest.mark.emulator_only("torch has no such array")


def bf16(*shape):
    return np.ones(shape, BF16)


def idx(*rows):
    return np.array(rows, np.int64)


DISPATCH = {
    "no x": ({"x": None}, "x: got NoneType; must be an array of bfloat16 ["),
    "x of one dimension": ({"x": bf16(512)}, "x: got bfloat16 [512]; must be bfloat16 ["),
    "hidden": ({"x": bf16(3, 192)}, "hidden size of x: got 192; must be a positive multiple of 128"),
    "no hidden": ({"x": bf16(3, 0)}, "hidden size of x: got 0; must be a positive multiple of 128"),
    "hidden of ue8m0": ({"x": bf16(3, 384), "use_fp8": True, "round_scale": True, "use_ue8m0": True},
        "hidden size of x: got 384; must be a multiple of 512 with use_ue8m0"),
    "too many tokens": ({"x": bf16(5, 512), "topk_idx": np.zeros((5, 2), np.int64)},
        "x: got 5 tokens; must be at most num_max_dispatch_tokens_per_rank (4) tokens"),
    "no tokens at most": ({"num_max_dispatch_tokens_per_rank": 0},
        "num_max_dispatch_tokens_per_rank: got 0; must be an integer of at least 1"),
    "tokens at most as a float": ({"num_max_dispatch_tokens_per_rank": 4.5},
        "num_max_dispatch_tokens_per_rank: got 4.5; must be an integer of at least 1"),
    "experts that ranks cannot share": ({"num_experts": 5}, "num_experts: got 5; must be a multiple of 2 (ranks)"),
    "no experts": ({"num_experts": 0}, "num_experts: got 0; must be an integer of at least 1"),
    "too many experts": ({"num_experts": 2050},
        "num_experts: got 2050; must be a multiple of 2 (ranks) of at most 2048"),
    "more experts than the buffer holds": ({"num_experts": 8}, "num_rdma_bytes: got "),
    "more tokens than the buffer holds": ({"num_max_dispatch_tokens_per_rank": 9}, "num_rdma_bytes: got "),
    "choices as a list": ({"topk_idx": [[0, 1]]}, "topk_idx: got list; must be an array of int64 ["),
    "no choices": ({"topk_idx": np.zeros((3, 0), np.int64)}, "topk_idx: got 0 choices a token; must be 1 to 32"),
    "33 choices": ({"topk_idx": np.full((3, 33), -1)}, "topk_idx: got 33 choices a token; must be 1 to 32 choices"),
    "an expert that is not there": pytest.param({"topk_idx": idx([0, 1], [2, 4], [0, 3])},
        "topk_idx[1, 1]: got 4; must be -1 (unused) or an expert below 4", marks=emulator_only),
    "an expert below -1": pytest.param({"topk_idx": idx([0, 1], [2, 3], [-2, 3])},
        "topk_idx[2, 0]: got -2; must be -1 (unused) or an expert below 4", marks=emulator_only),
    "an expert twice": pytest.param({"topk_idx": idx([0, 1], [-1, -1], [3, 3])},
        "topk_idx[2]: got [3, 3]; must be without expert 3 twice", marks=emulator_only),
    "statistics of all experts": ({"cumulative_local_expert_recv_stats": np.zeros(4, np.int32)},
        "cumulative_local_expert_recv_stats: got int32 [4]; must be int32 [2]"),
    "hook and event": ({"async_finish": True, "return_recv_hook": True},
        "return_recv_hook: got True together with async_finish; must be one of the two in low_latency_dispatch"),
    "rounded bf16": ({"round_scale": True}, "round_scale: got True; must be False without use_fp8"),
    "ue8m0 of bf16": ({"use_ue8m0": True}, "use_ue8m0|round_scale: got (True|False); must be "),
    "ue8m0 of scales that are not rounded": ({"use_fp8": True, "use_ue8m0": True},
        "use_ue8m0|round_scale: got (True|False); must be "),
    "weights that do not travel": ({"topk_weights": np.ones((3, 2), np.float32)},
        f"topk_weights: got {ARRAY}; must be None without deduplicate"),
    "no weights that travel": ({"deduplicate": True}, "topk_weights: got None; must be given with deduplicate"),
}  # fmt: skip

COMBINE = {
    "fp8 x": pytest.param({"x": np.zeros((2, 8, 512), ml_dtypes.float8_e4m3fn)},
        "x: got float8_e4m3fn [2, 8, 512]; must be bfloat16 [2, 8, 512]",
        marks=pytest.mark.skipif(LIBRARY == "cupy", reason="CuPy has no float8 dtype")),
    "x of two dimensions": ({"x": bf16(16, 512)}, "x: got bfloat16 [16, 512]; must be bfloat16 [2, 8, 512]"),
    "no x": ({"x": None}, "x: got NoneType; must be an array of bfloat16 [2, 8, 512]"),
    "more tokens than the dispatch allowed": (
        {"topk_idx": np.full((5, 2), -1), "topk_weights": np.ones((5, 2), np.float32)},
        "topk_idx: got 5 tokens; must be at most 4 tokens, as in the dispatch of the handle"),
    "33 choices": ({"topk_idx": np.full((3, 33), -1), "topk_weights": np.ones((3, 33), np.float32)},
        "topk_idx: got 33 choices a token; must be 1 to 32"),
    "an expert that is not there": pytest.param({"topk_idx": idx([0, 1], [2, 4], [0, 3])},
        "topk_idx[1, 1]: got 4; must be -1 (unused) or an expert below 4", marks=emulator_only),
    "an expert twice": pytest.param({"topk_idx": idx([0, 1], [-1, -1], [3, 3])},
        "topk_idx[2]: got [3, 3]; must be without expert 3 twice", marks=emulator_only),
    "no weights": ({"topk_weights": None}, "topk_weights: got NoneType; must be an array of float32 [3, 2]"),
    "no handle": ({"handle": None},
        "handle: got NoneType; must be the handle that low_latency_dispatch returned, or a"),
    "handle of four": ({"handle": (1, 2, 3, 4)}, "handle: got tuple; must be the handle that low_latency_dispatch ret"),
    "waits of all experts": ({"combine_wait_recv_cost_stats": np.zeros(4, np.int64)},
        "combine_wait_recv_cost_stats: got int64 [4]; must be int64 [2]"),
    "hook and event": ({"async_finish": True, "return_recv_hook": True},
        "return_recv_hook: got True together with async_finish; must be one of the two in low_latency_combine"),
    "zero copy of logfmt": ({"zero_copy": True, "use_logfmt": True},
        "zero_copy: got True; must be False with use_logfmt"),
    "zero copy without its buffer": ({"zero_copy": True},
        "zero_copy: got True without get_next_low_latency_combine_buffer since the last low-latency call; must be"),
}  # fmt: skip

HANDLE_PARTS = {
    "handle.src_info": (0, np.zeros((2, 6), np.int32)),
    "handle.layout_range": (1, np.zeros((2, 2), np.int32)),
    "handle.num_max_dispatch_tokens_per_rank": (2, 0),
    "handle.hidden": (3, -128),
    "hidden size of x": (3, 192),
    "handle.num_experts": (4, 5),
    "num_rdma_bytes": (4, 64),
}


def dispatch_arguments(rank):
    return {
        "x": to_target(CASE.x[rank]),
        "topk_idx": to_target(CASE.topk_idx[rank]),
        "num_max_dispatch_tokens_per_rank": 4,
        "num_experts": CASE.num_experts,
        "use_fp8": False,
    }


def combine_arguments(trip):
    return {
        "x": to_target(np.zeros((2, 8, 512), BF16)),
        "topk_idx": trip.topk_idx,
        "topk_weights": trip.topk_weights,
        "handle": trip.handle,
    }


def dispatched_trip(comm, options=None):
    """A buffer, and a trip that has come as far as combine."""
    buffer = make_buffer(comm, [(CASE, TRIP)])
    trip = Trip(buffer, CASE, options or Options(spare=1))
    trip.send_dispatch()
    trip.receive_dispatch()
    return buffer, trip


def finish(buffer, trip):
    trip.send_combine()
    trip.receive_combine()
    buffer.destroy()
    return trip.outcome


def test_low_latency_dispatch_refuses(starts_nothing):
    def main(comm):
        buffer = make_buffer(comm, [(CASE, TRIP)])
        check_refused(buffer.low_latency_dispatch, dispatch_arguments(comm.rank), DISPATCH, starts_nothing)
        trip = Trip(buffer, CASE, Options(spare=1))
        trip.send_dispatch()
        trip.receive_dispatch()
        # What has been accepted once is still refused.
        check_refused(buffer.low_latency_dispatch, dispatch_arguments(comm.rank), DISPATCH, starts_nothing)
        return finish(buffer, trip)

    check(CASE, Options(spare=1), spawn(main, 2), "after wrong dispatches")


def test_low_latency_combine_refuses(starts_nothing):
    def main(comm):
        buffer, trip = dispatched_trip(comm)
        check_refused(buffer.low_latency_combine, combine_arguments(trip), COMBINE, starts_nothing)
        trip.send_combine()
        trip.receive_combine()
        check_refused(buffer.low_latency_combine, combine_arguments(trip), COMBINE, starts_nothing)
        return finish(buffer, trip)

    check(CASE, Options(spare=1), spawn(main, 2), "after wrong combines")


def test_a_tuple_with_a_wrong_part_is_refused_as_a_handle(starts_nothing):
    def main(comm):
        buffer, trip = dispatched_trip(comm)
        for name, (part, value) in HANDLE_PARTS.items():
            parts = list(trip.handle)
            parts[part] = to_target(value)
            arguments = {**combine_arguments(trip), "handle": tuple(parts)}
            if name == "hidden size of x":
                arguments["x"] = to_target(bf16(2, 8, 192))
            with starts_nothing(), pytest.raises(ValueError, match=f"^{re.escape(name)}: got"):
                buffer.low_latency_combine(**arguments)
        return finish(buffer, trip)

    check(CASE, Options(spare=1), spawn(main, 2), "after wrong handles")


@pytest.mark.parametrize("between", ["dispatch", "combine"])
def test_a_zero_copy_buffer_serves_the_next_call_alone(between, starts_nothing):
    def main(comm):
        buffer, trip = dispatched_trip(comm)
        buffer.get_next_low_latency_combine_buffer(trip.handle)
        if between == "dispatch":
            Trip(buffer, CASE, Options(spare=1)).send_dispatch()
        else:
            trip.send_combine()
            trip.receive_combine()
        with (
            starts_nothing(),
            pytest.raises(ValueError, match=r"^zero_copy: got True without get_next_low_latency_comb"),
        ):
            buffer.low_latency_combine(**combine_arguments(trip), zero_copy=True)
        return finish(buffer, trip)

    check(CASE, Options(spare=1), spawn(main, 2), "after a buffer that was got too early")


def test_deduplicate_excludes_logfmt(starts_nothing):
    def main(comm):
        buffer, trip = dispatched_trip(comm, TRIP)
        message = "^use_logfmt: got True; must be False with the handle of a dispatch with deduplicate"
        with starts_nothing(), pytest.raises(ValueError, match=message):
            buffer.low_latency_combine(**combine_arguments(trip), use_logfmt=True)
        return finish(buffer, trip)

    check(CASE, TRIP, spawn(main, 2), "after a wrong option")


@emulator_only
def test_weights_that_differ_from_those_of_deduplicate_are_refused(starts_nothing):
    def main(comm):
        buffer, trip = dispatched_trip(comm, TRIP)
        arguments = combine_arguments(trip)
        arguments["topk_weights"] = to_target(to_numpy(trip.topk_weights) * 2)
        message = "^topk_weights: got others than in the dispatch with deduplicate; must be those: they went with"
        with starts_nothing(), pytest.raises(ValueError, match=message):
            buffer.low_latency_combine(**arguments)
        return finish(buffer, trip)

    check(CASE, TRIP, spawn(main, 2), "after other weights")


def test_clean_low_latency_buffer_refuses(starts_nothing):
    def main(comm):
        buffer, trip = dispatched_trip(comm)
        for arguments, message in (
            ((0, 128, 4), "num_max_dispatch_tokens_per_rank: got 0; must be an integer of at least 1"),
            ((4, 0, 4), "hidden: got 0; must be an integer of at least 1"),
            ((4, 128, 5), "num_experts: got 5; must be a multiple of 2 (ranks) of at most 2048"),
            ((4, 1 << 20, 4), "num_rdma_bytes: got "),
        ):
            with starts_nothing(), pytest.raises(ValueError, match="^" + re.escape(message)):
                buffer.clean_low_latency_buffer(*arguments)
        return finish(buffer, trip)

    check(CASE, Options(spare=1), spawn(main, 2), "after wrong cleans")


def test_a_float_is_no_size_even_if_the_equal_integer_was_taken_before(starts_nothing):
    """What a call needs is worked out once for its sizes, and 4.0 is equal to 4."""

    def main(comm):
        buffer, trip = dispatched_trip(comm)
        trip.send_combine()
        trip.receive_combine()
        src_info, layout_range, *sizes = trip.handle
        for i, name in enumerate(("num_max_dispatch_tokens_per_rank", "hidden", "num_experts")):
            wrong = [float(size) if i == j else size for j, size in enumerate(sizes)]
            handle = (src_info, layout_range, *wrong)
            calls = [
                lambda handle=handle: buffer.low_latency_combine(**{**combine_arguments(trip), "handle": handle}),
                lambda handle=handle: buffer.get_next_low_latency_combine_buffer(handle),
                lambda wrong=wrong: buffer.clean_low_latency_buffer(*wrong),
            ]
            arguments = dispatch_arguments(comm.rank)
            if name in arguments:
                arguments[name] = float(arguments[name])
                calls.append(lambda arguments=arguments: buffer.low_latency_dispatch(**arguments))
            for call in calls:
                message = rf"^(handle\.)?{name}: got {sizes[i]}\.0; must be an integer of at least 1"
                with starts_nothing(), pytest.raises(ValueError, match=message):
                    call()
        return finish(buffer, trip)

    check(CASE, Options(spare=1), spawn(main, 2), "after sizes that are no integers")


def test_masks_need_enable_shrink(starts_nothing):
    def main(comm):
        buffer, trip = dispatched_trip(comm)
        for verb, arguments in {
            "low_latency_update_mask_buffer": (0,),
            "low_latency_query_mask_buffer": (to_target(np.zeros(2, np.int32)),),
            "low_latency_clean_mask_buffer": (),
        }.items():
            message = f"^{verb}: the buffer masks no ranks; make it with enable_shrink=True"
            with starts_nothing(), pytest.raises(ValueError, match=message):
                getattr(buffer, verb)(*arguments)
        return finish(buffer, trip)

    check(CASE, Options(spare=1), spawn(main, 2), "after masks that are not there")


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (2, "rank_to_mask: got 2; must be a rank below 2"),
        (-1, "rank_to_mask: got -1; must be an integer of at least 0"),
        (1.0, "rank_to_mask: got 1.0; must be an integer of at least 0"),
        (True, "rank_to_mask: got True; must be an integer of at least 0"),
    ],
)
def test_a_mask_is_of_another_rank(rank, message, starts_nothing):
    def main(comm):
        buffer = make_buffer(comm, [(CASE, TRIP)], enable_shrink=True)
        with starts_nothing(), pytest.raises(ValueError, match="^" + re.escape(message)):
            buffer.low_latency_update_mask_buffer(rank, True)
        with starts_nothing(), pytest.raises(ValueError, match=f"rank_to_mask: got {comm.rank}; must be another rank"):
            buffer.low_latency_update_mask_buffer(comm.rank, True)
        trip = Trip(buffer, CASE, Options(spare=1))
        trip.send_dispatch()
        trip.receive_dispatch()
        return finish(buffer, trip)

    check(CASE, Options(spare=1), spawn(main, 2), "after a wrong mask")


def test_a_third_call_and_a_second_call_of_a_hook_start_nothing(starts_nothing):
    def main(comm):
        options = Options(spare=1, dispatch_as=HOOK)
        buffer = make_buffer(comm, [(CASE, options)])
        first, second, third = (Trip(buffer, CASE, options) for _ in range(3))
        first.send_dispatch()
        second.send_dispatch()
        with starts_nothing(), pytest.raises(ValueError, match=r"^low_latency_dispatch: got a third call under way"):
            buffer.low_latency_dispatch(**dispatch_arguments(comm.rank))
        first.receive_dispatch()
        with (
            starts_nothing(),
            pytest.raises(ValueError, match=r"^hook: got a second call of the hook of low_latency_d"),
        ):
            first._receive()
        with (
            starts_nothing(),
            pytest.raises(ValueError, match=r"^handle: got that of low_latency_dispatch .* whose hook"),
        ):
            buffer.low_latency_combine(**combine_arguments(second))
        third.send_dispatch()
        second.receive_dispatch()
        third.receive_dispatch()
        return finish(buffer, third)

    check(CASE, Options(spare=1), spawn(main, 2), "after refused calls")


def test_groups_of_one_and_of_more_than_256_are_refused():
    def main(comm):
        with pytest.raises(
            ValueError, match=re.escape(f"group: got {comm.size} ranks; must be a group of 2 to 256 ranks")
        ):
            nbep.Buffer(comm, num_rdma_bytes=1024, low_latency_mode=True)

    spawn(main, 1)
    spawn(main, 257)
