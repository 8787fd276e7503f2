"""The network: what a kernel sees of it (`seam`), and what stands behind it.

direct   the peer's memory is mapped: plain copies and atomics
host     the peer's memory is mapped, and lies on the host: plain copies, loads and stores
ibgda    the GPU writes the entries of an mlx5 send queue itself; a NIC serves them, or `nic`, a kernel
nvshmem  NVSHMEM's device calls
"""

from nbep.device.network import direct, host, seam
from nbep.device.network.direct import Network
from nbep.device.network.host import HostNetwork
from nbep.device.network.ibgda import transport as ibgda_transport
from nbep.device.network.ibgda.transport import IbgdaNetwork
from nbep.device.network.seam import (
    amo_add,
    is_message,
    keep_message,
    own_ptr,
    peer_ptr,
    put_nbi_warp,
    quiet,
    sends_from_buffer,
)

seam.provide(Network, direct)
seam.provide(HostNetwork, host)
seam.provide(IbgdaNetwork, ibgda_transport)
NETWORKS = (Network, IbgdaNetwork)  # which need no extra package

__all__ = [
    "NETWORKS",
    "HostNetwork",
    "IbgdaNetwork",
    "Network",
    "amo_add",
    "is_message",
    "keep_message",
    "own_ptr",
    "peer_ptr",
    "put_nbi_warp",
    "quiet",
    "sends_from_buffer",
]
