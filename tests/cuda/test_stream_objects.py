"""What streams and events remember, without a GPU: the driver's calls are stood in for."""

from types import SimpleNamespace

import pytest

from nbep.host.runtime.cuda import runtime as cuda
from nbep.host.runtime.cuda.runtime import CudaRuntime, CudaStream


@pytest.fixture
def no_idle_streams(monkeypatch):
    monkeypatch.setattr(cuda, "_idle_streams", {})


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
