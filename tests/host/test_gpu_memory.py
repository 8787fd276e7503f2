"""Symmetric memory of a GPU, of every handle type, against a driver that only keeps account; see fake_driver.py."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("CUDA and abstract sockets are Linux's", allow_module_level=True)

from cuda.bindings import driver as cu
from fake_driver import DEVICE, GRANULARITY, RESULT, FakeDriver
from processes import run_python

from nbep.host.target.cuda import memory as gpu_memory
from nbep.host.target.cuda.memory import SYMMETRIC_MEMORY, DeviceMemory, HostVisibleMemory, VmmMemory

VMM_TYPES = [name for name, memory in SYMMETRIC_MEMORY.items() if issubclass(memory, VmmMemory)]
FILES_OF_HOST = 2 * (1 + 2)  # each rank keeps its own, and mmap one for each mapping
all_types = pytest.mark.parametrize("handle_type", SYMMETRIC_MEMORY)
vmm_types = pytest.mark.parametrize("handle_type", VMM_TYPES)


def device(number: int = 0, **changes) -> SimpleNamespace:
    """What symmetric memory asks of a nbep.host.target.cuda.driver.Device."""
    asked = {"attribute": lambda attribute: 1, "can_reach": lambda bus_id: True}
    return SimpleNamespace(ordinal=DEVICE, bus_id=f"0000:0{number}:00.0", **asked | changes)


def allocate(handle_type: str, num_bytes: int = 1000, **changes):
    return SYMMETRIC_MEMORY[handle_type](device(**changes), num_bytes, "nvl_buffer")


def pair(handle_type: str) -> list:
    """The memory of two ranks, each of which takes the other for another process."""
    memories = [allocate(handle_type, number=rank) for rank in range(2)]
    for rank, memory in enumerate(memories):
        memory.handle = memory.handle._replace(process=b"process %d" % rank)
    return memories


def open_all(memories: list) -> list[list[int]]:
    """open_peers of all ranks at once."""
    handles = [memory.handle for memory in memories]
    with ThreadPoolExecutor(len(memories)) as pool:
        opened = [pool.submit(memory.open_peers, handles, rank) for rank, memory in enumerate(memories)]
    return [addresses.result() for addresses in opened]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@all_types
@pytest.mark.parametrize("num_bytes", [0, 1, GRANULARITY, GRANULARITY + 1])
def test_all_of_the_memory_is_zeroed_and_given_back(handle_type, num_bytes, monkeypatch):
    driver, before = FakeDriver().install(monkeypatch), open_files()
    memory = allocate(handle_type, num_bytes)
    granules = max(1, -(-num_bytes // GRANULARITY))
    allocated = granules * GRANULARITY if handle_type in VMM_TYPES else max(num_bytes, 1)
    assert (memory.num_bytes, memory.handle.num_bytes) == (num_bytes, allocated)
    if handle_type == "host":
        assert not memory.read(0, num_bytes, np.uint8).any()
    else:
        assert driver.zeroed == {driver.memory_at(memory.address): allocated}
    memory.free()
    assert driver.outstanding == []
    assert open_files() == before


@all_types
def test_ranks_in_two_processes_see_each_others_memory(handle_type, monkeypatch):
    driver, before = FakeDriver().install(monkeypatch), open_files()
    memories = pair(handle_type)
    tables = open_all(memories)
    assert open_files() == before + (FILES_OF_HOST if handle_type == "host" else 0)
    for rank, table in enumerate(tables):
        assert table[rank] == memories[rank].address
        assert table[1 - rank] != memories[1 - rank].address
        assert driver.memory_at(table[1 - rank]) == driver.memory_at(memories[1 - rank].address)
    for memory in memories:
        memory.close_peers()
    for memory in memories:
        assert driver.memory_at(memory.address)
        memory.free()
    assert driver.outstanding == []
    assert open_files() == before


@all_types
def test_ranks_of_one_process_use_plain_addresses(handle_type, monkeypatch):
    driver = FakeDriver().install(monkeypatch)
    memories = [allocate(handle_type) for _ in range(2)]
    assert open_all(memories) == [[memory.address for memory in memories]] * 2
    assert not {"cuMemImportFromShareableHandle", "cuIpcOpenMemHandle"} & set(driver.calls)


FORK = """
import os
from nbep.host.target.cuda import memory as gpu_memory

before = gpu_memory._process
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, gpu_memory._process)
    os._exit(0)
