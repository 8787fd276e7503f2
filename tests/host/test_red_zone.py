"""Memory for a caller's own kernels has exactly the size asked for: nbep's cells behind it are out of bounds."""

import numpy as np
import pytest

import nbep
from nbep.device.jit import kernel
from nbep.device.primitives import ld_weak_s32, st_weak_s32
from nbep.device.protocols.barriers import barrier_block
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.types import I32, Out

pytestmark = pytest.mark.emulator_only("a GPU's memory has no red zone")

NUM_BYTES = 256


@kernel(max_threads=1)
def store_at(peers: Peers, rank: I32, offset: I32):
    st_weak_s32(buffer_of(peers, rank) + offset, 7)


@kernel(max_threads=1)
def load_at(out: Out, peers: Peers, rank: I32, offset: I32):
    st_weak_s32(out, ld_weak_s32(buffer_of(peers, rank) + offset))


@kernel(max_threads=32)
def meet(peers: Peers, bounds: Bounds):
    barrier_block(peers, bounds)


def run(kernel_of, memory, comm, *arguments):
    if comm.rank == 0:
        memory.runtime.launch(memory.comm_stream, memory.kernel(kernel_of), 1, 1, 0, *arguments)
    memory.wait()
    comm.barrier()


@pytest.mark.parametrize("options", [{}, {"handle_type": "host"}, {"transport": "ibgda"}])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_into_the_cells_behind_the_callers_bytes_is_out_of_bounds(rank, options):
    def main(comm, offset):
        memory = nbep.SharedMemory.create(comm, NUM_BYTES, **options)
        run(store_at, memory, comm, memory.peers, rank, offset)
        values = memory.symmetric.read(NUM_BYTES - 4, 1, np.int32)
        memory.close()
        return int(values[0])

    assert nbep.spawn(main, 2, "emulator", (NUM_BYTES - 4,))[rank] == 7
    for offset in (NUM_BYTES, NUM_BYTES + 64):
        with pytest.raises(nbep.EmulatorError, match="out of bounds, the allocation has 256 bytes") as caught:
            nbep.spawn(main, 2, "emulator", (offset,))
        assert type(caught.value).__name__ == "OutOfBounds"
        assert f"`nvl_buffer` of rank {rank}" in str(caught.value)


def test_a_load_from_there_is_out_of_bounds():
    def main(comm):
        memory = nbep.SharedMemory.create(comm, NUM_BYTES)
        run(load_at, memory, comm, np.zeros(1, np.int32), memory.peers, 1, NUM_BYTES)
        memory.close()

    with pytest.raises(nbep.EmulatorError, match="out of bounds"):
        nbep.spawn(main, 2, "emulator")


@pytest.mark.parametrize("options", [{}, {"handle_type": "host"}])
def test_nbeps_own_functions_use_their_cells_there(options):
    def main(comm):
        memory = nbep.SharedMemory.create(comm, NUM_BYTES, **options)
        memory.runtime.launch(memory.comm_stream, memory.kernel(meet), 1, 32, 0, memory.peers, memory.bounds)
        memory.wait()
        memory.close()
        return True

    assert nbep.spawn(main, 2, "emulator", memory_model="checked") == [True, True]


def test_what_is_given_back_is_out_of_reach():
    def main(comm):
        memory = nbep.SharedMemory.create(comm, NUM_BYTES)
        peers = memory.peers
        memory.close()
        other = nbep.SharedMemory.create(comm, NUM_BYTES)
        run(store_at, other, comm, peers, 1, 0)
        other.close()

    with pytest.raises(nbep.EmulatorError, match="freed or closed"):
        nbep.spawn(main, 2, "emulator")
