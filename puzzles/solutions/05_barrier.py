"""Puzzle 5, solved: meet, thread r tells rank r, thread 0 waits for all, meet again."""

from nbep.lang import atom_add_release_sys_s32, buffer_of, device_function, syncthreads, thread_idx, wait_at_least

ARRIVED = 0


@device_function
def barrier(peers, bounds):
    syncthreads()
    if thread_idx() < peers.num_ranks:
        atom_add_release_sys_s32(buffer_of(peers, thread_idx()) + ARRIVED, 1)
    if thread_idx() == 0:
        wait_at_least(buffer_of(peers, peers.rank) + ARRIVED, peers.num_ranks, bounds)
    syncthreads()


HINTS = (
    "Three steps: this block meets, tells each rank, waits for all ranks. And then?",
    ("Each rank adds 1 to the cell `arrived` of every rank, its own among them, and waits until its own is num_ranks."),
    ("The block meets at syncthreads() at the beginning and at the end; the atomic is a release with scope sys."),
)
