"""The barrier between the blocks of one launch. All of them must be resident at once.

 block b: arrivals += 1, then wait until arrivals is the next multiple of the number of blocks

 cell       written by         with                    read by            with
 arrivals   thread 0 of each   atom_add_release_gpu    thread 0 of each   ld_acquire_gpu

Arriving acquires nothing: every block polls afterwards, also the last one, whose own addition comes behind all others.

arrivals needs no reset between barriers or launches of the same grid: it only counts up, and wraps after 2**31.

Source: DeepEP csrc/kernels/internode_ll.cu, cg::this_grid().sync()
"""

import nbep.device.primitives as ptx
from nbep.device.jit import device_function
from nbep.device.protocols.waits import Waiter, is_at_least, site, wait_or_report

GRID_BARRIER = site(9, "grid barrier", "arrivals", "the other blocks of its own launch")


@device_function
def wait_arrivals(arrivals, wanted, bounds):
    """Wait until as many blocks of this rank's launch have arrived at a grid barrier."""
    waiter = Waiter(GRID_BARRIER, -1, -1)
    wait_or_report(ptx.ld_acquire_gpu_s32, arrivals, is_at_least, wanted, bounds, waiter)  # PAIR grid-barrier


@device_function
def barrier_grid(arrivals, bounds):
    """Wait for all blocks of the launch; what their threads wrote before is visible to this block's threads after.

    All threads of all blocks call it. arrivals is an s32 cell of this rank that starts at 0.
    """
    # After the block's barrier thread 0 speaks for all threads: its release covers what they wrote.
    ptx.syncthreads()
    if ptx.thread_idx() == 0:
        arrived = ptx.atom_add_release_gpu_s32(arrivals, 1)  # PAIR grid-barrier
        wait_arrivals(arrivals, arrived + ptx.grid_dim() - ptx.u32_mod(arrived, ptx.grid_dim()), bounds)
    ptx.syncthreads()
