"""Handles and buffers that are used more than once."""

import pytest
from cases import make_case
from intranode import Options, cached_round_trip, expected_dispatch, run
from parts import both_parts, dear
from target import spawn
from trips import (
    back_to_back,
    blocking_call_on_default_config,
    cached_dispatch_after_combine,
    chained_by_events,
    combine_twice,
    run_rounds,
    two_buffers_at_once,
    two_handles_in_turns,
)

import nbep
from nbep import reference

pytestmark = pytest.mark.usefixtures("both_ways", "channels")


@pytest.mark.parametrize("num_ranks", both_parts([2], thorough=[4]))
def test_cached_dispatch_delivers_the_same_rows(num_ranks):
    run(make_case(1, num_ranks=num_ranks, num_tokens=7), fn=cached_round_trip)


@pytest.mark.parametrize("fp8", both_parts(["column"], thorough=["row"]))
def test_cached_dispatch_of_fp8(fp8):
    run(make_case(2, num_tokens=7, hidden=256), Options(fp8=fp8, with_topk=False), fn=cached_round_trip)


def test_cached_dispatch_with_the_handle_of_worst_tokens():
    run(make_case(11, num_tokens=5), Options(num_worst_tokens=13), fn=cached_round_trip)


@dear
def test_cached_dispatch_after_combine_rewrote_send_head():
    run(make_case(3, num_ranks=4, num_tokens=9), fn=cached_dispatch_after_combine)


@dear
def test_combine_twice_with_one_handle_gives_the_same():
    run(make_case(4, num_ranks=4, num_tokens=9), fn=combine_twice)


@dear
def test_back_to_back_calls_on_one_buffer():
    options = [
        Options(),
        Options(with_topk=False, num_biases=1),
        Options(fp8="row", config=nbep.Config(2, 3, 5)),
        Options(num_worst_tokens=40, config=nbep.Config(6, 1, 2)),
    ]
    cases = [make_case(seed, num_tokens=(seed, 9 - seed), hidden=128) for seed in range(4)]
    run_rounds(back_to_back, list(zip(cases, options, strict=True)), seed=5)


def test_two_handles_in_turns():
    run_rounds(
        two_handles_in_turns,
        [(make_case(6, num_tokens=5), Options()), (make_case(7, num_tokens=(8, 2)), Options())],
        seed=6,
    )


@dear
def test_two_buffers_at_once():
    run_rounds(two_buffers_at_once, [(make_case(8, num_tokens=6), Options())] * 2, seed=7)


def test_asynchronous_calls_chain_by_events():
    run(make_case(10, num_tokens=6), fn=chained_by_events)


@pytest.mark.about_rings
def test_default_configs_fit_their_rings_into_the_buffer():
    case = make_case(12, num_tokens=30, routing="everywhere")
    expected = expected_dispatch(case, Options(nbep.Config()))
    combined = reference.combine([e.recv_x for e in expected], expected)
    sizes = {"num_nvl_bytes": 1 << 18}
    for rank, (recv_x, combined_x) in enumerate(spawn(blocking_call_on_default_config, 2, (case, sizes))):
        assert recv_x.tobytes() == expected[rank].recv_x.tobytes()
        assert combined_x.tobytes() == combined[rank][0].tobytes()
