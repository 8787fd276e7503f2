"""Handles and buffers between nodes that are used more than once."""

import numpy as np
import pytest
from arrays import to_numpy, to_target
from internode import HANDLE, Options, make_node_case, run
from intranode import cached_round_trip, dispatch, dispatch_arguments, make_buffer, round_trip
from parts import both_parts, dear
from target import spawn
from trips import (
    back_to_back,
    cached_dispatch_after_combine,
    chained_by_events,
    combine_twice,
    run_rounds,
    two_buffers_at_once,
    two_handles_in_turns,
)

import nbep

pytestmark = pytest.mark.usefixtures("channels")


@pytest.mark.parametrize("num_nodes", both_parts([2], thorough=[3]))
def test_cached_dispatch_delivers_the_same_rows(num_nodes):
    run(make_node_case(1, num_nodes, num_tokens=7), fn=cached_round_trip)


@dear
@pytest.mark.parametrize("fp8", both_parts(["column"], thorough=["row"]))
def test_cached_dispatch_of_fp8(fp8):
    run(make_node_case(2, num_tokens=7, hidden=256), Options(fp8=fp8, with_topk=False), fn=cached_round_trip)


@pytest.mark.thorough
def test_cached_dispatch_with_the_handle_of_worst_tokens():
    run(make_node_case(11, num_tokens=5), Options(num_worst_tokens=23), fn=cached_round_trip)


@pytest.mark.thorough
def test_cached_dispatch_after_combine_rewrote_the_heads():
    run(make_node_case(3, num_tokens=9), fn=cached_dispatch_after_combine)


@pytest.mark.thorough
def test_combine_twice_with_one_handle_gives_the_same():
    run(make_node_case(4, num_tokens=9), fn=combine_twice)


@pytest.mark.thorough
def test_back_to_back_calls_with_several_configs_on_one_buffer():
    options = [
        Options(),
        Options(nbep.Config(2, 3, 7, 1, 2), with_topk=False, num_biases=1),
        Options(nbep.Config(6, 1, 2, 3, 9), fp8="row"),
        Options(nbep.Config(2, 1, 3, 2, 6), num_worst_tokens=40),
    ]
    cases = [make_node_case(seed, num_tokens=(seed, 9 - seed, 0, 5), hidden=128) for seed in range(4)]
    run_rounds(back_to_back, list(zip(cases, options, strict=True)), seed=5)


@pytest.mark.thorough
def test_two_handles_in_turns():
    rounds = [(make_node_case(6, num_tokens=5), Options()), (make_node_case(7, num_tokens=(8, 2, 0, 3)), Options())]
    run_rounds(two_handles_in_turns, rounds, seed=6)


@pytest.mark.thorough
def test_two_buffers_at_once():
    run_rounds(two_buffers_at_once, [(make_node_case(8, num_tokens=6), Options())] * 2, seed=7)


def test_handle_unpacks_like_deepeps_tuple():
    for outcome in run(make_node_case(9), fn=round_trip):
        handle = outcome.handle
        *matrices, recv_src_meta, send_rdma_head, send_nvl_head = handle
        assert len(handle) == 10
        for index, (name, matrix) in enumerate(zip(HANDLE, matrices, strict=True)):
            assert handle[index] is matrix is getattr(handle, name)
        assert handle[-4] is handle.recv_gbl_rank_prefix_sum
        assert handle[-3] is recv_src_meta is handle.recv_src_meta
        assert handle[-2] is send_rdma_head is handle.send_rdma_head
        assert handle[-1] is send_nvl_head is handle.send_nvl_head


def test_a_plain_tuple_serves_as_a_handle():
    case, options = make_node_case(12, num_tokens=4), Options()

    def main(comm):
        buffer = make_buffer(comm, case, options)
        outcome = dispatch(buffer, case, options, comm.rank)
        handle = tuple(outcome.handle)
        x = to_target(case.x[comm.rank])
        cached_x = buffer.dispatch(x, handle=handle, config=options.config)[0]
        combined_x = buffer.combine(outcome.recv_x, handle, config=options.config)[0]
        again = buffer.combine(outcome.recv_x, outcome.handle, config=options.config)[0]
        buffer.destroy()
        return to_numpy((outcome.recv_x, cached_x, combined_x, again))

    for recv_x, cached_x, combined_x, again in spawn(main, 4):
        assert cached_x.tobytes() == recv_x.tobytes()
        assert combined_x.tobytes() == again.tobytes()


@dear
def test_asynchronous_calls_chain_by_events():
    run(make_node_case(10, num_tokens=6), fn=chained_by_events)


def test_rows_of_each_source_rank_lie_between_two_prefix_sums_as_in_deepeps_test():
    case, options = make_node_case(13, num_tokens=(4, 0, 9, 7), num_topk=3), Options()

    def main(comm):
        buffer = make_buffer(comm, case, options)
        _, arguments = dispatch_arguments(buffer, case, options, comm.rank)
        x = np.full_like(case.x[comm.rank], comm.rank)
        recv_x, *_, handle, _ = buffer.dispatch(**{**arguments, "x": to_target(x)})
        buffer.destroy()
        return to_numpy((recv_x, handle[-4]))

    for recv_x, recv_gbl_rank_prefix_sum in spawn(main, 4):
        begin = 0
        for src, end in enumerate(recv_gbl_rank_prefix_sum):
            assert (recv_x[begin:end] == src).all()
            begin = end
        assert begin == len(recv_x)
