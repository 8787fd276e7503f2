"""The transport over queue pairs of a real NIC: NVSHMEM has made them, and the kernels of `ibgda` write into them.

Buffer(..., transport="ibgda", nic="nvshmem"). What it takes, and that no machine here has it, is said in
`nvshmem_state`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbep.device.layout.intranode import ALIGNMENT_BYTES, align_up
from nbep.device.network.ibgda.queue_pair import DEFAULT_BATCH
from nbep.device.network.ibgda.transport import IbgdaNetwork
from nbep.device.protocols.peers import Bounds
from nbep.host.network.nvshmem import NvshmemTransport
from nbep.host.network.nvshmem_state import read_queue_pairs
from nbep.host.runtime.base import Memory


class IbgdaNicTransport(NvshmemTransport):
    """See above. The memory is NVSHMEM's; peers that it maps are reached through the mapping, if they may be."""

    network_type = IbgdaNetwork

    def open(self, handles: list[Any], table_offset: int, bounds: Bounds) -> IbgdaNetwork:
        """Raises: RuntimeError that names what is missing: IBGDA, a NIC, queue pairs"""
        mapped = super().open(handles, table_offset, bounds)
        memory = self._memory
        pairs = read_queue_pairs(memory.address, memory.num_bytes, self._runtime.device.compute_capability)
        tables = (pairs.queue_pairs, pairs.remote_bases, pairs.local_keys, pairs.remote_keys)
        offsets = np.cumsum([0] + [align_up(table.nbytes, ALIGNMENT_BYTES) for table in tables])
        self._tables: Memory = self._runtime.allocate(int(offsets[-1]), "queue pairs")
        for table, offset in zip(tables, offsets, strict=False):
            self._tables.write(int(offset), table.reshape(-1))
        queue_pairs, remote_bases, local_keys, remote_keys = (self._tables.address + int(at) for at in offsets[:-1])
        return IbgdaNetwork(
            buffer_ptrs=mapped.buffer_ptrs,
            rank=mapped.rank,
            num_ranks=mapped.num_ranks,
            own_buffer=mapped.own_buffer,
            num_qps=pairs.queue_pairs.shape[1],
            log2_batch=DEFAULT_BATCH.bit_length() - 1,
            queue_pairs=queue_pairs,
            remote_bases=remote_bases,
            local_keys=local_keys,
            remote_keys=remote_keys,
            num_chunks=len(pairs.local_keys),
            log2_chunk=pairs.log2_chunk,
            heap_offset=pairs.heap_offset,
            timeout_ns=bounds.timeout_ns,
            claim=bounds.claim,
            report=bounds.report,
        )

    def close(self) -> None:
        if hasattr(self, "_tables"):
            self._tables.free()
            del self._tables
