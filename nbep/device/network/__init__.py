"""The network as a kernel sees it: four functions, and nothing else reaches another rank's memory.

 put_nbi_warp   one warp starts to put a message that it has in shared memory into a peer's buffer
 quiet          what this warp has put is ordered before what anybody adds later who has synchronised with it
 amo_add        one thread adds to a cell of a peer, behind what is quiet or for itself
 peer_ptr       where this rank sees a place of a peer's buffer; 0 if it cannot

A place in the buffer is its offset, the same on all ranks. A `queue` orders what goes to one peer: a message that was
put on a queue is there before what is added on the same queue afterwards; queues are not ordered with each other.

What stands behind them is a transport. `direct`: the peer's memory is mapped, and copies and atomics go there.

Source: DeepEP csrc/kernels/ibgda_device.cuh (nvshmemi_ibgda_put_nbi_warp, nvshmemi_ibgda_amo_nonfetch_add,
nvshmemi_ibgda_quiet, nvshmemi_get_p2p_ptr)
"""

from nbep.device.network.direct import Network, amo_add, own_ptr, peer_ptr, put_nbi_warp, quiet

__all__ = ["Network", "amo_add", "own_ptr", "peer_ptr", "put_nbi_warp", "quiet"]
