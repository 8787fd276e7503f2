"""The transport for ranks of one host: peers' memory is mapped, and a table says where."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbep.device.network import Network
from nbep.host.runtime.base import SymmetricMemory


def open_network(symmetric: SymmetricMemory, handles: list[Any], rank: int, table_offset: int) -> Network:
    """Map the buffers of all ranks and write their addresses into this rank's table, which is part of its buffer.

    Args:   handles of all ranks' memory; table_offset bytes from the buffer's start
    Raises: RuntimeError if a peer cannot be reached
    """
    addresses = symmetric.open_peers(handles, rank)
    symmetric.write(table_offset, np.array(addresses, np.int64))
    return Network(symmetric.address + table_offset, rank, len(handles))
