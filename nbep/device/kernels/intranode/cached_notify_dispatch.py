"""Cached notify dispatch: reset the rings. Who sends how much is known; the counts are not exchanged again.

 ring cells = 0; barrier

 cell                    written by       with               read by        with
 start, end, head, tail  the owner        st_weak 0, barrier (dispatch)     -

The barrier keeps peers from filling rings that are not reset yet, and compares the ranks' calls: see parts.calls.
DeepEP has one more before the reset; why it is not needed: see notify_dispatch.py. Nor is the prefix matrix put back:
dispatch reads that of the handle.

Source: DeepEP csrc/kernels/intranode.cu, cached_notify_dispatch
"""

from nbep.device.jit import kernel
from nbep.device.kernels.intranode.notify_dispatch import reset_ring_cells
from nbep.device.kernels.parts.calls import Call, meet_block
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.types import I32


@kernel(max_threads=128)
def cached_notify_dispatch(num_ring_cell_words: I32, peers: Peers, bounds: Bounds, call: Call):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32 that is at least num_ranks."""
    reset_ring_cells(buffer_of(peers, peers.rank), num_ring_cell_words)
    meet_block(peers, bounds, call)
