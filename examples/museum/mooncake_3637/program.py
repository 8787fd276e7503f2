"""A worker takes entries from its queue, and puts those back there that have to be tried again.

 cell     written by              read by
 tail     producer, worker        worker: so many entries were put in
 head     worker                  producer, worker: so many entries were taken out
 lock     producer, worker        producer, worker: who may put in the next one

nbep check examples/museum/mooncake_3637/program.py
"""

import nbep
from nbep.lang import (
    Peers,
    atom_cas_acq_rel_sys_s32,
    buffer_of,
    device_function,
    kernel,
    ld_acquire_sys_s32,
    st_release_sys_s32,
    wait_expired,
)

NUM_RANKS = 1
NUM_SLOTS, NUM_ENTRIES = 2, 5  # and each entry fails once
TAIL, HEAD, LOCK = 0, 16, 32
NEVER = 1 << 62


@device_function
def try_push(queue):
    """Put an entry in. Returns whether there was a free slot."""
    while atom_cas_acq_rel_sys_s32(queue + LOCK, 0, 1) == 1:
        wait_expired(NEVER)
    tail = ld_acquire_sys_s32(queue + TAIL)
    has_slot = tail - ld_acquire_sys_s32(queue + HEAD) < NUM_SLOTS
    if has_slot:
        st_release_sys_s32(queue + TAIL, tail + 1)
    st_release_sys_s32(queue + LOCK, 0)
    return has_slot


@device_function
def push(queue):
    """Put an entry in, however long it takes."""
    while not try_push(queue):
        while ld_acquire_sys_s32(queue + TAIL) - ld_acquire_sys_s32(queue + HEAD) == NUM_SLOTS:
            wait_expired(NEVER)


@kernel(max_threads=1)
def submit(peers: Peers):
    for _ in range(NUM_ENTRIES):
        push(buffer_of(peers, peers.rank))


@kernel(max_threads=1)
def work(peers: Peers):
    """Take entries out. Each fails the first time."""
    queue = buffer_of(peers, peers.rank)
    failed = 0
    for head in range(2 * NUM_ENTRIES):
        while ld_acquire_sys_s32(queue + TAIL) == head:
            wait_expired(NEVER)
        st_release_sys_s32(queue + HEAD, head + 1)
        if failed < NUM_ENTRIES:
            failed += 1
            push(queue)


def main(comm):
    cells = {"tail": TAIL, "head": HEAD, "lock": LOCK}
    memory = nbep.SharedMemory.create(comm, 128, timeout_ms=5000, cells=cells)
    worker = memory.runtime.create_stream("worker")
    memory.runtime.launch(worker, work, 1, 1, 0, memory.peers)
    memory.runtime.launch(memory.comm_stream, submit, 1, 1, 0, memory.peers)
    worker.synchronize()
    memory.close()
