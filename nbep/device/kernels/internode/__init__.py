"""Kernels of the normal mode between nodes: RDMA between ranks with the same local rank, NVLink inside a node."""
