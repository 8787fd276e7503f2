"""How the ranks of a node meet, for either kind of memory: the type of `peers` says which."""

from nbep.device.jit import by_type
from nbep.device.protocols.barrier import barrier_block as barrier_by_adding
from nbep.device.protocols.barrier import meet_by_adding
from nbep.device.protocols.host_barrier import host_barrier_block, meet_by_storing
from nbep.device.protocols.peers import HostPeers, Peers


@by_type()
def barrier_block(peers, bounds):
    """Wait for one block of every rank; what their threads wrote before is visible to this block's threads after.

    All threads of the block call it; the block has at least num_ranks threads.
    """


@by_type()
def meet_peer(peers, bounds, signal, may_meet):
    """Thread `peer` signals that peer and waits for it, if it may. A syncthreads must follow: then it is a barrier.

    Returns: what signal[own][peer] says, see `protocols.calls`; 0 too for threads without a peer, and if it never came
    """


barrier_block.versions.update({Peers: barrier_by_adding, HostPeers: host_barrier_block})
meet_peer.versions.update({Peers: meet_by_adding, HostPeers: meet_by_storing})
