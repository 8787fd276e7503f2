"""Cached notify dispatch: put a known prefix matrix back and reset the rings. The counts are not exchanged again.

 cell                    written by       with               read by        with
 rank_prefix_matrix      the owner        st_weak, barrier   (dispatch)     -
 start, end, head, tail  the owner        st_weak 0, barrier (dispatch)     -

Source: DeepEP csrc/kernels/intranode.cu, cached_notify_dispatch
"""

from nbep.device.jit import kernel
from nbep.device.kernels.intranode.notify_dispatch import reset_ring_cells
from nbep.device.primitives import block_dim, ld_nc_s32, st_weak_s32, thread_idx
from nbep.device.protocols.barrier import barrier_block
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.types import I32, In


@kernel(max_threads=128)
def cached_notify_dispatch(rank_prefix_matrix: In, num_ring_cell_words: I32, peers: Peers, bounds: Bounds):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32 that is at least num_ranks."""
    buffer = buffer_of(peers, peers.rank)
    barrier_block(peers, bounds)
    for i in range(thread_idx(), peers.num_ranks * peers.num_ranks, block_dim()):
        st_weak_s32(buffer + 4 * i, ld_nc_s32(rank_prefix_matrix + 4 * i))
    reset_ring_cells(buffer, num_ring_cell_words)
    barrier_block(peers, bounds)
