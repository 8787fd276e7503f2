"""One rank's RDMA buffer: what the network reaches. The low-latency mode and the mode between nodes share it.

num_rdma_bytes | cells and pointer table of the low-latency mode | cells of the mode between nodes

allocate -> `handle` to all ranks -> open -> launches -> close_peers -> free

Source: DeepEP csrc/deep_ep.cpp, Buffer::sync (rdma_buffer_ptr)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from nbep.device.jit import over
from nbep.device.layout.internode import cells_bytes
from nbep.device.layout.intranode import RingShape
from nbep.device.layout.low_latency import NUM_HALVES, LowLatencyShape, credit_offset, pointer_table, trailer_bytes
from nbep.device.layout.names import describe_low_latency_offset
from nbep.device.layout.names import describe_rdma_offset as describe_internode
from nbep.device.protocols.peers import Bounds
from nbep.host.target.base import Kernel, Runtime
from nbep.host.target.memory import HandleType, WantedMemory
from nbep.host.transport.base import Transport


def rdma_trailer_bytes(num_ranks: int, num_nodes: int) -> int:
    """What comes behind num_rdma_bytes."""
    return trailer_bytes(num_ranks) + (cells_bytes(num_nodes, num_ranks) if num_nodes > 1 else 0)


class RdmaMemory:
    """See above.

    Attributes: symmetric: the memory; cells: offset of those of the mode between nodes
                network: the kernels' argument, once it is open
                shape: LowLatencyShape or, after a call between nodes, RingShape of the latest launch
                names: of the cells, if a mode has the bytes for itself
    """

    network: Any  # of the transport's type
    names: Callable[[int], str] | None = None

    def __init__(
        self,
        runtime: Runtime,
        comm: Any,
        num_rdma_bytes: int,
        num_ranks: int,
        num_nodes: int,
        handle_type: HandleType,
        transport: Transport,
        zero: bool = False,
    ) -> None:
        self.runtime = runtime
        self.num_rdma_bytes = num_rdma_bytes
        self.num_ranks = num_ranks
        self.num_nodes = num_nodes
        self.transport = transport
        self.cells = num_rdma_bytes + trailer_bytes(num_ranks)
        self.shape: LowLatencyShape | RingShape | None = None
        num_bytes = num_rdma_bytes + rdma_trailer_bytes(num_ranks, num_nodes)
        self.symmetric = transport.allocate(
            comm, WantedMemory(num_bytes, "rdma_buffer", self._describe, handle_type, zero)
        )
        cells = np.zeros((num_bytes - num_rdma_bytes) // 4, np.int32)
        for half in range(NUM_HALVES):  # every half is free
            first = credit_offset(0, num_ranks, half, 0) // 4
            cells[first : first + num_ranks] = 1
        with ExitStack() as undo:
            undo.callback(self.symmetric.free)
            self.symmetric.write(num_rdma_bytes, cells)
            undo.pop_all()

    @property
    def handle(self) -> Any:
        return self.symmetric.handle, self.transport.handle

    def open(self, handles: Sequence[Any], bounds: Bounds, kernels: Sequence[Kernel]) -> list[Any]:
        """Reach the peers' buffers; their memories. Raises: RuntimeError if one cannot be reached"""
        for kernel in kernels:  # before one of them waits for other ranks: see Runtime.load
            self.runtime.load(self.kernel(kernel))
        memories, ends = zip(*handles, strict=True)
        self.network = self.transport.open(list(ends), self.num_rdma_bytes + pointer_table(self.num_ranks), bounds)
        return list(memories)

    def kernel(self, kernel: Kernel) -> Kernel:
        """The kernel for this network."""
        return over(kernel, self.transport.network_type)

    def pointers(self) -> np.ndarray:
        """Where this rank sees the buffer of each; 0 where it does not."""
        return self.symmetric.read(self.num_rdma_bytes + pointer_table(self.num_ranks), self.num_ranks, np.int64)

    def _describe(self, offset: int) -> str:
        if self.names is not None and offset < self.num_rdma_bytes:
            return self.names(offset)
        if offset >= self.cells or isinstance(self.shape, RingShape):
            return describe_internode(self.shape, self.num_nodes, self.cells, offset)
        return describe_low_latency_offset(self.num_ranks, self.num_rdma_bytes, offset)
