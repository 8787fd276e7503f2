"""The RDMA buffer: its size, what users see of it, cleaning it, and the other mode beside it."""

import numpy as np
import pytest
from arrays import assert_kind, assign, to_numpy, to_target
from cases import make_case
from intranode import Expected, combine, dispatch, num_nvl_bytes
from intranode import Options as IntranodeOptions
from low_latency import BOTH, HOOK, Options, Trip, check, make_buffer, make_low_latency_case, num_rdma_bytes
from parts import both_parts
from target import MEMORY_MODELS, TARGET, spawn

import nbep

size_hint = nbep.Buffer.get_low_latency_rdma_size_hint


# Sizes


def deepep_size_hint(num_max_tokens, hidden, num_experts):
    """DeepEP csrc/config.hpp, LowLatencyLayout, in its own words."""
    num_scales = hidden // 128
    num_bytes_per_dispatch_msg = 16 + max(hidden * 2, hidden + num_scales * 4)
    num_bytes_per_combine_msg = num_scales * 4 + hidden * 2
    send = max(num_max_tokens * num_bytes_per_dispatch_msg, num_experts * num_max_tokens * num_bytes_per_combine_msg)
    recv = num_experts * num_max_tokens * max(num_bytes_per_dispatch_msg, num_bytes_per_combine_msg)
    signaling = -(-num_experts * 4 // 128) * 128
    total = 2 * send + 2 * recv + 2 * signaling
    return (total + 128) // 128 * 128


@pytest.mark.parametrize(
    "sizes", [(128, 7168, 8, 288), (128, 2048, 2, 8), (1, 128, 2, 2), (512, 8192, 16, 2048)], ids=str
)
def test_the_size_hint_is_a_multiple_of_128_and_no_less_than_deepeps(sizes):
    num_max_tokens, hidden, num_ranks, num_experts = sizes
    hint = size_hint(num_max_tokens, hidden, num_ranks, num_experts)
    assert hint % 128 == 0
    assert hint >= deepep_size_hint(num_max_tokens, hidden, num_experts)


def test_the_size_hint_grows_with_every_size():
    base = (16, 512, 2, 4)
    for position, larger in enumerate([17, 640, None, 6]):
        if larger is not None:
            sizes = [larger if i == position else size for i, size in enumerate(base)]
            assert size_hint(*sizes) > size_hint(*base)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((-1, 128, 2, 2), "num_max_dispatch_tokens_per_rank"),
        ((1, 128.0, 2, 2), "hidden"),
        ((1, 128, 0, 2), "num_ranks"),
        ((1, 128, 2, "2"), "num_experts"),
    ],
)
def test_a_size_hint_of_what_is_no_size_is_refused(sizes, name):
    with pytest.raises(ValueError, match=f"{name}: got .*; must be an integer of at least"):
        size_hint(*sizes)


@pytest.mark.parametrize(
    "options", [Options(), Options(deduplicate=True), Options(use_logfmt=True), Options(use_fp8=True)], ids=str
)
def test_a_buffer_of_the_hint_is_large_enough_for_every_option(options):
    if TARGET != "emulator" and options.use_fp8:
        pytest.skip("its bytes are the same on a GPU")
    case = make_low_latency_case(1, num_tokens=[4, 3], num_topk=4, routing="one_rank")

    def main(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=size_hint(4, 128, 2, case.num_experts), low_latency_mode=True)
        outcome = Trip(buffer, case, options).whole()
        buffer.destroy()
        return outcome

    check(case, options, spawn(main, 2), "a buffer of the size hint")


def test_a_buffer_that_is_128_bytes_a_part_too_small_is_refused_and_serves_smaller_calls():
    case, small = (make_low_latency_case(2, num_tokens=tokens) for tokens in (5, 4))
    needed = num_rdma_bytes(case, Options())

    def main(comm):
        buffer = nbep.Buffer(comm, num_rdma_bytes=needed - 4 * 128, low_latency_mode=True)
        message = (
            f"num_rdma_bytes: got {needed - 512} at construction; must be at least {needed} for 4 experts, 5 tokens "
            "of a rank and hidden 128; see get_low_latency_rdma_size_hint"
        )
        with pytest.raises(ValueError, match=message):
            Trip(buffer, case, Options()).send_dispatch()
        with pytest.raises(ValueError, match=message):
            buffer.clean_low_latency_buffer(5, 128, 4)
        outcome = Trip(buffer, small, Options()).whole()
        buffer.destroy()
        return outcome

    check(small, Options(), spawn(main, 2), "a call that fits")


# The buffer as an array


def test_users_see_the_rdma_buffer_as_an_array():
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256, num_rdma_bytes=1024, low_latency_mode=True)
        whole = buffer.get_local_buffer_tensor(like(comm, np.int32), use_rdma_buffer=True)
        assert_kind(whole)
        assign(whole, np.arange(256, dtype=np.int32))
        part = buffer.get_local_buffer_tensor(like(comm, np.int32), size=(2, 3), offset=10, use_rdma_buffer=True)
        assert to_numpy(part).tolist() == [[10, 11, 12], [13, 14, 15]]
        rings = buffer.get_local_buffer_tensor(like(comm, np.int32))
        assert tuple(rings.shape) == (64,)
        with pytest.raises(ValueError, match=r"size: got \(257,\) at offset 0; must be at most 256 elements"):
            buffer.get_local_buffer_tensor(like(comm, np.int32), size=(257,), use_rdma_buffer=True)
        buffer.destroy()

    spawn(main, 2)


