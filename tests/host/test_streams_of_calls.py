"""On which stream a call of the normal mode runs, and behind what: the driver's calls in order, without a GPU."""

import gc
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

import fake_gpu
from cuda.bindings import driver as cu

from nbep.host.target.cuda.launcher import LoadedKernel
from nbep.host.target.cuda.streams import CudaEvent

pytestmark = pytest.mark.emulator_only("its GPU is none")
COMM = 7  # the stream that the driver of no_gpu creates
ACTIVE = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


class Calls:
    """Calls of a buffer, and what each of them asks of the driver: who records, waits for whom, launches where."""

    def __init__(self, monkeypatch):
        torch = fake_gpu.install(monkeypatch)
        self.steps: list[tuple] = []
        self.current, self.capturing = 0, False
        numbers = iter(range(100, 1000))
        ok = fake_gpu.SUCCESS
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.current)
        monkeypatch.setattr(cu, "cuEventCreate", lambda flags: (ok, next(numbers)))
        monkeypatch.setattr(cu, "cuEventRecord", lambda event, stream: self.note("record", event, int(stream)))
        monkeypatch.setattr(cu, "cuStreamWaitEvent", lambda stream, event, _: self.note("wait", event, int(stream)))
        monkeypatch.setattr(cu, "cuStreamIsCapturing", lambda stream: (ok, ACTIVE if self.capturing else 0))

        def start(loaded, config, parameters):
            self.note("launch", loaded.spec.name, int(config.hStream))

        monkeypatch.setattr(LoadedKernel, "start", start)
        self.buffer = fake_gpu.make_buffer()
        self.topk_idx = torch.Tensor((8, 4), torch.int64)

    def note(self, *step):
        self.steps.append(step)
        return (fake_gpu.SUCCESS,)

    def layout(self, stream, **options):
        """The steps of a call while a stream is the current one, and its event."""
        self.current, self.steps = stream, []
        event = self.buffer.get_dispatch_layout(self.topk_idx, 16, **options)[-1]
        return self.steps, event

    def steps_of(self, stream, **options):
        return self.layout(stream, **options)[0]


@pytest.fixture
def calls(monkeypatch):
    yield Calls(monkeypatch)
    for event in gc.get_objects():
        if isinstance(event, CudaEvent):
            event.event = None  # none to destroy without the driver that made it


def launches(stream):
    return ("launch", "get_dispatch_layout", stream)


def record(stream):
    return ("record", stream)


def named(steps):
    """The steps without the numbers of events, and whether each wait is for the event that was recorded before it."""
    recorded = [event for name, event, _ in steps if name == "record"]
    assert all(event in recorded for name, event, _ in steps if name == "wait")
    return [(name, stream) for name, _, stream in steps]


def test_a_blocking_call_runs_on_the_callers_stream_and_asks_for_no_event(calls):
    for _ in range(3):
        assert calls.steps_of(5) == [launches(5)]


def test_a_call_on_another_stream_comes_behind_the_end_of_the_call_before(calls):
    calls.steps_of(5)
    assert named(calls.steps_of(6)) == [record(5), ("wait", 6), ("launch", 6)]
    assert named(calls.steps_of(5)) == [record(6), ("wait", 5), ("launch", 5)]


def test_an_asynchronous_call_comes_behind_the_call_before_and_a_blocking_one_behind_that(calls):
    calls.steps_of(5)
    steps = named(calls.steps_of(6, async_finish=True))
    assert steps[:2] == [record(5), ("wait", COMM)]
    assert steps[2:4] == [record(6), ("wait", COMM)]  # the comm stream comes behind stream 6, too
    assert steps[4:] == [("launch", COMM), record(COMM)]
    assert named(calls.steps_of(5)) == [record(COMM), ("wait", 5), ("launch", 5)]


def test_the_event_of_a_blocking_call_is_recorded_when_somebody_asks_for_it(calls):
    _, held = calls.layout(5)
    calls.steps_of(5)
    calls.current, calls.steps = 9, []
    held.current_stream_wait()
    assert named(calls.steps) == [record(5), ("wait", 9)]
    number = held.event.event.event
    calls.steps = []
    held.current_stream_wait()
    assert calls.steps == [("wait", number, 9)]


def test_eager_calls_and_those_of_a_graph_wait_for_none_of_each_other(calls):
    calls.steps_of(5)
    calls.capturing = True
    assert calls.steps_of(6) == [launches(6)]
    calls.capturing = False
    assert named(calls.steps_of(8)) == [record(5), ("wait", 8), ("launch", 8)]


def test_a_call_cannot_come_behind_one_whose_stream_is_being_captured(calls, monkeypatch):
    calls.steps_of(5)
    monkeypatch.setattr(cu, "cuStreamIsCapturing", lambda stream: (fake_gpu.SUCCESS, ACTIVE if stream == 5 else 0))
    with pytest.raises(ValueError, match="current stream: got another one than the call before had, which is being"):
        calls.steps_of(6)
    assert calls.steps == []
