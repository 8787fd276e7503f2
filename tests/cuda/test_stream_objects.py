"""What streams and events remember, without a GPU: the driver's calls are stood in for."""

import sys
import weakref
from types import SimpleNamespace

import pytest

if sys.platform == "darwin":
    pytest.skip("CUDA's packages are not there", allow_module_level=True)

from cuda.bindings.driver import CUresult, CUstreamCaptureStatus

from nbep.host.target.cuda import runtime as cuda
from nbep.host.target.cuda import streams as streams_module
from nbep.host.target.cuda.runtime import CudaRuntime, CudaStream


@pytest.fixture
def no_idle_streams(monkeypatch):
    idle_streams: dict = {}
    for module in (cuda, streams_module):
        monkeypatch.setattr(module, "idle_streams", idle_streams)


@pytest.mark.usefixtures("no_idle_streams")
def test_a_closed_stream_is_used_again_on_its_own_device_only(monkeypatch):
    """Whatever the current device is when it is closed."""
    new = iter((11, 12))
    monkeypatch.setattr(cuda.cu, "cuCtxGetStreamPriorityRange", lambda: (0, 0, -1))
    monkeypatch.setattr(cuda.cu, "cuStreamCreateWithPriority", lambda *_: (0, next(new)))

    def create_stream(ordinal: int) -> CudaStream:
        runtime = SimpleNamespace(device=SimpleNamespace(ordinal=ordinal), _host_wait=None)
        return CudaRuntime.create_stream(runtime, "comm")

    create_stream(1).close()
    assert create_stream(0).handle == 12
    assert create_stream(1).handle == 11


class Array:
    """Something that can be seen to go away."""


class Streams:
    """A comm stream whose events are done when `is_done`, and a current stream."""

    def __init__(self, monkeypatch):
        self.is_done = False
        self.is_capturing = False
        self.current = 1
        self.comm = CudaStream(2, "comm", 0)
        for name, answer in {
            "cuEventCreate": lambda *_: (0, None),
            "cuEventRecord": lambda *_: (0,),
            "cuEventQuery": self.query,
            "cuStreamWaitEvent": lambda *_: (0,),
            "cuStreamIsCapturing": lambda *_: (0, CUstreamCaptureStatus(int(self.is_capturing))),
        }.items():
            monkeypatch.setattr(cuda.cu, name, answer)
        for module in (cuda, streams_module):
            monkeypatch.setattr(module, "current_stream_handle", lambda: self.current)

    def query(self, event):
        assert not self.is_capturing, "events must not be asked while a graph is captured"
        return (CUresult.CUDA_SUCCESS if self.is_done else CUresult.CUDA_ERROR_NOT_READY,)

    def call(self):
        """A launch and the event behind it, and a reference to the array that it used."""
        array = Array()
        self.comm.unrecorded.append(array)
        return self.comm.record(), weakref.ref(array)


@pytest.fixture
def streams(monkeypatch):
    return Streams(monkeypatch)


def test_arrays_live_until_the_stream_of_the_call_waits(streams):
    event, array = streams.call()
    later, other = streams.call()
    assert array() is not None
    event.current_stream_wait()
    assert array() is None
    assert other() is not None
    later.current_stream_wait()
    assert other() is None


def test_another_stream_that_waits_says_nothing_about_the_stream_of_the_call(streams):
    """The memory of the arrays goes back to the stream of the call, which may use it at once."""
    event, array = streams.call()
    streams.current = 3
    event.current_stream_wait()
    assert array() is not None


def test_arrays_of_an_event_without_a_wait_go_when_a_later_call_finds_it_done(streams):
    event, array = streams.call()
    streams.call()
    assert array() is not None
    streams.is_done = True
    streams.call()
    assert array() is None, "although the caller still has the event"
    assert event.done


def test_arrays_of_a_captured_call_live_as_long_as_the_capture(streams):
    """A graph hands out memory again in the order of its streams, as the current one does."""
    streams.is_capturing = True
    event, array = streams.call()
    chained, first_of_chain = streams.call()
    streams.call()
    event.current_stream_wait()
    assert array() is None
    assert first_of_chain() is not None
    streams.is_capturing = False
    streams.call()
    assert first_of_chain() is None, "although the caller still has the event"
    del chained
