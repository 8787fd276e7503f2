"""What low_latency_dispatch returns for combine."""

import numpy as np
import pytest
from low_latency import HOOK, Options, Trip, check, make_buffer, make_low_latency_case
from target import spawn

import nbep

CASE = make_low_latency_case(1, num_tokens=[4, 6], num_topk=3)


def test_a_handle_unpacks_as_deepeps_tuple():
    def main(comm):
        buffer = make_buffer(comm, [(CASE, Options())])
        trip = Trip(buffer, CASE, Options())
        trip.send_dispatch()
        trip.receive_dispatch()
        handle = trip.handle
        src_info, layout_range, num_max_tokens, hidden, num_experts = handle
        assert len(handle) == 5
        assert handle[0] is src_info is handle.src_info
        assert handle[1] is layout_range is handle.layout_range
        assert handle[2:] == (num_max_tokens, hidden, num_experts) == (6, 128, 4)
        assert tuple(src_info.shape) == (2, 12)
        assert tuple(layout_range.shape) == (2, 2)
        trip.send_combine()
        trip.receive_combine()
        buffer.destroy()

    spawn(main, 2)


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("options", [Options(), Options(zero_copy=True), Options(use_logfmt=True)], ids=str)
def test_a_plain_tuple_of_its_parts_serves_as_well(options, kind):
    def main(comm):
        buffer = make_buffer(comm, [(CASE, options)])
        trip = Trip(buffer, CASE, options)
        trip.send_dispatch()
        trip.receive_dispatch()
        trip.send_combine(handle=kind(trip.handle))
        trip.receive_combine()
        buffer.destroy()
        return trip.outcome

    check(CASE, options, spawn(main, 2), f"a plain {kind.__name__}")


def test_the_handle_of_another_buffer_is_refused():
    def main(comm):
        first, second = (make_buffer(comm, [(CASE, Options())]) for _ in range(2))
        trip, other = Trip(first, CASE, Options()), Trip(second, CASE, Options())
        for each in (trip, other):
            each.send_dispatch()
            each.receive_dispatch()
        message = (
            f"handle: got the handle of another buffer; must be a handle that this buffer made on rank {comm.rank}"
        )
        with pytest.raises(ValueError, match=message):
            trip.send_combine(handle=other.handle)
        with pytest.raises(ValueError, match=message):
            first.get_next_low_latency_combine_buffer(other.handle)
        trip.send_combine()
        trip.receive_combine()
        first.destroy()
        second.destroy()
        return trip.outcome

    check(CASE, Options(), spawn(main, 2), "after a wrong handle")


def test_a_handle_is_of_no_use_before_its_hook_is_called():
    def main(comm):
        options = Options(dispatch_as=HOOK)
        buffer = make_buffer(comm, [(CASE, options)])
        trip = Trip(buffer, CASE, options)
        trip.send_dispatch()
        x = np.zeros((2, 12, 128), CASE.x[0].dtype)
        message = r"handle: got that of low_latency_dispatch \(low-latency call 0\), whose hook has not been called"
        with pytest.raises(ValueError, match=message):
            buffer.low_latency_combine(x, trip.topk_idx, trip.topk_weights, trip.handle)
        with pytest.raises(ValueError, match=message):
            buffer.get_next_low_latency_combine_buffer(trip.handle)
        trip.receive_dispatch()
        trip.send_combine()
        trip.receive_combine()
        buffer.destroy()
        return trip.outcome

    check(CASE, Options(), spawn(main, 2), "after a hook that was late")


def test_handles_cannot_be_changed():
    handle = nbep.host.low_latency.handle.LowLatencyHandle(None, None, 1, 2, 3)
    with pytest.raises(AttributeError, match="cannot assign"):
        handle.hidden = 4
