"""What the functions that are written `by_type` have versions for. Importing this registers all of them.

The host, the compiler and tests import this; kernels import only the seams, `network.seam` and `protocols.barriers`.
`network.nvshmem` is not among them: it needs an extra package, and the host imports it where it is wanted. The versions
of low-latency kernels are those of `kernels.low_latency.by_type`.
"""

from nbep.device.network.host import HostNetwork
from nbep.device.network.ibgda.transport import IbgdaNetwork
from nbep.device.network.seam import Network
from nbep.device.protocols import barrier, host_barrier
from nbep.device.protocols.peers import HostPeers, Peers

__all__ = [
    "NETWORKS",
    "HostNetwork",
    "HostPeers",
    "IbgdaNetwork",
    "Network",
    "Peers",
    "barrier",
    "host_barrier",
]

NETWORKS = (Network, IbgdaNetwork)  # that nbep compile compiles for unasked