os.wait()
assert gpu_memory._process == before
print("renamed" if os.read(reader, 100) != before else "the same")
"""


@pytest.mark.thorough
def test_no_two_processes_have_one_name():
    code = "from nbep.host.target.cuda import memory; print(memory._process)"
    names = [run_python("-c", code) for _ in range(2)]
    assert len({*names, f"{gpu_memory._process}\n"}) == 3
    assert run_python("-c", FORK) == "renamed\n"


@all_types
def test_processes_of_one_number_in_two_containers_map_each_others_memory(handle_type, monkeypatch):
    driver = FakeDriver().install(monkeypatch)
    monkeypatch.setattr("os.getpid", lambda: 1)
    memories = []
    for rank in range(2):
        monkeypatch.setattr(gpu_memory, "_process", b"container %d" % rank)
        memories.append(allocate(handle_type, number=rank))
    for rank, table in enumerate(open_all(memories)):
        assert table[1 - rank] != memories[1 - rank].address
        assert driver.memory_at(table[1 - rank]) == driver.memory_at(memories[1 - rank].address)


@all_types
def test_a_failure_half_way_gives_back_what_was_made(handle_type, monkeypatch):
    driver, before = FakeDriver().install(monkeypatch), open_files()
    allocate(handle_type).free()
    for call in driver.calls:
        failing = FakeDriver(call).install(monkeypatch)
        with pytest.raises(RuntimeError, match=f"{call}.*CUDA_ERROR_OUT_OF_MEMORY"):
            allocate(handle_type)
        assert failing.calls == driver.calls[: driver.calls.index(call) + 1]
        assert failing.outstanding == []
        assert open_files() == before


@pytest.mark.parametrize(
    ("handle_type", "call"),
    [("ipc", "cuIpcOpenMemHandle"), ("host", "cuMemHostRegister"), ("host", "cuMemHostGetDevicePointer")]
    + [
        (handle_type, call)
        for handle_type in VMM_TYPES
        for call in ("cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")
    ],
)
def test_a_failure_to_map_a_peer_leaves_nothing_behind(handle_type, call, monkeypatch):
    driver, before = FakeDriver().install(monkeypatch), open_files()
    memories = pair(handle_type)
    driver.failing = call
    with pytest.raises(RuntimeError, match=f"{call}.*CUDA_ERROR_OUT_OF_MEMORY"):
        open_all(memories)
    for memory in memories:
        memory.close_peers()
        memory.free()
    assert driver.outstanding == []
    assert open_files() == before


def test_a_mapping_that_the_driver_refuses_names_the_peer_and_both_gpus(monkeypatch):
    driver = FakeDriver().install(monkeypatch)
    memories = pair("fabric")
    driver.failing, driver.failure = "cuMemSetAccess", RESULT.CUDA_ERROR_INVALID_DEVICE
    wanted = "cuMemSetAccess of GPU 0000:00:00.0 to memory of rank 1 on GPU 0000:01:00.0: CUDA_ERROR_INVALID_DEVICE"
    with pytest.raises(RuntimeError, match=wanted):
        memories[0].open_peers([memory.handle for memory in memories], 0)


@vmm_types
def test_a_type_that_the_device_does_not_have_is_refused(handle_type, monkeypatch):
    driver = FakeDriver().install(monkeypatch)
    wanted = rf"handle_type: got {handle_type}; GPU 0000:00:00.0 does not offer it \(.*_SUPPORTED is 0\)"
    with pytest.raises(RuntimeError, match=wanted):
        allocate(handle_type, attribute=lambda attribute: 0)
    assert driver.calls == []


@pytest.mark.parametrize("code", [RESULT.CUDA_ERROR_NOT_PERMITTED, RESULT.CUDA_ERROR_NOT_SUPPORTED])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"])
def test_without_an_imex_channel_the_error_says_that_it_takes_one(call, code, monkeypatch):
    driver = FakeDriver(call, code).install(monkeypatch)
    with pytest.raises(RuntimeError, match=f"got fabric; .* does not offer it: {call}.*{code.name}.* IMEX channel"):
        open_all(pair("fabric"))
    assert driver.calls[-1] == call


@vmm_types
def test_too_little_memory_is_not_taken_for_a_missing_type(handle_type, monkeypatch):
    FakeDriver("cuMemCreate").install(monkeypatch)
    with pytest.raises(
        RuntimeError, match=f"cuMemCreate of {GRANULARITY} bytes for nvl_buffer: CUDA_ERROR_OUT"
    ) as error:
        allocate(handle_type)
    assert "offer" not in str(error.value)


@pytest.mark.parametrize("handle_type", [name for name in SYMMETRIC_MEMORY if name != "host"])
def test_a_gpu_that_cannot_be_reached_is_named_and_the_peer_need_not_wait(handle_type, monkeypatch):
    FakeDriver().install(monkeypatch)
    memories = pair(handle_type)
    memories[0].device.can_reach = lambda bus_id: bus_id == "0000:00:00.0"
    handles = [memory.handle for memory in memories]
    wanted = r'GPU 0000:00:00.0 cannot reach GPU 0000:01:00.0 of rank 1: no peer access; with handle_type="host" they'
    with pytest.raises(RuntimeError, match=wanted):
        memories[0].open_peers(handles, 0)
    memories[1].open_peers(handles, 1)  # alone: nothing that it needs is still to come


@all_types
def test_a_rank_of_another_host_is_named(handle_type, monkeypatch):
    FakeDriver().install(monkeypatch)
    memory = allocate(handle_type)
    far = memory.handle._replace(host="far", process=b"far")
    with pytest.raises(RuntimeError, match=r"rank 1 is on host far, this rank on .*: not one node"):
        memory.open_peers([memory.handle, far], 0)


def test_gpus_that_do_not_reach_each_other_meet_in_memory_of_the_host(monkeypatch):
    driver = FakeDriver().install(monkeypatch)
    memories = pair("host")
    for memory in memories:
        memory.device.can_reach = lambda bus_id: False
    for rank, table in enumerate(open_all(memories)):
        assert driver.memory_at(table[1 - rank]) == driver.memory_at(memories[1 - rank].address)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, ml_dtypes.bfloat16])
def test_the_host_reads_its_memory_as_it_has_written_it(dtype, monkeypatch):
    FakeDriver().install(monkeypatch)
    memory = allocate("host")
    memory.write(64, np.arange(6, dtype=dtype)[::2])
    assert memory.read(64, 4, dtype).tolist() == [0, 2, 4, 0]
    assert not memory.read(0, 64, np.uint8).any()


def test_memory_of_the_host_is_refused_where_gpus_cannot_map_it(monkeypatch):
    driver, before = FakeDriver().install(monkeypatch), open_files()
    wanted = r"got host; GPU 0000:00:00.0 does not offer it \(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED is 0\)"
    with pytest.raises(RuntimeError, match=wanted):
        allocate("host", attribute=lambda attribute: 0)
    assert (driver.calls, open_files()) == ([], before)


def test_more_memory_than_the_host_has_is_named_before_a_page_is_touched(monkeypatch):
    driver, before = FakeDriver().install(monkeypatch), open_files()
    monkeypatch.setattr(gpu_memory, "available_bytes", lambda: 999)
    with pytest.raises(RuntimeError, match="no 1000 bytes of the host's memory for nvl_buffer: 999 are available"):
        allocate("host", 1000)
    assert (driver.calls, open_files()) == ([], before)


@pytest.mark.parametrize("code", [RESULT.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, RESULT.CUDA_ERROR_INVALID_DEVICE])
@pytest.mark.parametrize(("handle_type", "call"), [("ipc", "cuIpcOpenMemHandle"), ("posix_fd", "cuMemSetAccess")])
def test_what_a_driver_says_of_gpus_that_others_do_not_see_names_the_way_too(handle_type, call, code, monkeypatch):
    driver = FakeDriver().install(monkeypatch)
    memories = pair(handle_type)
    driver.failing, driver.failure = call, code
    with pytest.raises(RuntimeError, match=rf'{call}.*{code.name}.*; with handle_type="host" they meet'):
        open_all(memories)


def test_memory_that_the_host_polls_is_zeros_and_is_given_back_after_a_failure_too(monkeypatch):
    driver = FakeDriver().install(monkeypatch)
    memory = HostVisibleMemory(100, "counters")
    assert memory.read(0, 25, np.int32).tolist() == [0] * 25
    memory.free()
    assert driver.outstanding == []
    driver.failing = "cuMemHostGetDevicePointer"
    with pytest.raises(RuntimeError, match="cuMemHostGetDevicePointer"):
        HostVisibleMemory(100, "counters")
    assert driver.outstanding == []


def test_memory_is_set_before_it_is_handed_out(monkeypatch):
    """Comm streams do not wait for the default stream, on which it is set."""
    driver, done = FakeDriver().install(monkeypatch), []
    monkeypatch.setattr(
        cu, "cuStreamSynchronize", lambda stream: done.append((stream, *driver.zeroed)) or (RESULT.CUDA_SUCCESS,)
    )
    memory = DeviceMemory(device(), 100, "workspace")
    assert done == [(0, driver.memory_at(memory.address))]


def test_memory_of_the_host_has_no_name_that_a_killed_process_could_leave_behind(monkeypatch):
    FakeDriver().install(monkeypatch)
    memories = pair("host")
    open_all(memories)
    maps = Path("/proc/self/maps").read_text()
    assert maps.count("/memfd:nbep nvl_buffer (deleted)") == 4  # of each rank its own, and the peer's
    for memory in memories:
        memory.close_peers()
        memory.free()
    assert "memfd:nbep" not in Path("/proc/self/maps").read_text()
