"""The network: what a kernel sees of it (`seam`), and what stands behind it, the transports.

direct   the peer's memory is mapped: plain copies and atomics
host     the peer's memory is mapped, and lies on the host: plain copies, loads and stores
ibgda    the GPU writes the entries of an mlx5 send queue itself; a NIC serves them, or `nic`, a kernel
nvshmem  NVSHMEM's device calls

A kernel imports the seam alone. A transport registers its versions when it is imported: see `nbep.device.by_type`.
"""

from nbep.device.jit import LIBRARIES
from nbep.device.network import seam

FUNCTIONS = ("keep_message", "put_nbi_warp", "quiet", "amo_add", "sends_from_buffer", "is_message")


def provide(network, module):
    """Take the versions of a transport's module for its type of network, and what they are linked with, if anything."""
    for name in FUNCTIONS:
        getattr(seam, name).versions[network] = getattr(module, name)
    if hasattr(module, "libraries"):
        LIBRARIES[network] = module.libraries
