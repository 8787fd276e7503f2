"""Kernels of the normal mode between nodes: RDMA between ranks of one place, NVLink inside a node."""
