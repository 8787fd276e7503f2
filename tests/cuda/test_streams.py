"""previous_event, async_finish and allocate_on_comm_stream, on torch's streams.

A gate holds a stream until the host opens it, so that what must wait for it is seen to wait, in every run.
"""

from contextlib import contextmanager

import numpy as np
import pytest
from arrays import LIBRARY, to_numpy, to_target
from cases import make_case
from intranode import CONFIG, Expected, Options, num_nvl_bytes
from target import spawn

import nbep

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(LIBRARY != "torch", reason="the streams are torch's")]

CASE = make_case(1, num_tokens=(9, 14), num_topk=3)
OPTIONS = Options(CONFIG, num_worst_tokens=30)
LONG_NS = 20_000_000_000
SHORT_NS = 300_000_000


class Gate:
    """A place in a stream that its later work passes when the host says so."""

    def __init__(self):
        from nbep.host.target.cuda.memory import HostVisibleMemory

        self.memory = HostVisibleMemory(128, "gate")
        self.is_open = self.memory.array(np.int32, 0, 1)

    def hold(self, stream) -> None:
        from cuda.bindings import driver as cu

        from nbep.host.target.cuda.driver import check

        equal = cu.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ.value
        check("cuStreamWaitValue32", cu.cuStreamWaitValue32(stream.cuda_stream, self.memory.address, 1, equal))

    def open(self) -> None:
        self.is_open[0] = 1


class Rank:
    """One rank with everything that a dispatch needs but x, whose bytes come later."""

    def __init__(self, comm):
        import torch

        self.comm = comm
        self.gate = Gate()
        self.side = torch.cuda.Stream()
        self.current = torch.cuda.current_stream()
        self.buffer = nbep.Buffer(comm, num_nvl_bytes=num_nvl_bytes(CASE, OPTIONS))
        x = CASE.x[comm.rank]
        self.real_x, self.x = to_target((x, np.zeros_like(x)))
        topk_idx, topk_weights = to_target((CASE.topk_idx[comm.rank], CASE.topk_weights[comm.rank]))
        self.layout = self.buffer.get_dispatch_layout(topk_idx, CASE.num_experts)
        self.arguments = {
            "topk_idx": topk_idx,
            "topk_weights": topk_weights,
            "num_tokens_per_rank": self.layout[0],
            "is_token_in_rank": self.layout[3],
            "num_tokens_per_expert": self.layout[2],
            "num_worst_tokens": OPTIONS.num_worst_tokens,
            "config": OPTIONS.config,
        }
        self.current.synchronize()
        comm.barrier()

    def dispatch(self, **order):
        """An asynchronous dispatch of x: recv_x and the event at its end."""
        recv_x, *_, event = self.buffer.dispatch(self.x, **self.arguments, async_finish=True, **order)
        return recv_x, event

    def comes(self, predicate, timeout_ns=LONG_NS) -> bool:
        """Whether the predicate becomes true; a run in which it does not takes long."""
        return self.comm.runtime.wait_until(predicate, lambda: "a stream", timeout_ns=timeout_ns)

    def check(self, recv_x) -> None:
        want = Expected(CASE, OPTIONS).dispatched[self.comm.rank]
        used = len(want.recv_src_idx)
        assert to_numpy(recv_x)[:used].tobytes() == want.recv_x[:used].tobytes()


@contextmanager
def rank_of(comm):
    """A Rank whose gate is open in the end, whatever happens: a closed one would hold the card for ever."""
    rank = Rank(comm)
    try:
        yield rank
    finally:
        rank.gate.open()
    rank.buffer.destroy()


def test_a_call_starts_after_previous_event_and_holds_no_other_stream():
    import torch

    def main(comm):
        with rank_of(comm) as rank:
            with torch.cuda.stream(rank.side):
                rank.gate.hold(rank.side)
                rank.x.copy_(rank.real_x)
                before = nbep.Buffer.capture()
            recv_x, event = rank.dispatch(previous_event=before)
            marker = rank.current.record_event()
            assert rank.comes(marker.query), "an asynchronous call holds the current stream"
            comm.barrier()
            assert not event.event.done, "dispatch did not wait for previous_event"
            rank.gate.open()
            event.current_stream_wait()
            rank.check(recv_x)

    spawn(main, 2)


def test_a_call_without_previous_event_starts_after_the_current_stream():
    def main(comm):
        with rank_of(comm) as rank:
            rank.gate.hold(rank.current)
            rank.x.copy_(rank.real_x)
            recv_x, event = rank.dispatch()
            comm.barrier()
            assert not event.event.done, "dispatch did not wait for the current stream"
            rank.gate.open()
            event.current_stream_wait()
            rank.check(recv_x)

    spawn(main, 2)


@pytest.mark.parametrize("asked", [{}, {"allocate_on_comm_stream": True}], ids=["alone", "allocate_on_comm_stream"])
def test_a_call_behind_previous_event_does_not_wait_for_the_current_stream(asked):
    def main(comm):
        with rank_of(comm) as rank:
            rank.x.copy_(rank.real_x)
            before = nbep.Buffer.capture()
            rank.gate.hold(rank.current)
            recv_x, event = rank.dispatch(previous_event=before, **asked)
            assert rank.comes(lambda: event.event.done), "dispatch waits for the current stream"
            rank.gate.open()
            event.current_stream_wait()
            rank.check(recv_x)

    spawn(main, 2)


@pytest.mark.parametrize("on_comm_stream", [False, True])
def test_outputs_of_a_call_behind_previous_event_belong_to_the_comm_stream(on_comm_stream):
    """Work of the current stream that comes after the event may still use memory that its allocator hands out."""
    import torch

    def main(comm):
        with rank_of(comm) as rank:
            streams = []
            prepare_empty = comm.runtime.prepare_empty

            def recording_prepare(*arguments):
                make = prepare_empty(*arguments)

                def recording_make(*given):
                    streams.append(torch.cuda.current_stream().cuda_stream)
                    return make(*given)

                return recording_make

            comm.runtime.prepare_empty = recording_prepare  # before a call has a plan
            rank.x.copy_(rank.real_x)
            own, of_calls = rank.current.cuda_stream, rank.buffer.get_comm_stream().cuda_stream
            behind = {"previous_event": nbep.Buffer.capture(), "allocate_on_comm_stream": on_comm_stream}
            for order, wanted in (({}, own), (behind, of_calls)):
                streams.clear()
                recv_x, event = rank.dispatch(**order)
                event.current_stream_wait()
                rank.check(recv_x)
                assert set(streams) == {wanted}

    spawn(main, 2)


def test_outputs_keep_their_bytes_until_the_current_stream_has_read_them():
    """recv_x goes away while a copy of it is held back; the next call's outputs must not take its memory by then."""
    import torch

    def main(comm):
        with rank_of(comm) as rank:
            rank.x.copy_(rank.real_x)
            zeros = torch.zeros_like(rank.x)
            order = {"previous_event": nbep.Buffer.capture(), "allocate_on_comm_stream": True}
            recv_x, event = rank.dispatch(**order)
            event.current_stream_wait()
            kept = torch.empty_like(recv_x)
            rank.gate.hold(rank.current)
            kept.copy_(recv_x)
            del recv_x, event
            rank.x = zeros
            _, event = rank.dispatch(**order)
            assert rank.comes(lambda: event.event.done)
            rank.gate.open()
            rank.check(kept)

    spawn(main, 2)