def like(comm, dtype):
    """A dtype as the target's arrays name it."""
    return comm.runtime.dtype_like(np.dtype(dtype).name, to_target(np.zeros(1, dtype)))


def test_what_a_user_writes_into_the_buffer_does_not_disturb_the_next_call():
    case = make_low_latency_case(3, num_tokens=4)

    def main(comm):
        buffer = make_buffer(comm, [(case, Options())])
        for _ in range(3):
            trip = Trip(buffer, case, Options())
            whole = buffer.get_local_buffer_tensor(like(comm, np.int32), use_rdma_buffer=True)
            assign(whole, np.full(tuple(whole.shape), -1, np.int32))
            assert (to_numpy(whole[:1]) == -1).all()  # the copy is done
            comm.barrier()  # peers write into it, too
            outcome = trip.whole()
        buffer.destroy()
        return outcome

    check(case, Options(), spawn(main, 2), "after all bytes were overwritten")


def test_without_the_mode_there_is_no_rdma_buffer_and_no_low_latency_call():
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256, num_nvl_peers=2)
        with pytest.raises(ValueError, match="use_rdma_buffer: got True; must be False: num_rdma_bytes was 0"):
            buffer.get_local_buffer_tensor(np.uint8, use_rdma_buffer=True)
        calls = {
            "low_latency_dispatch": (None, None, 1, 2),
            "low_latency_combine": (None, None, None, None),
            "get_next_low_latency_combine_buffer": (None,),
            "clean_low_latency_buffer": (1, 128, 2),
            "low_latency_update_mask_buffer": (0,),
            "low_latency_query_mask_buffer": (None,),
            "low_latency_clean_mask_buffer": (),
        }
        for verb, arguments in calls.items():
            with pytest.raises(ValueError, match=f"{verb}: the buffer has no low_latency_mode"):
                getattr(buffer, verb)(*arguments)
        buffer.destroy()
        for verb, arguments in calls.items():
            with pytest.raises(ValueError, match=f"buffer: got a destroyed one; {verb} must come before destroy"):
                getattr(buffer, verb)(*arguments)

    spawn(main, 2)


# Cleaning


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("num_ranks", both_parts([], thorough=[2, 3]))
def test_calls_go_on_after_a_clean(num_ranks, memory_model):
    options = Options(dispatch_as=HOOK)
    case = make_low_latency_case(4, num_ranks=num_ranks, num_tokens=3)

    def main(comm):
        buffer = make_buffer(comm, [(case, options)])
        outcomes = []
        for _ in range(2):
            outcomes.append(Trip(buffer, case, options).whole())
            Trip(buffer, case, Options(dispatch_as=BOTH)).send_dispatch()  # so that the next half is the other one
            buffer.clean_low_latency_buffer(3, 128, case.num_experts)
        outcomes.append(Trip(buffer, case, options).whole())
        buffer.destroy()
        return outcomes

    ranks = spawn(main, num_ranks, memory_model=memory_model)
    for number in range(3):
        check(case, options, [outcomes[number] for outcomes in ranks], f"trip {number}")


def test_a_clean_forgets_calls_that_were_not_received():
    options = Options(dispatch_as=HOOK)
    case = make_low_latency_case(5, num_tokens=3)

    def main(comm):
        buffer = make_buffer(comm, [(case, options)])
        forgotten = [Trip(buffer, case, options) for _ in range(2)]
        for trip in forgotten:
            trip.send_dispatch()
        buffer.clean_low_latency_buffer(3, 128, case.num_experts)
        for trip in forgotten:
            with pytest.raises(
                ValueError, match=r"hook: got that of low_latency_dispatch .* after clean_low_latency_b"
            ):
                trip.receive_dispatch()
        outcome = Trip(buffer, case, options).whole()
        buffer.destroy()
        return outcome

    check(case, options, spawn(main, 2), "after forgotten calls")


# Both modes


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("num_ranks", both_parts([2], thorough=[4]))
def test_both_modes_take_turns_in_one_buffer(num_ranks, memory_model):
    case, options = make_low_latency_case(6, num_ranks=num_ranks, num_tokens=4), Options(combine_as=HOOK)
    other_case, other_options = make_case(7, num_ranks=num_ranks, num_tokens=5), IntranodeOptions()

    def main(comm):
        num_bytes = num_nvl_bytes(other_case, other_options)
        buffer = make_buffer(comm, [(case, options)], num_nvl_bytes=num_bytes, num_nvl_peers=num_ranks)
        trip = Trip(buffer, case, options)
        trip.send_dispatch()
        other = dispatch(buffer, other_case, other_options, comm.rank)
        trip.receive_dispatch()
        trip.send_combine()
        combine(buffer, other_case, other_options, comm.rank, other)
        trip.receive_combine()
        buffer.destroy()
        return trip.outcome, other

    ranks = spawn(main, num_ranks, memory_model=memory_model)
    check(case, options, [outcome for outcome, _ in ranks], "low latency between the others")
    expected = Expected(other_case, other_options)
    for rank, (_, outcome) in enumerate(ranks):
        expected.check(rank, outcome, f"rank {rank}, between low-latency calls")
