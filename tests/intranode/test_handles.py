"""Handles and buffers that are used more than once."""

import pytest
from arrays import to_numpy, to_target
from cases import make_case
from intranode import (
    Options,
    Outcome,
    cached_round_trip,
    check,
    combine,
    dispatch,
    dispatch_input,
    expected_dispatch,
    num_nvl_bytes,
    round_trip,
    run,
)
from target import spawn

import nbep
from nbep import reference


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_cached_dispatch_delivers_the_same_rows(num_ranks):
    run(make_case(1, num_ranks=num_ranks, num_tokens=7), fn=cached_round_trip)


@pytest.mark.parametrize("fp8", ["row", "column"])
def test_cached_dispatch_of_fp8(fp8):
    run(make_case(2, num_tokens=7, hidden=256), Options(fp8=fp8, with_topk=False), fn=cached_round_trip)


def test_cached_dispatch_with_the_handle_of_worst_tokens():
    run(make_case(11, num_tokens=5), Options(num_worst_tokens=13), fn=cached_round_trip)


def test_cached_dispatch_after_combine_rewrote_send_head():
    def main(comm, case, options):
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
        outcome = dispatch(buffer, case, options, comm.rank)
        combine(buffer, case, options, comm.rank, outcome)
        x = to_target(dispatch_input(case, options, comm.rank))
        outcome.cached_x = buffer.dispatch(x, handle=outcome.handle, config=options.config)[0]
        combine(buffer, case, options, comm.rank, outcome)
        buffer.destroy()
        return outcome

    run(make_case(3, num_ranks=4, num_tokens=9), fn=main)


def test_combine_twice_with_one_handle_gives_the_same():
    def main(comm, case, options):
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
        outcome = dispatch(buffer, case, options, comm.rank)
        combine(buffer, case, options, comm.rank, outcome)
        first = to_numpy(outcome.combined_x).tobytes()
        combine(buffer, case, options, comm.rank, outcome)
        buffer.destroy()
        assert to_numpy(outcome.combined_x).tobytes() == first
        return outcome

    run(make_case(4, num_ranks=4, num_tokens=9), fn=main)


def test_back_to_back_calls_on_one_buffer():
    options = [
        Options(),
        Options(with_topk=False, num_biases=1),
        Options(fp8="row", config=nbep.Config(2, 3, 5)),
        Options(num_worst_tokens=40, config=nbep.Config(6, 1, 2)),
    ]
    cases = [make_case(seed, num_tokens=(seed, 9 - seed), hidden=128) for seed in range(4)]

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=max(num_nvl_bytes(cases[0], o) for o in options))
        outcomes = []
        for case, option in zip(cases, options, strict=True):
            outcomes.append(dispatch(buffer, case, option, comm.rank))
            combine(buffer, case, option, comm.rank, outcomes[-1])
        buffer.destroy()
        return outcomes

    results = spawn(main, 2, seed=5)
    for i, (case, option) in enumerate(zip(cases, options, strict=True)):
        check(case, option, [outcomes[i] for outcomes in results], 5)


def test_two_handles_in_turns():
    first, second = make_case(6, num_tokens=5), make_case(7, num_tokens=(8, 2))
    options = Options()

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(first, options))
        a = dispatch(buffer, first, options, comm.rank)
        b = dispatch(buffer, second, options, comm.rank)
        combine(buffer, first, options, comm.rank, a)
        b.cached_x = buffer.dispatch(to_target(second.x[comm.rank]), handle=b.handle, config=options.config)[0]
        combine(buffer, second, options, comm.rank, b)
        combine(buffer, first, options, comm.rank, a)
        buffer.destroy()
        return a, b

    results = spawn(main, 2, seed=6)
    check(first, options, [a for a, _ in results], 6)
    check(second, options, [b for _, b in results], 6)


def test_two_buffers_at_once():
    case = make_case(8, num_tokens=6)
    options = Options()

    def main(comm):
        buffers = [nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options)) for _ in range(2)]
        outcomes = [dispatch(buffer, case, options, comm.rank) for buffer in buffers]
        for buffer, outcome in zip(buffers, outcomes, strict=True):
            combine(buffer, case, options, comm.rank, outcome)
        for buffer in buffers:
            buffer.destroy()
        return outcomes

    results = spawn(main, 2, seed=7)
    for i in range(2):
        check(case, options, [outcomes[i] for outcomes in results], 7)


def test_handle_unpacks_like_deepeps_tuple():
    for outcome in run(make_case(9), fn=round_trip):
        rank_prefix, channel_prefix, recv_channel_prefix, recv_src_idx, is_token_in_rank, send_head = outcome.handle
        assert outcome.handle[0] is rank_prefix
        assert outcome.handle[-1] is send_head
        assert len(outcome.handle) == 6
        assert outcome.handle.recv_src_idx is recv_src_idx
        assert outcome.handle.is_token_in_rank is is_token_in_rank
        assert channel_prefix.shape == recv_channel_prefix.shape == (2, 2)


def test_asynchronous_calls_chain_by_events():
    def main(comm, case, options):
        rank = comm.rank
        x, topk_idx, topk_weights = to_target((case.x[rank], case.topk_idx[rank], case.topk_weights[rank]))
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
        overlap = {"async_finish": True, "allocate_on_comm_stream": True}
        *layout, event = buffer.get_dispatch_layout(
            topk_idx, case.num_experts, previous_event=buffer.capture(), **overlap
        )
        recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=layout[0],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            config=options.config,
            previous_event=event,
            **overlap,
        )
        event.current_stream_wait()
        send_head = to_numpy(handle.send_head).copy()
        outcome = Outcome(tuple(layout), recv_x, recv_topk_idx, recv_topk_weights, counts, handle, send_head)
        combine(buffer, case, options, rank, outcome)
        buffer.destroy()
        return outcome

    run(make_case(10, num_tokens=6), fn=main)


def test_default_configs_fit_their_rings_into_the_buffer():
    case = make_case(12, num_tokens=30, routing="everywhere")
    expected = expected_dispatch(case, Options(nbep.Config()))

    def main(comm):
        rank = comm.rank
        buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 18)
        num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
            to_target(case.topk_idx[rank]), case.num_experts
        )
        recv_x, *_, handle, _ = buffer.dispatch(
            to_target(case.x[rank]),
            num_tokens_per_rank=num_tokens_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
        )
        combined_x, _, _ = buffer.combine(recv_x, handle)
        buffer.destroy()
        return to_numpy((recv_x, combined_x))

    for rank, (recv_x, combined_x) in enumerate(spawn(main, 2)):
        assert recv_x.tobytes() == expected[rank].recv_x.tobytes()
        want = reference.combine([e.recv_x for e in expected], expected)[rank][0]
        assert combined_x.tobytes() == want.tobytes()
