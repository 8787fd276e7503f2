"""Kernels that move tokens between the ranks of one node over NVLink."""
