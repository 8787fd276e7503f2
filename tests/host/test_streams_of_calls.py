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


def test_a_blocking_call_runs_on_the_callers_stream_and_waits_for_nothing(calls):
    for _ in range(3):
        first, end = calls.steps_of(5)
        assert first == launches(5)
        assert (end[0], end[2]) == ("record", 5)


def test_a_call_on_another_stream_comes_behind_the_end_of_the_call_before(calls):
    end = calls.steps_of(5)[-1][1]
    assert calls.steps_of(6)[:2] == [("wait", end, 6), launches(6)]
    end = calls.steps[-1][1]
    assert calls.steps_of(5)[:2] == [("wait", end, 5), launches(5)]


def test_an_asynchronous_call_comes_behind_the_call_before_and_a_blocking_one_behind_that(calls):
    end = calls.steps_of(5)[-1][1]
    steps = calls.steps_of(6, async_finish=True)
    assert steps[0] == ("wait", end, COMM)
    assert ("record", 6) in [(name, stream) for name, _, stream in steps]  # the comm stream comes behind stream 6, too
    assert launches(COMM) in steps
    record, wait, launch, *_ = calls.steps_of(5)
    assert record[0] == "record"
    assert record[2] == COMM
    assert wait == ("wait", record[1], 5)
    assert launch == launches(5)


def test_an_event_that_somebody_holds_stays_what_it_stood_for(calls):
    _, held = calls.layout(5)
    number = held.event.event.event
    assert calls.steps_of(5)[-1][1] != number
    again = calls.steps_of(5)[-1][1]
    assert calls.steps_of(5)[-1][1] == again
    calls.current, calls.steps = 9, []
    held.current_stream_wait()
    assert calls.steps == [("wait", number, 9)]


def test_eager_calls_and_those_of_a_graph_wait_for_none_of_each_other(calls):
    end = calls.steps_of(5)[-1][1]
    calls.capturing = True
    in_graph = calls.steps_of(6)
    assert in_graph[0] == launches(6)
    assert [name for name, *_ in in_graph].count("wait") == 0
    calls.capturing = False
    assert calls.steps_of(8)[:2] == [("wait", end, 8), launches(8)]
    assert in_graph[-1][1] not in [event for name, event, _ in calls.steps if name == "wait"]
