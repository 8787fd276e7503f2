"""The transports for peers whose memory is mapped, on a GPU or on the host: a table says where."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbep.device.protocols.peers import Bounds
from nbep.device.versions import HostNetwork, Network
from nbep.host.target.base import Runtime
from nbep.host.target.memory import Memory, Reach, SymmetricMemory, WantedMemory
from nbep.host.transport.base import NetworkOptions, Transport


class DirectTransport(Transport):
    """See above. Peers that are not in the node, as the options have it, are not reached."""

    network_type: type = Network

    def __init__(self, runtime: Runtime, rank: int, options: NetworkOptions):
        self._runtime = runtime
        self._rank = rank
        self._options = options

    def allocate(self, comm: Any, wanted: WantedMemory) -> SymmetricMemory:
        reach = Reach(comm.size if self._options.transport == "direct" else self._options.num_nvl_peers, by_nics=False)
        self._symmetric = self._runtime.allocate_symmetric(comm, wanted, reach)
        return self._symmetric

    @property
    def handle(self) -> Any:
        return self._symmetric.handle

    def open(self, handles: list[Any], table_offset: int, bounds: Bounds) -> Any:
        wanted = [handle if self._options.is_in_node(self._rank, peer) else None for peer, handle in enumerate(handles)]
        addresses = self._symmetric.open_peers(wanted, self._rank)
        self._symmetric.write(table_offset, np.array(addresses, np.int64))
        return Network(self._symmetric.address + table_offset, self._rank, len(handles), addresses[self._rank])

    def show(self, network: Any, table_offset: int, addresses: np.ndarray) -> Any:
        self._symmetric.write(table_offset, addresses)
        return network._replace(own_buffer=int(addresses[self._rank]))

    def close(self) -> None:
        self._symmetric.close_peers()

    def unread_by_nic(self) -> int | None:
        """None: kernels read what they send."""
        return None


class HostTransport(DirectTransport):
    """The same for memory of the host. The kernels' table lies on the device: they look up each message's place."""

    network_type: type = HostNetwork
    _table: Memory | None = None

    def allocate(self, comm: Any, wanted: WantedMemory) -> SymmetricMemory:
        self._table = self._runtime.allocate(8 * comm.size, f"pointer table of {wanted.name}")
        return super().allocate(comm, wanted)

    def open(self, handles: list[Any], table_offset: int, bounds: Bounds) -> Any:
        mapped = super().open(handles, table_offset, bounds)
        assert self._table is not None
        self._table.write(0, self._symmetric.read(table_offset, len(handles), np.int64))
        return HostNetwork(self._table.address, self._rank, len(handles), mapped.own_buffer)

    def show(self, network: Any, table_offset: int, addresses: np.ndarray) -> Any:
        assert self._table is not None
        self._table.write(0, addresses)
        return super().show(network, table_offset, addresses)

    def end(self) -> None:
        if self._table is not None:
            self._table.free()
