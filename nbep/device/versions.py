"""What the functions that are written `by_network` have versions for. Importing this registers all of them.

The host, the compiler and tests import this; a kernel imports only the seam, `network.seam` or `protocols.barriers`.
`network.nvshmem` is not among them: it needs an extra package, and the host imports it where it is wanted.
"""

from nbep.device.network.host import HostNetwork
from nbep.device.network.ibgda.transport import IbgdaNetwork
from nbep.device.network.seam import Network
from nbep.device.protocols import barrier, host_barrier
from nbep.device.protocols.peers import HostPeers, Peers

__all__ = ["NETWORKS", "HostNetwork", "HostPeers", "IbgdaNetwork", "Network", "Peers", "barrier", "host_barrier"]

NETWORKS = (Network, IbgdaNetwork)  # that nbep compile compiles for unasked
