"""On a GPU the software NIC runs beside each launch over its queues; here without one, and a driver that only notes."""

import gc
import sys
from types import SimpleNamespace

import pytest

if sys.platform != "linux":
    pytest.skip("CUDA is Linux's", allow_module_level=True)

from cuda.bindings import driver as cu

from nbep.device.by_type import IbgdaNetwork
from nbep.device.jit import kernel, spec_of
from nbep.device.network.nic import NO_ENTRY, Nic, Troubles, software_nic
from nbep.device.types import Out
from nbep.host.target.cuda import launcher, streams
from nbep.host.target.cuda import runtime as cuda_runtime
from nbep.host.target.cuda.nic import LIMIT_IN_WAITS
from nbep.host.target.cuda.runtime import CudaRuntime, SharedDevice
from nbep.host.target.cuda.streams import CudaStream

MAIN, OTHER, NIC_STREAM = 1, 2, 9
STOP, QUEUES = 0x500, 0x900
TIMEOUT_NS = 2_000_000
SUCCESS = cu.CUresult.CUDA_SUCCESS


class Driver:
    """Attributes: calls that have come, in their order; capturing: the stream that records a graph"""

    def __init__(self, monkeypatch):
        self.calls = []
        self.capturing = 0
        self._num_events = 0
        self.recorded = {}  # event -> the stream on which it was recorded
        for name in ("cuMemsetD32Async", "cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernelEx", "cuEventCreate"):
            monkeypatch.setattr(cu, name, getattr(self, name))
        monkeypatch.setattr(cu, "cuEventDestroy", lambda event: (SUCCESS,))
        monkeypatch.setattr(cu, "cuStreamSynchronize", lambda stream: (SUCCESS,))
        monkeypatch.setattr(cu, "cuModuleLoadData", lambda cubin: (SUCCESS, cubin))
        monkeypatch.setattr(cu, "cuModuleGetFunction", lambda module, name: (SUCCESS, (module, name)))
        monkeypatch.setattr(cu, "cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda *_: (SUCCESS, 1))
        status = cu.CUstreamCaptureStatus
        monkeypatch.setattr(
            cu,
            "cuStreamIsCapturing",
            lambda stream: (
                SUCCESS,
                status.CU_STREAM_CAPTURE_STATUS_ACTIVE
                if int(stream) == self.capturing
                else status.CU_STREAM_CAPTURE_STATUS_NONE,
            ),
        )

    def cuMemsetD32Async(self, address, value, count, stream):  # noqa: N802
        assert (address, count) == (STOP, 1)
        self.calls.append(f"stop = {value} on {int(stream)}")
        return (SUCCESS,)

    def cuEventCreate(self, flags):  # noqa: N802
        self._num_events += 1
        return SUCCESS, self._num_events

    def cuEventRecord(self, event, stream):  # noqa: N802
        self.recorded[event] = int(stream)
        return (SUCCESS,)

    def cuStreamWaitEvent(self, stream, event, flags):  # noqa: N802
        self.calls.append(f"{int(stream)} waits for {self.recorded[event]}")
        return (SUCCESS,)

    def cuLaunchKernelEx(self, config, function, parameters, extra):  # noqa: N802
        self.calls.append(f"{function[1].decode()} on {int(config.hStream)}")
        return (SUCCESS,)


@kernel()
def over_queues(out: Out, network: IbgdaNetwork):
    """Only its parameters matter."""


@kernel()
def over_nothing(out: Out):
    """Likewise."""


@pytest.fixture
def driver(monkeypatch):
    device = SimpleNamespace(compute_capability=(9, 0), ordinal=0, num_sms=132, make_current=lambda: None)
    device.max_smem_bytes = 227 << 10
    monkeypatch.setattr(cuda_runtime, "Device", lambda ordinal: device)
    monkeypatch.setattr(launcher, "load_cubin", lambda spec, cc, key: spec.name.encode())
    monkeypatch.setitem(streams.idle_streams, 0, [NIC_STREAM])
    yield Driver(monkeypatch)
    gc.collect()  # events are destroyed while there is this driver


def network(queues=QUEUES):
    return IbgdaNetwork(*(0 for _ in IbgdaNetwork._fields))._replace(queue_pairs=queues)


def runtime_with_nic(driver, num_ranks=1):
    runtime = CudaRuntime(SharedDevice(0, num_ranks), 0)
    nic = runtime.create_nic()
    nic.start(
        software_nic,
        SimpleNamespace(address=QUEUES),
        3,
        TIMEOUT_NS,
        Nic(0, 0, 3, 1, 0, STOP, 0),
        Troubles(0, 0, 0, 0, NO_ENTRY, NO_ENTRY),
    )
    assert driver.calls == [f"stop = 0 on {NIC_STREAM}"]
    driver.calls.clear()
    return runtime, nic


def stream(handle=MAIN):
    return CudaStream(handle, "stream", 0, is_callers=True)


BESIDE = [
    f"stop = 0 on {MAIN}",
    f"{NIC_STREAM} waits for {MAIN}",
    f"{spec_of(software_nic).entry_name} on {NIC_STREAM}",
    f"over_queues on {MAIN}",
    f"stop = 1 on {MAIN}",
    f"{MAIN} waits for {NIC_STREAM}",
]


def test_a_launch_over_the_queues_has_the_nic_beside_it_and_none_runs_before_or_after(driver):
    runtime, nic = runtime_with_nic(driver)
    runtime.launch(stream(), over_queues, 1, 32, 0, 0, network())
    assert driver.calls == BESIDE
    assert nic._args[0].limit_ns == LIMIT_IN_WAITS * TIMEOUT_NS > 0


def test_so_has_a_prepared_launch(driver):
    runtime, _ = runtime_with_nic(driver)
    prepared = runtime.prepare(over_queues, 1, 32, 0, network())
    assert driver.calls == []
    prepared.launch(stream(), (0,))
    assert driver.calls == BESIDE


def test_a_launch_over_other_queues_or_none_has_no_nic(driver):
    runtime, nic = runtime_with_nic(driver)
    runtime.launch(stream(), over_queues, 1, 32, 0, 0, network(QUEUES + 8))
    runtime.launch(stream(), over_nothing, 1, 32, 0, 0)
    nic.close()
    runtime.launch(stream(), over_queues, 1, 32, 0, 0, network())
    assert driver.calls == [f"over_queues on {MAIN}", f"over_nothing on {MAIN}", f"over_queues on {MAIN}"]


def test_a_launch_on_another_stream_waits_until_the_nic_is_free(driver):
    runtime, _ = runtime_with_nic(driver)
    runtime.launch(stream(), over_queues, 1, 32, 0, 0, network())
    driver.calls.clear()
    runtime.launch(stream(OTHER), over_queues, 1, 32, 0, 0, network())
    assert driver.calls[:2] == [f"{OTHER} waits for {NIC_STREAM}", f"stop = 0 on {OTHER}"]


def test_a_graph_holds_the_nic_and_waits_for_nothing_outside(driver):
    runtime, _ = runtime_with_nic(driver)
    runtime.launch(stream(), over_queues, 1, 32, 0, 0, network())
    driver.calls.clear()
    driver.capturing = MAIN
    for _ in range(2):
        runtime.launch(stream(), over_queues, 1, 32, 0, 0, network())
    assert driver.calls == 2 * BESIDE
    driver.capturing = 0
    driver.calls.clear()
    runtime.launch(stream(), over_queues, 1, 32, 0, 0, network())
    assert driver.calls == [f"{MAIN} waits for {NIC_STREAM}", *BESIDE]


def test_the_nic_ends_when_the_launch_fails(driver, monkeypatch):
    runtime, _ = runtime_with_nic(driver)
    launch = cu.cuLaunchKernelEx

    def refuse(config, function, parameters, extra):
        if function[1] == b"over_queues":
            return (cu.CUresult.CUDA_ERROR_LAUNCH_FAILED,)
        return launch(config, function, parameters, extra)

    monkeypatch.setattr(cu, "cuLaunchKernelEx", refuse)
    monkeypatch.setattr(cu, "cuGetErrorString", lambda code: (SUCCESS, b"refused"))
    with pytest.raises(RuntimeError, match="launch of over_queues"):
        runtime.launch(stream(), over_queues, 1, 32, 0, 0, network())
    assert driver.calls == [call for call in BESIDE if "over_queues" not in call]


@pytest.mark.parametrize(("num_ranks", "room"), [(1, 131), (4, 32)])
def test_an_sm_is_left_for_the_nic_of_each_rank_of_the_card(driver, num_ranks, room):
    runtime, _ = runtime_with_nic(driver, num_ranks)
    runtime.launch(stream(), over_queues, room, 32, 0, 0, network())
    with pytest.raises(ValueError, match=f"over_queues, grid: {room + 1} .* at most {room} blocks"):
        runtime.launch(stream(), over_queues, room + 1, 32, 0, 0, network())
