"""Copies of a handle, as checkpoints make them, serve as the handle does; what cannot be copied says so."""

import copy
import io
import pickle

import pytest
from arrays import LIBRARY, to_target
from cases import make_case
from internode import Options as NodeOptions
from internode import make_node_case
from intranode import Options, check, combine, dispatch, dispatch_arguments, dispatch_input, make_buffer, outcome_of
from low_latency import HOOK, Trip, make_low_latency_case
from low_latency import Options as LowLatencyOptions
from low_latency import check as check_low_latency
from low_latency import make_buffer as make_low_latency_buffer
from parts import both_parts
from target import spawn
from trips import cached_dispatch


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def saved(value):
    torch = pytest.importorskip("torch")
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickled, saved])
WAYS = both_parts(["in_node", "zero_copy"], thorough=["between_nodes"])


@COPIES
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_of_a_handle_serves_combine_and_cached_dispatch(way, made):
    between_nodes = way == "between_nodes"
    case = make_node_case(3, num_tokens=4) if between_nodes else make_case(3, num_ranks=2, num_tokens=4)
    options = NodeOptions() if between_nodes else Options(zero_copy=way == "zero_copy")

    def main(comm):
        buffer = make_buffer(comm, case, options)
        x = to_target(dispatch_input(case, options, comm.rank))
        layout, arguments = dispatch_arguments(buffer, case, options, comm.rank)
        *received, handle, _ = buffer.dispatch(**arguments)
        outcome = outcome_of(options, layout, *received, handle)
        outcome.handle = made(handle)
        combine(buffer, case, options, comm.rank, outcome)
        outcome.cached_x = cached_dispatch(buffer, x, outcome.handle, options)
        buffer.destroy()
        return outcome

    check(case, options, spawn(main, case.num_ranks), 0)


@COPIES
@pytest.mark.parametrize("options", [LowLatencyOptions(), LowLatencyOptions(deduplicate=True)], ids=str)
def test_a_copy_of_a_low_latency_handle_serves_combine(options, made):
    case = make_low_latency_case(1, num_tokens=[4, 6], num_topk=3)

    def main(comm):
        buffer = make_low_latency_buffer(comm, [(case, options)])
        trip = Trip(buffer, case, options)
        trip.send_dispatch()
        trip.receive_dispatch()
        trip.send_combine(handle=made(trip.handle))
        trip.receive_combine()
        buffer.destroy()
        return trip.outcome

    check_low_latency(case, options, spawn(main, 2), made.__name__)


def test_a_low_latency_handle_is_copied_before_its_hook_and_pickled_after():
    case, options = make_low_latency_case(2), LowLatencyOptions(dispatch_as=HOOK)

    def main(comm):
        buffer = make_low_latency_buffer(comm, [(case, options)])
        trip = Trip(buffer, case, options)
        trip.send_dispatch()
        copied = copy.deepcopy(trip.handle)
        with pytest.raises(ValueError, match=r"handle: got that of .*, whose hook has not been .*; must be pickled"):
            pickle.dumps(trip.handle)
        with pytest.raises(ValueError, match=r"handle: got that of .*, whose hook has not been called; must be of a"):
            buffer.get_next_low_latency_combine_buffer(copied)
        trip.receive_dispatch()
        buffer.get_next_low_latency_combine_buffer(pickled(copied))
        buffer.destroy()

    spawn(main, 2)


@pytest.mark.skipif(LIBRARY == "torch", reason="NumPy's arrays alone can be resized")
@pytest.mark.emulator_only("NumPy's arrays")
def test_the_arrays_of_a_copy_are_checked(on_two_ranks, inputs):
    def main(buffer):
        recv_x, *_, handle, _ = buffer.dispatch(**inputs(buffer))
        copied = copy.deepcopy(handle)
        copied.recv_src_idx.resize(0, refcheck=False)
        copied.send_head.resize(2, refcheck=False)
        with pytest.raises(ValueError, match=r"handle.send_head: got int32 \[2\]; must be int32 \[3, 2\]"):
            buffer.combine(recv_x, copied)

    on_two_ranks(main)


def test_a_handle_does_not_outlive_its_buffer_in_a_pickle():
    """What is pickled belongs to a buffer of this process that is still there."""
    case, options = make_case(3, num_ranks=2, num_tokens=4), Options()

    def main(comm):
        first = make_buffer(comm, case, options)
        kept = pickle.dumps(dispatch(first, case, options, comm.rank).handle)
        first.destroy()
        del first
        second = make_buffer(comm, case, options)
        with pytest.raises(ValueError, match="handle: got the handle of another buffer; must be a handle that this"):
            second.dispatch(dispatch_input(case, options, comm.rank), handle=pickle.loads(kept), config=options.config)
        second.destroy()

    spawn(main, 2)


def test_what_belongs_to_this_process_says_that_it_cannot_be_copied(on_two_ranks, inputs):
    def main(buffer):
        event = buffer.dispatch(**inputs(buffer))[-1]
        for value, name in ((buffer, "Buffer"), (event, "EventOverlap"), (event.event, "EventHandle")):
            for made in (copy.copy, copy.deepcopy, pickle.dumps):
                with pytest.raises(TypeError, match=f"^{name}: it belongs to this process and cannot be pickled or"):
                    made(value)

    on_two_ranks(main)
