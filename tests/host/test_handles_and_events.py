"""Handles unpack like tuples; events order calls."""

import gc
import weakref

import numpy as np
import pytest
from arrays import to_numpy, to_target
from target import check_schedule

import nbep


def test_a_handle_unpacks_indexes_and_counts_like_deepeps_tuple(on_two_ranks, inputs):
    def main(buffer):
        handle = buffer.dispatch(**inputs(buffer))[4]
        rank_prefix, channel_prefix, recv_channel_prefix, recv_src_idx, is_token_in_rank, send_head = handle
        assert len(handle) == 6
        assert handle[0] is rank_prefix is handle.rank_prefix_matrix
        assert handle[1] is channel_prefix is handle.channel_prefix_matrix
        assert handle[-4] is recv_channel_prefix is handle.recv_channel_prefix_matrix
        assert handle[3:5] == (handle.recv_src_idx, handle.is_token_in_rank) == (recv_src_idx, is_token_in_rank)
        assert handle[5] is send_head is handle.send_head
        with pytest.raises(AttributeError):
            handle.send_head = None
        shapes = [tuple(array.shape) for array in handle]
        assert shapes == [(2, 2), (2, 1), (2, 1), (recv_src_idx.shape[0],), (3, 2), (3, 2)]

    on_two_ranks(main)


def test_a_blocking_call_returns_an_event_that_is_done(on_two_ranks, inputs):
    def main(buffer):
        arguments = inputs(buffer)
        recv_x, _, _, _, handle, event = buffer.dispatch(**arguments)
        assert event.event.done
        event.current_stream_wait()
        *_, event = buffer.combine(recv_x, handle)
        assert event.event.done
        *_, event = buffer.get_dispatch_layout(arguments["topk_idx"], 4)
        assert event.event.done

    on_two_ranks(main)


def test_async_layout_is_there_after_the_event(on_two_ranks):
    topk_idx = np.array([[0, 3], [2, -1]])

    def main(buffer):
        *outputs, event = buffer.get_dispatch_layout(to_target(topk_idx), 4, async_finish=True)
        check_schedule(not event.event.done)
        event.current_stream_wait()
        assert event.event.done
        num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank = to_numpy(outputs)
        return num_tokens_per_rank.tolist(), num_tokens_per_expert.tolist(), is_token_in_rank.tolist()

    for seed in range(3):
        assert on_two_ranks(main, seed=seed) == [([1, 2], [1, 0, 1, 1], [[True, True], [False, True]])] * 2


def test_calls_chained_by_events_need_no_wait_between(on_two_ranks, inputs):
    """Layout, dispatch and combine are all issued before the host waits for any of them."""

    def main(buffer):
        arguments = inputs(buffer)
        chain = {"async_finish": True, "allocate_on_comm_stream": True}
        num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, event = buffer.get_dispatch_layout(
            arguments["topk_idx"], 4, previous_event=nbep.Buffer.capture(), **chain
        )
        arguments |= {
            "num_tokens_per_rank": num_tokens_per_rank,
            "num_tokens_per_expert": num_tokens_per_expert,
            "is_token_in_rank": is_token_in_rank,
            "num_worst_tokens": 6,
        }
        recv_x, _, recv_topk_weights, counts, handle, event = buffer.dispatch(
            **arguments, previous_event=event, **chain
        )
        assert counts == []
        combined_x, combined_weights, event = buffer.combine(
            recv_x, handle, recv_topk_weights, previous_event=event, **chain
        )
        check_schedule(not event.event.done)
        event.current_stream_wait()
        num_copies = to_numpy(is_token_in_rank).sum(axis=1, keepdims=True)
        x = to_numpy(arguments["x"]).astype(np.float32)
        assert (to_numpy(combined_x).astype(np.float32) == num_copies * x).all()
        np.testing.assert_array_equal(to_numpy(combined_weights), to_numpy(arguments["topk_weights"]))

    for seed in range(3):
        on_two_ranks(main, seed=seed)


