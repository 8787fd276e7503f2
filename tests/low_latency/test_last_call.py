"""A call that failed is reported even if it is the last: by the call, its event, its hook, or at last by destroy."""

from collections.abc import Callable

import pytest
from low_latency import ASYNC, BOTH, HOOK, Options, Trip, make_buffer, make_low_latency_case
from target import spawn

import nbep

pytestmark = pytest.mark.emulator_only("it lets time pass")

STEPS = ["send_dispatch", "receive_dispatch", "send_combine", "receive_combine"]


def run(options: Options, rank_1: list[str], rank_0: Callable[[Trip], object] = Trip.whole, **arguments) -> None:
    """Rank 0 does what is given, rank 1 only some steps of its trip; then both destroy their buffers."""
    case = make_low_latency_case(0, num_ranks=2, num_tokens=(3, 3), num_topk=2, hidden=128)

    def main(comm):
        trip = Trip(make_buffer(comm, [(case, options)], **arguments), case, options)
        if comm.rank == 0:
            rank_0(trip)
        else:
            for step in rank_1:
                getattr(trip, step)()
            trip.buffer.destroy()

    spawn(main, 2, on_deadlock="expire")


def raises_at(step: str) -> Callable[[Trip], object]:
    """The steps of a trip, of which one raises; destroy does not raise the same again."""

    def main(trip: Trip) -> None:
        for name in STEPS[: STEPS.index(step)]:
            getattr(trip, name)()
        with pytest.raises(nbep.PeerTimeout, match="for rank 1"):
            getattr(trip, step)()
        trip.buffer.destroy()

    return main


@pytest.mark.parametrize(
    ("call_as", "step"), [(BOTH, "send_combine"), (ASYNC, "receive_combine"), (HOOK, "receive_combine")]
)
def test_a_last_combine_without_the_peer_raises_where_its_result_can_be_used(call_as, step):
    run(Options(combine_as=call_as), STEPS[:2], raises_at(step))


@pytest.mark.parametrize(
    ("call_as", "step"), [(BOTH, "send_dispatch"), (ASYNC, "receive_dispatch"), (HOOK, "receive_dispatch")]
)
def test_a_last_dispatch_without_the_peer_raises_where_its_result_can_be_used(call_as, step):
    run(Options(dispatch_as=call_as), [], raises_at(step))


def test_destroy_raises_what_the_event_of_an_async_call_was_not_asked_for():
    def rank_0(trip):
        for step in STEPS[:3]:
            getattr(trip, step)()
        with pytest.raises(nbep.PeerTimeout, match="for rank 1"):
            trip.buffer.destroy()

    run(Options(combine_as=ASYNC), STEPS[:2], rank_0)


def test_an_event_that_is_found_done_raises():
    def rank_0(trip):
        for step in STEPS[:2]:
            getattr(trip, step)()
        trip.send_combine()
        trip.buffer._memory.comm_stream.synchronize()
        with pytest.raises(nbep.PeerTimeout, match="for rank 1"):
            assert trip.event.event.done
        trip.buffer.destroy()

    run(Options(combine_as=ASYNC), STEPS[:2], rank_0)


def test_a_buffer_that_goes_away_warns_of_what_no_call_has_raised():
    def rank_0(trip):
        for step in STEPS[:3]:
            getattr(trip, step)()
        trip.buffer._memory.comm_stream.synchronize()
        with pytest.warns(RuntimeWarning, match="no call has raised what a kernel reported: rank 0: .* for rank 1"):
            trip.buffer.__del__()
        trip.buffer.destroy()

    run(Options(combine_as=ASYNC), STEPS[:2], rank_0)


@pytest.mark.parametrize("entry", [7, 10, 13])
def test_an_entry_that_a_nic_loses_in_the_last_combine_is_reported(entry):
    nic = nbep.NicOptions(num_entries=64, lost=(1, 0, 0, entry))

    def main(comm):
        case = make_low_latency_case(0, num_ranks=2, num_tokens=(3, 3), num_topk=2, hidden=128)
        trip = Trip(
            make_buffer(comm, [(case, Options())], transport="ibgda", num_nvl_peers=1, num_qps_per_rank=1, nic=nic),
            case,
            Options(),
        )
        raised = []
        for end in (trip.whole, trip.buffer.destroy):
            try:
                end()
            except nbep.PeerTimeout as error:
                raised.append(error.peer)
        return raised

    assert spawn(main, 2, on_deadlock="expire")[0] == [1]
