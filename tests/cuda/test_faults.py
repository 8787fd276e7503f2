"""Peers that do not come, and grids that do not fit, on one card."""

import pytest
from arrays import to_numpy
from cases import make_case
from intranode import Options, check, combine, dispatch, num_nvl_bytes, run
from target import spawn

import nbep

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_calls_is_named_by_all_others(absent, monkeypatch):
    monkeypatch.setenv("NBEP_TIMEOUT_MS", "500")
    case, options = make_case(1, num_ranks=4, num_tokens=6), Options()

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
        found = None
        if comm.rank != absent:
            with pytest.raises(nbep.PeerTimeout, match=f"rank {comm.rank}: .* more than 500 ms for rank {absent}") as e:
                dispatch(buffer, case, options, comm.rank)
            found = (e.value.rank, e.value.peer, e.value.role, e.value.cell)
        buffer.destroy()
        return found

    expected = [None if rank == absent else (rank, absent, "notify", "barrier_signal") for rank in range(4)]
    assert spawn(main, 4) == expected
    monkeypatch.undo()
    run(case, options)  # the card is as good as before


def test_a_rank_that_does_not_combine_is_named(monkeypatch):
    monkeypatch.setenv("NBEP_TIMEOUT_MS", "500")
    case, options = make_case(2, num_tokens=6), Options()

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, options))
        outcome = dispatch(buffer, case, options, comm.rank)
        recv_x = to_numpy(outcome.recv_x)
        if comm.rank == 1:
            with pytest.raises(nbep.PeerTimeout, match=r"rank 1: .* for rank 0"):
                combine(buffer, case, options, comm.rank, outcome)
            with pytest.raises(nbep.PeerTimeout, match=r"rank 1: .* for rank 0"):
                dispatch(buffer, case, options, comm.rank)
        buffer.destroy()
        return len(recv_x)

    assert sum(spawn(main, 2)) > 0


def test_a_grid_that_cannot_be_resident_is_refused_and_the_next_call_works():
    case, large = make_case(3, num_tokens=5, hidden=8), Options(nbep.Config(2000, 1, 2))

    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(case, large))
        with pytest.raises(ValueError, match=r"num_sms.* 2000 .*at most \d+ blocks fit on a card"):
            dispatch(buffer, case, large, comm.rank)
        outcome = dispatch(buffer, case, Options(), comm.rank)
        combine(buffer, case, Options(), comm.rank, outcome)
        buffer.destroy()
        return outcome

    check(case, Options(), spawn(main, 2), 0)
