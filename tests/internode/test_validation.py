"""Arguments between nodes that are wrong are refused before anything is launched, and the buffer goes on."""

import numpy as np
import pytest
from arrays import to_target
from internode import CONFIG, Options, make_node_case
from intranode import combine, dispatch, dispatch_arguments, make_buffer
from target import spawn

import nbep

CASE, OPTIONS = make_node_case(1, num_tokens=4), Options()


def check_refused(*wrong: tuple[dict, str]) -> None:
    """A dispatch with some arguments changed is refused on every rank with a ValueError that says so."""

    def main(comm):
        buffer = make_buffer(comm, CASE, OPTIONS)
        for change, pattern in wrong:
            _, arguments = dispatch_arguments(buffer, CASE, OPTIONS, comm.rank)
            with pytest.raises(ValueError, match=pattern):
                buffer.dispatch(**{**arguments, **to_target_of(change)})
        combine(buffer, CASE, OPTIONS, comm.rank, dispatch(buffer, CASE, OPTIONS, comm.rank))
        buffer.destroy()

    spawn(main, 4)


def to_target_of(change: dict) -> dict:
    return {name: to_target(value) for name, value in change.items()}


def test_what_does_not_fit_is_named_and_the_buffer_goes_on():
    check_refused(
        ({"num_tokens_per_rdma_rank": None}, "num_tokens_per_rdma_rank: got None"),
        ({"num_tokens_per_rdma_rank": np.zeros(3, np.int32)}, "num_tokens_per_rdma_rank: got .*3"),
        ({"config": nbep.Config(3, 2, 8, 2, 4)}, r"config.num_sms: got 3; must be even"),
        ({"config": nbep.Config(4, 2, 800, 2, 4)}, r"num_nvl_bytes: got \d+ at construction; must be at least \d+"),
        ({"config": nbep.Config(4, 2, 8, 2, 400)}, r"num_rdma_bytes: got \d+ at construction; must be at least \d+"),
        ({"config": nbep.Config(4, 2, 8, 2, 4, num_threads=32)}, "config.num_threads: got 32"),
        ({"topk_weights": None}, "topk_weights: got None"),
    )


@pytest.mark.emulator_only("counts that a GPU holds are not read by the host")
def test_node_counts_that_do_not_go_with_the_routing_are_refused():
    check_refused(({"num_tokens_per_rdma_rank": np.array([0, 9], np.int32)}, r"num_tokens_per_rdma_rank: got \[0, 9\]"))


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
