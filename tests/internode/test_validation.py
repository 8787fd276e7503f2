"""Arguments between nodes that are wrong are refused before anything is launched, and the buffer goes on."""

import pytest
from arrays import to_target
from internode import CONFIG, Options, make_node_case
from intranode import combine, dispatch, make_buffer
from target import spawn

import nbep

CASE, OPTIONS = make_node_case(1, num_tokens=4), Options()


def test_handles_of_another_buffer_or_mode_are_refused():
    def main(comm):
        buffer, other = (make_buffer(comm, CASE, OPTIONS) for _ in range(2))
        outcome = dispatch(buffer, CASE, OPTIONS, comm.rank)
        x = to_target(CASE.x[comm.rank])
        for call in (
            lambda: other.dispatch(x, handle=outcome.handle, config=CONFIG),
            lambda: other.combine(outcome.recv_x, outcome.handle, config=CONFIG),
        ):
            with pytest.raises(ValueError, match="handle: got the handle of another buffer"):
                call()
        with pytest.raises(ValueError, match="handle: got tuple"):
            buffer.dispatch(x, handle=tuple(outcome.handle)[:6], config=CONFIG)
        with pytest.raises(ValueError, match=r"config.num_sms: got 2; must be 4, as in the dispatch"):
            buffer.combine(outcome.recv_x, outcome.handle, config=nbep.Config(2, 2, 8, 2, 4))
        combine(buffer, CASE, OPTIONS, comm.rank, outcome)
        buffer.destroy()
        other.destroy()

    spawn(main, 4)


def test_worst_tokens_that_are_too_few_are_reported_with_the_number_that_came():
    """Every rank gets 16 tokens, 4 of its own."""
    case = make_node_case(2, num_tokens=4, num_topk=4, routing="everywhere")
    options = Options(num_worst_tokens=9)

    def main(comm):
        buffer = make_buffer(comm, case, options)
        with pytest.raises(ValueError, match=f"recv_x: got 9 rows on rank {comm.rank}; must be at least 1"):
            dispatch(buffer, case, options, comm.rank)
        with pytest.raises(ValueError, match="recv_x: got 9 rows"):
            dispatch(buffer, case, OPTIONS, comm.rank)
        buffer.destroy()

    spawn(main, 4, on_deadlock="expire")
