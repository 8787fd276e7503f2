"""What low_latency_dispatch returns for combine."""

import numpy as np
import pytest
from arrays import to_target
from low_latency import HOOK, Options, Trip, check, make_buffer, make_low_latency_case
from target import spawn

import nbep

pytestmark = pytest.mark.usefixtures("blocks")

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


@pytest.mark.emulator_only("a GPU's choices are not read")
def test_the_handle_of_an_earlier_dispatch_is_refused_if_that_sent_tokens_elsewhere():
    """Else the sum would take rows that no rank has sent for this call."""
    other = make_low_latency_case(2, num_tokens=[4, 6], num_topk=3)

    def main(comm):
        buffer = make_buffer(comm, [(CASE, Options())])
        first, second = (Trip(buffer, case, Options()) for case in (CASE, other))
        for trip in (first, second):
            trip.send_dispatch()
            trip.receive_dispatch()
        with pytest.raises(ValueError, match=r"topk_idx\[\d, \d\]: got \d; must be one of .*, to which low_latency"):
            second.send_combine(handle=first.handle)
        second.send_combine()
        second.receive_combine()
        return second.outcome

    check(other, Options(), spawn(main, 2), "after a wrong handle")


def test_ranks_that_combine_with_handles_of_different_dispatches_are_refused():
    def main(comm):
        buffer = make_buffer(comm, [(CASE, Options())])
        trips = [Trip(buffer, CASE, Options()) for _ in range(2)]
        for trip in trips:
            trip.send_dispatch()
            trip.receive_dispatch()
        trips[1].send_combine(handle=trips[comm.rank].handle)

    with pytest.raises(ValueError, match=r"handle: got that of low_latency_dispatch .low-latency call .* on rank"):
        spawn(main, 2)


def test_a_handle_is_of_no_use_before_its_hook_is_called():
    def main(comm):
        options = Options(dispatch_as=HOOK)
        buffer = make_buffer(comm, [(CASE, options)])
        trip = Trip(buffer, CASE, options)
        trip.send_dispatch()
        x = to_target(np.zeros((2, 12, 128), CASE.x[0].dtype))
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


NUM_MAX_TOKENS = r"handle.num_max_dispatch_tokens_per_rank: got 16384; must be less than 16384"


@pytest.mark.parametrize(
    ("num_max_tokens", "hidden", "message"),
    [(1, 1 << 18, "handle.hidden: got 262144; must be less than 262144"), (1 << 14, 128, NUM_MAX_TOKENS)],
    ids=["hidden", "tokens"],
)
def test_a_handle_that_was_put_together_with_sizes_that_no_dispatch_takes_is_refused(num_max_tokens, hidden, message):
    def main(comm):
        num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(num_max_tokens, hidden, comm.size, 2)
        buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True, num_qps_per_rank=1)
        src_info, layout_range = np.zeros((1, 2 * num_max_tokens), np.int32), np.zeros((1, 2), np.int64)
        handle = to_target(src_info), to_target(layout_range), num_max_tokens, hidden, 2
        x = to_target(np.zeros((1, 2 * num_max_tokens, hidden), CASE.x[0].dtype))
        topk_idx, topk_weights = to_target(np.zeros((1, 1), np.int64)), to_target(np.ones((1, 1), np.float32))
        with pytest.raises(ValueError, match=message):
            buffer.low_latency_combine(x, topk_idx, topk_weights, handle)
        buffer.destroy()

    spawn(main, 2)


def test_handles_cannot_be_changed():
    handle = nbep.host.low_latency.handle.LowLatencyHandle((None, None), (1, 2, 3))
    with pytest.raises(AttributeError, match="hidden"):
        handle.hidden = 4
