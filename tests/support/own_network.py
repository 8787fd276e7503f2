"""Kernels of a test's own over queue pairs and the software NIC: where things lie in the buffer, how they are run.

SOURCE   what leaves      TARGET   where it lands      FLAGS   s32, added to      RESULTS, SEEN   what kernels found
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from target import spawn

import nbep
from nbep.device.jit import device_function
from nbep.device.network.seam import own_ptr
from nbep.device.primitives import (
    FULL_MASK,
    ld_acquire_sys_s32,
    ld_acquire_sys_s64,
    ld_weak_u8,
    st_weak_u8,
    syncwarp,
    wait_expired,
)

SOURCE, TARGET, FLAGS, RESULTS, SEEN = 0, 12288, 24576, 25600, 32768
NUM_BYTES = 45056
CHUNK_BYTES = 256
NUM_ENTRIES = 64
NEVER = 1 << 62


@device_function
def pattern(rank, i):
    """Byte i of what a rank sends: no zeros, and another one for each rank."""
    return (7 * i + 31 * rank + i // 256) % 255 + 1


@device_function
def fill_source(network, offset, num_bytes, lane):
    """Write the pattern; one warp. What lies at SOURCE + i is byte i."""
    for i in range(lane, num_bytes, 32):
        st_weak_u8(own_ptr(network, offset + i), pattern(network.rank, offset + i))
    syncwarp(FULL_MASK)


@device_function
def wait_flag(network, number, least, lane):
    """Wait until a flag is as large; one warp."""
    if lane == 0:
        while ld_acquire_sys_s32(own_ptr(network, FLAGS + 4 * number)) < least:
            wait_expired(NEVER)
    syncwarp(FULL_MASK)


@device_function
def wait_wide_flag(network, number, least, lane):
    """The same of a flag of 64 bits."""
    if lane == 0:
        while ld_acquire_sys_s64(own_ptr(network, FLAGS + 8 * number)) < least:
            wait_expired(NEVER)
    syncwarp(FULL_MASK)


@device_function
def see(network, offset, num_bytes, lane):
    """Copy what has arrived at TARGET + offset to SEEN + offset, with plain loads; one warp."""
    for i in range(lane, num_bytes, 32):
        st_weak_u8(own_ptr(network, SEEN + offset + i), ld_weak_u8(own_ptr(network, TARGET + offset + i)))


def sent_by(rank: int, offset: int, num_bytes: int) -> list[int]:
    return [pattern(rank, offset + i) for i in range(num_bytes)]


def run(
    kernel: Callable,
    grid: int,
    block: int,
    *args: Any,
    num_ranks: int = 2,
    ranks: Sequence[int] | None = None,
    num_nvl_peers: int = 1,
    num_qps: int = 1,
    nic: dict[str, Any] | None = None,
    smem_bytes: int = 0,
    prepare: Callable[[nbep.SharedMemory], None] | None = None,
    timeout_ms: float = 100_000,
    **spawn_options: Any,
) -> list[np.ndarray]:
    """Launch kernel(network, *args) on some ranks, and return the bytes of each rank's buffer when all are done."""
    options = nbep.NicOptions(**{"num_entries": NUM_ENTRIES, "chunk_bytes": CHUNK_BYTES, **(nic or {})})

    def main(comm):
        memory = nbep.SharedMemory.create(
            comm,
            NUM_BYTES,
            transport="ibgda",
            num_nvl_peers=num_nvl_peers,
            num_qps=num_qps,
            nic=options,
            timeout_ms=timeout_ms,
        )
        if prepare is not None:
            prepare(memory)
        comm.barrier()
        if ranks is None or comm.rank in ranks:
            memory.runtime.launch(memory.comm_stream, kernel, grid, block, smem_bytes, memory.network, *args)
        memory.wait()
        comm.barrier()
        found = memory.symmetric.read(0, NUM_BYTES, np.uint8)
        memory.close()
        return found

    return spawn(main, num_ranks, **spawn_options)


class Stores:
    """A tracer: the cells that kernels have stored to with an order, and the functions in which they have parked."""

    def __init__(self) -> None:
        self.stores: list[tuple[int, str]] = []  # rank, cell
        self.waits: set[str] = set()

    def on_store(self, thread, allocation, offset, kind, value, order, scope):
        if order != "weak":
            self.stores.append((thread.rank, allocation.cell(offset)))

    def on_park(self, thread, cells):
        self.waits |= {frame.name for frame in traceback.extract_stack(limit=12)}

    def of(self, name: str, rank: int) -> list[str]:
        """The cells whose names begin so, as often as a rank's kernels have stored to them."""
        return [cell for who, cell in self.stores if who == rank and f": {name}" in cell]
