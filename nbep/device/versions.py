"""What the functions that are written `by_type` have versions for. Importing this registers all of them.

The host, the compiler and tests import this; kernels import only the seams, `network.seam` and `protocols.barriers`.
The versions of low-latency kernels go by the types of their shape (deduplicate) and of their call (compared or not).
`network.nvshmem` is not among them: it needs an extra package, and the host imports it where it is wanted.
"""

from nbep.device.kernels.low_latency import calls, deduplicated_combine, deduplicated_dispatch
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
    "calls",
    "deduplicated_combine",
    "deduplicated_dispatch",
    "host_barrier",
]

NETWORKS = (Network, IbgdaNetwork)  # that nbep compile compiles for unasked
