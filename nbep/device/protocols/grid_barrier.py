"""The barrier between the blocks of one launch. All of them must be resident at once.

 block 0 of n:  arrivals += 2**31 - (n - 1)     the others:  arrivals += 1
 all:           wait until the top bit of arrivals is another one than before their own addition

 cell       written by         with                    read by            with
 arrivals   thread 0 of each   atom_add_release_gpu    thread 0 of each   ld_acquire_gpu

Arriving acquires nothing: every block polls afterwards, also the last one, whose own addition comes behind all others.

All additions of a barrier are 2**31 together, and any part of them leaves the top bit as it is. So arrivals holds 0 or
-2**31 between barriers: it needs no reset between barriers or launches, of other grids too, and nothing grows.

Source: DeepEP csrc/kernels/internode_ll.cu, cg::this_grid().sync(); cooperative_groups/details/sync.h of CUDA
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.waits import report_fault, site, wait_until

GRID_BARRIER = site(9, "grid barrier", "arrivals", "the other blocks of its own launch")
TOP = 1 << 31


@device_function
def has_turned(seen, was_set):
    """Whether the top bit of a value is another one than before."""
    return (seen < 0) != was_set


@device_function
def num_arrived(seen, num_blocks):
    """How many blocks have arrived at a barrier that is not complete."""
    others = seen & (TOP - 1)
    return others if others < num_blocks else others + num_blocks - TOP


@device_function
def wait_arrivals(arrivals, was_set, bounds):
    """Wait until all blocks of this rank's launch have arrived at a grid barrier.

    was_set: whether the top bit was, before this block's own addition
    """
    load = ptx.ld_acquire_gpu_s32  # PAIR grid-barrier
    seen, came = wait_until(load, arrivals, has_turned, was_set, bounds, ptx.wait_expired)
    if not came:
        report_fault(bounds, GRID_BARRIER, -1, -1, ptx.grid_dim(), num_arrived(seen, ptx.grid_dim()))


@device_function
def barrier_grid(arrivals, bounds):
    """Wait for all blocks of the launch; what their threads wrote before is visible to this block's threads after.

    All threads of all blocks call it. arrivals is an s32 cell of this rank that starts at 0.
    """
    # After the block's barrier thread 0 speaks for all threads: its release covers what they wrote.
    ptx.syncthreads()
    if ptx.thread_idx() == 0:
        step = 1 if ptx.block_idx() > 0 else ptx.s32(TOP - (ptx.grid_dim() - 1))
        was_set = ptx.atom_add_release_gpu_s32(arrivals, step) < 0  # PAIR grid-barrier
        wait_arrivals(arrivals, was_set, bounds)
    ptx.syncthreads()
