"""Buffer.get_local_buffer_tensor: this rank's symmetric memory as an array."""

from __future__ import annotations

import math
from typing import Any

from nbep.host import validate
from nbep.host.arguments import flags, integer, refuse
from nbep.host.node import Node
from nbep.host.target.base import Array


def local_buffer_tensor(memory: Node, dtype: Any, size: Any, offset: Any, use_rdma_buffer: Any) -> Array:
    """See Buffer.get_local_buffer_tensor."""
    symmetric, num_bytes = memory.symmetric, memory.num_nvl_bytes
    flags(use_rdma_buffer=use_rdma_buffer)
    if use_rdma_buffer:
        if memory.rdma is None:
            refuse("use_rdma_buffer", True, "False: num_rdma_bytes was 0 at construction")
        symmetric, num_bytes = memory.rdma.symmetric, memory.rdma.num_rdma_bytes
    offset = integer("offset", offset, 0)
    dtype = validate.dtype(memory.runtime, "dtype", dtype)
    itemsize = symmetric.array(dtype, 0, 0).dtype.itemsize
    num_elements = num_bytes // itemsize
    if offset > num_elements:
        refuse("offset", offset, f"at most {num_elements}, the elements of the buffer")
    shape = (num_elements - offset,) if size is None else validate.shape("size", size)
    count = math.prod(shape)
    if count > num_elements - offset:
        refuse("size", f"{shape} at offset {offset}", f"at most {num_elements - offset} elements")
    return symmetric.array(dtype, offset * itemsize, count).reshape(shape)
