"""The network: what a kernel sees of it (`seam`), and what stands behind it, the transports.

direct   the peer's memory is mapped: plain copies and atomics
host     the peer's memory is mapped, and lies on the host: plain copies, loads and stores
ibgda    the GPU writes the entries of an mlx5 send queue itself; a NIC serves them, or `nic`, a kernel
nvshmem  NVSHMEM's device calls

A kernel imports the seam alone. A transport registers its versions when it is imported: see `nbep.device.versions`.
"""
