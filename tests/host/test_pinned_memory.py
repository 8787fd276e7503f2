"""Memory of the host that is registered with a GPU, with a driver that does nothing."""

import gc
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

from nbep.host.target.cuda import memory as gpu_memory

NAME = "nbep dropped"


@pytest.fixture
def known(monkeypatch):
    """The addresses that the driver knows."""
    addresses: set[int] = set()
    driver = SimpleNamespace(
        CU_MEMHOSTREGISTER_PORTABLE=1,
        CU_MEMHOSTREGISTER_DEVICEMAP=2,
        cuMemHostRegister=lambda host, *_: addresses.add(host),
        cuMemHostUnregister=addresses.remove,
        cuMemHostGetDevicePointer=lambda host, _: host,
    )
    monkeypatch.setattr(gpu_memory, "cu", driver)
    monkeypatch.setattr(gpu_memory, "check", lambda call, result: result)
    return addresses


def is_mapped() -> bool:
    return NAME in Path("/proc/self/maps").read_text()


def map_some(undo: ExitStack) -> None:
    gpu_memory.map_host_memory(gpu_memory.create_host_memory(4096, "dropped", undo), 4096, "dropped", undo)


def test_memory_that_is_closed_is_unknown_to_the_driver_and_mapped_no_more(known):
    with ExitStack() as undo:
        map_some(undo)
        assert len(known) == 1
        assert is_mapped()
    gc.collect()
    assert not known
    assert not is_mapped()


def test_memory_that_is_dropped_stays_mapped_as_long_as_the_driver_knows_it(known):
    """Its addresses must not go to other memory, which the driver would refuse; and a GPU may still write there."""
    undo = ExitStack()
    map_some(undo)
    undo.pop_all()  # nothing is left that would undo it
    gc.collect()
    assert len(known) == 1
    assert is_mapped()
    gpu_memory._registered.clear()
    gc.collect()
    assert not is_mapped()
