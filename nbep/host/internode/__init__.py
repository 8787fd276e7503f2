"""The normal mode between nodes: dispatch and combine over RDMA and NVLink."""