@pytest.mark.emulator_only("contents are never looked at on a GPU")
@pytest.mark.parametrize("passes_event", [True, False])
def test_contents_are_not_looked_at_while_an_event_is_pending(passes_event, on_two_ranks, inputs):
    """The counts are being written when dispatch is called: checking them would refuse a correct call.

    passes_event: whether dispatch is given the event; without it the order of the comm stream is enough
    """

    def main(buffer):
        arguments = inputs(buffer)
        num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, event = buffer.get_dispatch_layout(
            arguments["topk_idx"], 4, async_finish=True
        )
        num_tokens_per_rank[:] = -7
        arguments |= {
            "num_tokens_per_rank": num_tokens_per_rank,
            "num_tokens_per_expert": num_tokens_per_expert,
            "is_token_in_rank": is_token_in_rank,
        }
        recv_x, *_ = buffer.dispatch(**arguments, previous_event=event if passes_event else None)
        return len(recv_x)

    assert sum(on_two_ranks(main)) >= 6


def test_a_worst_case_call_in_flight_does_not_disturb_the_next_count(on_two_ranks, inputs):
    """A launch that no CPU polls must not write the counters that the next call waits for."""

    def main(buffer):
        arguments = inputs(buffer, 3)
        expected = len(buffer.dispatch(**arguments)[0])
        few = inputs(buffer, 1)
        *_, first = buffer.dispatch(**few, num_worst_tokens=20, async_finish=True)
        recv_x, *_ = buffer.dispatch(**arguments)
        first.current_stream_wait()
        assert len(recv_x) == expected

    for seed in range(5):
        on_two_ranks(main, seed=seed)


def test_a_blocking_call_leaves_its_arrays_to_the_caller(on_two_ranks, inputs):
    def main(buffer):
        arguments = inputs(buffer)
        recv_x, _, _, _, handle, event = buffer.dispatch(**arguments)
        *_, combine_event = buffer.combine(recv_x, handle)
        given = [weakref.ref(array) for array in (arguments.pop("x"), recv_x)]
        del recv_x
        gc.collect()
        assert [array() for array in given] == [None, None]
        assert event.event.done
        assert combine_event.event.done

    on_two_ranks(main)


def test_an_asynchronous_call_keeps_its_arrays_until_its_event_is_waited_for(on_two_ranks, inputs):
    def main(buffer):
        arguments = inputs(buffer)
        *_, event = buffer.dispatch(**arguments, num_worst_tokens=6, async_finish=True)
        x = weakref.ref(arguments.pop("x"))
        gc.collect()
        assert x() is not None
        event.current_stream_wait()
        gc.collect()
        assert x() is None

    on_two_ranks(main)


def test_leaving_the_with_block_waits(on_two_ranks):
    def main(buffer):
        *_, event = buffer.get_dispatch_layout(to_target(np.zeros((1, 1), np.int64)), 2, async_finish=True)
        with event as entered:
            assert entered is event
            check_schedule(not event.event.done)
        assert event.event.done

    on_two_ranks(main)


def test_an_overlap_without_an_event_waits_for_nothing():
    overlap = nbep.EventOverlap()
    with overlap:
        pass
    with pytest.raises(ValueError, match="event: got None; there is nothing to wait for"):
        overlap.current_stream_wait()


def test_extra_tensors_live_as_long_as_the_overlap():
    tensors = (np.zeros(1),)
    assert nbep.EventOverlap(None, tensors).extra_tensors is tensors


def test_what_is_captured_before_the_first_buffer_holds_nothing_up(on_two_ranks, inputs):
    """A process has no rank by then, nor has anything been launched."""
    captured = nbep.Buffer.capture()
    assert captured.event.done
    captured.current_stream_wait()

    def main(buffer):
        arguments = inputs(buffer)
        recv_x, *_ = buffer.dispatch(**arguments)
        after_event, *_ = buffer.dispatch(**arguments, previous_event=captured)
        return to_numpy(recv_x).tobytes() == to_numpy(after_event).tobytes()

    assert on_two_ranks(main) == [True, True]
