"""Kernels over queue pairs of the software NIC, and what must come of them; for the emulator and for GPUs.

Each program runs on two ranks that are nodes of their own, and returns what is wrong on this rank: [] if nothing is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from target import TARGET

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.transport import (
    IbgdaNetwork,
    fetched_32,
    fetched_64,
    post_add,
    post_value,
    post_write,
    wait_written,
)
from nbep.device.network.seam import Place, own_ptr
from nbep.device.primitives import FULL_MASK, st_weak_s32, st_weak_s64, syncwarp, thread_idx
from nbep.device.protocols.peers import Bounds
from nbep.device.types import I32

NUM_BYTES = 16384
CAME, VALUE, CELL_32, CELL_64, OLD_32, OLD_64, DONE = 4096, 8192, 8320, 8448, 8576, 8704, 8832
NUM_ENTRIES = 64
NUM_ADDS = 3 * NUM_ENTRIES + 5
TIMEOUT_MS = 2000


@kernel()
def write_bytes(network: IbgdaNetwork, bounds: Bounds, num_bytes: I32, peer: I32):
    """Write bytes, which lie in several chunks; wait until they are there."""
    lane = thread_idx()
    for i in range(lane, num_bytes // 4, 32):
        st_weak_s32(own_ptr(network, 4 * i), 1000 * network.rank + i)
    syncwarp(FULL_MASK)
    index = post_write(network, Place(CAME, 0, peer, 0), num_bytes, True, lane)
    if lane == 0 and wait_written(network, peer, 0, index):
        st_weak_s32(own_ptr(network, DONE), 1)


@kernel()
def write_value(network: IbgdaNetwork, bounds: Bounds, peer: I32):
    """Write a number that lies in the entry; one thread."""
    if wait_written(network, peer, 0, post_value(network, VALUE, (network.rank + 1) << 40 | 7, 8, peer, 0)):
        st_weak_s32(own_ptr(network, DONE), 1)


@kernel()
def add_often(network: IbgdaNetwork, bounds: Bounds, num_adds: I32, peer: I32):
    """Add 1 and 2**33 + 1 so often that the queue wraps; keep the last old values; one thread."""
    for _ in range(num_adds):
        post_add(network, CELL_32, 1, False, peer, 0)
        post_add(network, CELL_64, (1 << 33) + 1, True, peer, 1)
    index = post_add(network, CELL_32, 1, False, peer, 0)
    if wait_written(network, peer, 0, index):
        st_weak_s32(own_ptr(network, OLD_32), fetched_32(network, peer, 0))
    index = post_add(network, CELL_64, 1, True, peer, 1)
    if wait_written(network, peer, 1, index):
        st_weak_s64(own_ptr(network, OLD_64), fetched_64(network, peer, 1))


def create(comm: Any, **options: Any) -> nbep.SharedMemory:
    nic = nbep.NicOptions(num_entries=NUM_ENTRIES, chunk_bytes=256, seed=3, **options)
    timeout_ms = TIMEOUT_MS if TARGET == "cuda" else 1
    return nbep.SharedMemory.create(
        comm, NUM_BYTES, transport="ibgda", num_nvl_peers=1, num_qps=2, nic=nic, timeout_ms=timeout_ms
    )


def differences(comm: Any, memory: nbep.SharedMemory, wanted: dict[int, Sequence[int]], dtype: Any) -> list[str]:
    """Where this rank's memory is not as wanted, when all ranks are done."""
    comm.barrier()
    found = {at: memory.symmetric.read(at, len(values), dtype).tolist() for at, values in wanted.items()}
    return [f"at {at}: {found[at]}, not {list(values)}" for at, values in wanted.items() if found[at] != list(values)]


def writes(comm: Any) -> list[str]:
    memory = create(comm)
    peer, num_words = 1 - comm.rank, 250
    args = (memory.network, memory.bounds, 4 * num_words, peer)
    memory.runtime.launch(memory.comm_stream, write_bytes, 1, 32, 0, *args)
    memory.wait()
    wanted = {CAME: [1000 * peer + i for i in range(num_words)] + [0], DONE: [1]}
    wrong = differences(comm, memory, wanted, np.int32)
    memory.close()
    return wrong


def inline_writes(comm: Any) -> list[str]:
    memory = create(comm)
    peer = 1 - comm.rank
    memory.runtime.launch(memory.comm_stream, write_value, 1, 1, 0, memory.network, memory.bounds, peer)
    memory.wait()
    wrong = differences(comm, memory, {VALUE: [(peer + 1) << 40 | 7, 0], DONE: [1]}, np.int64)
    memory.close()
    return wrong


def adds_that_wrap(comm: Any) -> list[str]:
    memory = create(comm)
    args = (memory.network, memory.bounds, NUM_ADDS, 1 - comm.rank)
    memory.runtime.launch(memory.comm_stream, add_often, 1, 1, 0, *args)
    memory.wait()
    wrong = differences(comm, memory, {CELL_32: [NUM_ADDS + 1, 0], OLD_32: [NUM_ADDS]}, np.int32)
    total = NUM_ADDS * ((1 << 33) + 1)
    wrong += differences(comm, memory, {CELL_64: [total + 1], OLD_64: [total]}, np.int64)
    memory.close()
    return wrong


def expect(error: type[Exception], comm: Any, memory: nbep.SharedMemory, is_struck: bool) -> list[str]:
    """Whether the work of a rank ends in an error, and not that of the other one; then the memory is given back."""
    wrong = []
    try:
        memory.wait()
        if is_struck:
            wrong.append(f"no {error.__name__}")
    except error as raised:
        if not is_struck or "queue 0" not in str(raised):
            wrong.append(f"{error.__name__}: {raised}")
    comm.barrier()
    memory.close()
    return wrong


def a_bad_key(comm: Any) -> list[str]:
    """Rank 0 gives its own keys for the peer's memory, which is refused."""
    memory = create(comm)
    network, peer = memory.network, 1 - comm.rank
    if comm.rank == 0:
        network = network._replace(remote_keys=network.remote_keys + 4 * network.num_chunks * (comm.rank - peer))
    memory.runtime.launch(memory.comm_stream, write_value, 1, 1, 0, network, memory.bounds, peer)
    return expect(nbep.NetworkError, comm, memory, comm.rank == 0)


def a_lost_entry(comm: Any) -> list[str]:
    """The NIC of rank 0 never serves its entry."""
    memory = create(comm, lost=(0, 1, 0, 0))
    memory.runtime.launch(memory.comm_stream, write_value, 1, 1, 0, memory.network, memory.bounds, 1 - comm.rank)
    return expect(nbep.PeerTimeout, comm, memory, comm.rank == 0)


PROGRAMS: dict[str, Callable[[Any], list[str]]] = {
    program.__name__: program for program in (writes, inline_writes, adds_that_wrap, a_bad_key, a_lost_entry)
}
