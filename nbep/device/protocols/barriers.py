"""How the ranks of a node meet. The type of `peers` says which kind of memory, and so which version:

 Peers      barrier.py       each rank's memory is on its own GPU: both add to a cell
 HostPeers  host_barrier.py  buffers in the host's memory: a cell has one writer

Kernels import this module alone. A version registers itself when it is imported: see `nbep.device.by_type`.
"""

from nbep.device.jit import by_type
from nbep.device.protocols.waits import site

BARRIER = site(1, "notify", "barrier_signal", "the peer's arrival at the barrier", of_node=True)


@by_type()
def barrier_block(peers, bounds):
    """Wait for one block of every rank; what their threads wrote before is visible to this block's threads after.

    All threads of the block call it; the block has at least num_ranks threads.
    """


@by_type()
def meet_peer(peers, bounds, signal, may_meet):
    """Thread `peer` signals that peer and waits for it, if it may. A syncthreads must follow: then it is a barrier.

    Returns: what signal[own][peer] says (its digest may differ); 0 too for threads without a peer, and if it never came
    """
