"""A Buffer that fails on one rank, when it is made or destroyed, fails on all, names it and leaves nothing behind."""

import numpy as np
import pytest
from target import spawn

import nbep
from nbep.device.protocols.peers import BARRIER_SIGNAL_BYTES
from nbep.host.target.emulated_memory import EmulatedSymmetricMemory
from nbep.host.target.emulator import EmulatedStream, EmulatorRuntime

emulator_only = pytest.mark.emulator_only("what fails is the emulator's memory")


@pytest.mark.parametrize("handle_type", ["IPC", "cuda_ipc", "", None, 1, True])
def test_an_unknown_handle_type_is_refused(handle_type, starts_nothing):
    def main(comm):
        with pytest.raises(ValueError, match=r"handle_type: got .*; must be one of ipc, posix_fd, fabric, host"):
            nbep.Buffer(comm, num_nvl_bytes=256, handle_type=handle_type)

    with starts_nothing():
        spawn(main, 2)


def test_handle_types_that_differ_between_ranks_are_refused_on_every_rank(starts_nothing):
    def main(comm):
        with pytest.raises(
            ValueError, match=r"handle_type: got \['ipc', 'posix_fd'\] on ranks 0 to 1; must be the same"
        ):
            nbep.Buffer(comm, num_nvl_bytes=256, handle_type=("ipc", "posix_fd")[comm.rank])

    with starts_nothing():
        spawn(main, 2)


@pytest.mark.emulator_only("a driver may not offer a type; see tests/cuda")
@pytest.mark.parametrize("handle_type", ["ipc", "posix_fd", "fabric", "host"])
def test_the_emulator_maps_memory_in_its_own_way_for_every_handle_type(handle_type):
    def main(comm):
        buffer = nbep.Buffer(comm, num_nvl_bytes=256, handle_type=handle_type)
        buffer.get_local_buffer_tensor(np.int32)[:] = comm.rank
        comm.barrier()
        memory = buffer._memory
        table = memory.symmetric.array(np.int64, 256 + BARRIER_SIGNAL_BYTES, 2)
        segments = [memory.runtime.space.segments[int(address) >> 32] for address in table]
        buffer.destroy()
        return [segment.rank for segment in segments]

    assert spawn(main, 2) == [[0, 1]] * 2


def fails_on(rank_of, failing_rank: int, function):
    """The function, but it fails on one rank."""

    def maybe(self, *arguments):
        if rank_of(self) == failing_rank:
            raise RuntimeError("no more of it")
        return function(self, *arguments)

    return maybe


def construct_in_vain(comm, **arguments) -> None:
    """A construction that fails because rank 1 does, and leaves nothing in the address space."""
    space = comm.runtime.space
    before = set(space.segments)
    with pytest.raises(RuntimeError, match=r"^rank 1: no more of it$"):
        nbep.Buffer(comm, num_nvl_bytes=256, **arguments)
    comm.barrier()
    assert set(space.segments) == before


@emulator_only
@pytest.mark.parametrize("transport", ["direct", "ibgda"])
def test_a_network_buffer_that_cannot_be_written_is_given_back(transport, monkeypatch):
    def write(self, offset, values):
        if self.allocation.name == "rdma_buffer" and self.space.rank == 1:
            raise RuntimeError("no more of it")
        original(self, offset, values)

    original = EmulatedSymmetricMemory.write
    monkeypatch.setattr(EmulatedSymmetricMemory, "write", write)
    network = {"transport": transport, "num_nvl_peers": 1 if transport == "ibgda" else 2}
    spawn(lambda comm: construct_in_vain(comm, num_rdma_bytes=1 << 16, **network), 2)


@emulator_only
@pytest.mark.parametrize("name", ["nvl_buffer", "pointer table of nvl_buffer", "table of barrier signals"])
def test_tables_of_memory_of_the_host_are_given_back_when_an_allocation_fails(name, monkeypatch):
    def unless_named(original):
        def allocate(self, *arguments):
            if self.rank == 1 and name in (*arguments, getattr(arguments[1], "name", None)):
                raise RuntimeError("no more of it")
            return original(self, *arguments)

        return allocate

    for step in ("allocate_symmetric", "allocate"):
        monkeypatch.setattr(EmulatorRuntime, step, unless_named(getattr(EmulatorRuntime, step)))
    spawn(lambda comm: construct_in_vain(comm, handle_type="host"), 2)


@emulator_only
@pytest.mark.parametrize("step", ["create_stream", "allocate_symmetric", "allocate", "allocate_host_visible"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_allocation_that_fails_on_one_rank_fails_on_all(step, num_ranks, monkeypatch):
    failing = fails_on(lambda runtime: runtime.rank, 1, getattr(EmulatorRuntime, step))
    monkeypatch.setattr(EmulatorRuntime, step, failing)
    spawn(construct_in_vain, num_ranks)


@emulator_only
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_that_cannot_open_a_peers_memory_fails_all(num_ranks, monkeypatch):
    failing = fails_on(lambda memory: memory.space.rank, 1, EmulatedSymmetricMemory._map)
    monkeypatch.setattr(EmulatedSymmetricMemory, "_map", failing)
    spawn(construct_in_vain, num_ranks)


@emulator_only
@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_whose_work_has_failed_keeps_no_other_from_destroying(num_ranks, frees, monkeypatch):
    """frees: whether the rank that failed can still give its memory back, as no CUDA context can that has failed"""
    failing = fails_on(lambda stream: stream._runtime.rank, 1, EmulatedStream.synchronize)
    monkeypatch.setattr(EmulatedStream, "synchronize", failing)
    if not frees:
        for step in ("_unmap", "free"):
            original = getattr(EmulatedSymmetricMemory, step)
            monkeypatch.setattr(EmulatedSymmetricMemory, step, fails_on(lambda memory: memory.space.rank, 1, original))

    def main(comm):
        space = comm.runtime.space
        before = set(space.segments)
        buffer = nbep.Buffer(comm, num_nvl_bytes=256)
        with pytest.raises(RuntimeError, match=r"^rank 1: no more of it$"):
            buffer.destroy()
        with pytest.raises(ValueError, match="destroyed"):
            buffer.destroy()
        comm.barrier()
        if frees or comm.rank != 1:
            assert set(space.segments) == before

    spawn(main, num_ranks)
