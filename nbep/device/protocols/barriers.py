"""The barrier between the ranks of a node, for either kind of memory: the type of `peers` says which."""

from nbep.device.jit import by_network
from nbep.device.protocols.barrier import barrier_block as barrier_by_adding
from nbep.device.protocols.host_barrier import host_barrier_block
from nbep.device.protocols.peers import HostPeers, Peers


@by_network
def barrier_block(peers, bounds):
    """Wait for one block of every rank; what their threads wrote before is visible to this block's threads after.

    All threads of the block call it; the block has at least num_ranks threads.
    """


barrier_block.versions[Peers] = barrier_by_adding
barrier_block.versions[HostPeers] = host_barrier_block
