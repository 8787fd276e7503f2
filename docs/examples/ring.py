"""Rank 0 sends rows of 32 numbers to rank 1 through a ring of four slots.

 rank 0: x[i] --sender--> NVLink --> slots[i % 4] --receiver--> out[i] : rank 1

 cell    lives in  written by  with             read by   with
 tail    rank 1    sender      st_release_sys   receiver  ld_acquire_sys: the slots below it are filled
 head    rank 0    receiver    st_release_sys   sender    ld_acquire_sys: the slots below it have been read
 slots   rank 1    sender      st_weak          receiver  ld_weak, after tail

python docs/examples/ring.py             two ranks on the emulator
python docs/examples/ring.py cuda        two ranks that share a GPU; takes torch
"""

import sys

import numpy as np

import nbep
from nbep.lang import (
    FULL_MASK,
    I32,
    Bounds,
    In,
    Out,
    Peers,
    buffer_of,
    device_function,
    kernel,
    ld_nc_s32,
    ld_weak_s32,
    own_site,
    st_release_sys_s32,
    st_weak_s32,
    syncwarp,
    thread_idx,
    vote_all,
    wait_at_least,
)

NUM_SLOTS, LANES = 4, 32
ROW_BYTES = 4 * LANES
TAIL, HEAD, SLOTS = 0, 64, 128  # byte offsets in a rank's symmetric memory
NUM_BYTES = SLOTS + NUM_SLOTS * ROW_BYTES

RING_TAIL = own_site("ring receiver", "tail", "the next row")
RING_HEAD = own_site("ring sender", "head", "a free slot")


@device_function
def has_come(counter, wanted, bounds, site, peer):
    """Wait until a counter has come to `wanted`. Returns whether it did in time, which is the same for all lanes."""
    seen = wait_at_least(counter, wanted, bounds, site, peer)
    return vote_all(FULL_MASK, seen >= wanted)


@device_function
def slot_of(peers, i):
    """Where row i of the ring lies, as this rank sees it."""
    return buffer_of(peers, 1) + SLOTS + ROW_BYTES * (i % NUM_SLOTS)


@device_function
def send_row(x, peers, bounds, i):
    # Row i takes the slot of row i - 4, which must have been read; for the first four rows that is true at once.
    if not has_come(buffer_of(peers, 0) + HEAD, i + 1 - NUM_SLOTS, bounds, RING_HEAD, 1):
        return False
    lane = thread_idx()
    st_weak_s32(slot_of(peers, i) + 4 * lane, ld_nc_s32(x + ROW_BYTES * i + 4 * lane))
    syncwarp(FULL_MASK)  # lane 0 speaks for all lanes
    if lane == 0:
        st_release_sys_s32(buffer_of(peers, 1) + TAIL, i + 1)
    return True


@device_function
def receive_row(out, peers, bounds, i):
    if not has_come(buffer_of(peers, 1) + TAIL, i + 1, bounds, RING_TAIL, 0):
        return False
    lane = thread_idx()
    st_weak_s32(out + ROW_BYTES * i + 4 * lane, ld_weak_s32(slot_of(peers, i) + 4 * lane))
    syncwarp(FULL_MASK)
    if lane == 0:
        st_release_sys_s32(buffer_of(peers, 0) + HEAD, i + 1)
    return True


@kernel(max_threads=LANES)
def ring(out: Out, x: In, peers: Peers, bounds: Bounds, num_rows: I32):
    for i in range(num_rows):
        in_time = send_row(x, peers, bounds, i) if peers.rank == 0 else receive_row(out, peers, bounds, i)
        if not in_time:
            return


def to_target(memory, values):
    """The emulator takes NumPy's arrays. A GPU takes those of torch, CuPy or Numba."""
    if memory.runtime.target == "emulator":
        return values
    import torch

    return torch.from_numpy(values).cuda()


def main(comm, num_rows=10):
    cells = {"tail": TAIL, "head": HEAD, "slots": SLOTS}
    memory = nbep.SharedMemory.create(comm, NUM_BYTES, timeout_ms=5000, cells=cells)
    x = to_target(memory, np.arange(LANES * num_rows, dtype=np.int32).reshape(num_rows, LANES))
    out = to_target(memory, np.full((num_rows, LANES), -1, np.int32))
    comm.barrier()  # allocate before any launch: a GPU may block allocations while kernels wait

    memory.comm_stream.wait_current_stream()  # x and out are written there
    memory.runtime.launch(memory.comm_stream, ring, 1, LANES, 0, out, x, memory.peers, memory.bounds, num_rows)
    memory.wait()
    received = out.tolist()
    memory.close()
    return received


def check(results, num_rows=10):
    """For `nbep check`: the rows have come as they were sent."""
    assert results[1] == np.arange(LANES * num_rows).reshape(num_rows, LANES).tolist()


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "emulator"
    _, received = nbep.spawn(main, num_ranks=2, target=target)
    print("the first numbers of the rows that rank 1 received:", [row[0] for row in received])
