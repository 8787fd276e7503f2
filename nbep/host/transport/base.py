"""What stands behind the network's functions, seen from the host: one transport for each buffer.

 direct    all peers' memory is mapped
 ibgda     peers of other nodes are reached through send queues that the GPU writes and a NIC serves
 nvshmem   NVSHMEM's heap and device calls

Life cycle: create (collective) -> allocate -> `handle` to all ranks -> open -> launches -> close -> end.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np

from nbep.device.by_type import HostNetwork, Network
from nbep.device.network.ibgda.queue_pair import DEFAULT_BATCH, MAX_ENTRIES, MIN_ENTRIES
from nbep.device.protocols.peers import MAX_NVL_PEERS, Bounds
from nbep.host.arguments import integer, named_by, refuse
from nbep.host.target.base import Runtime
from nbep.host.target.memory import Memory, Reach, SymmetricMemory, WantedMemory

TransportName = Literal["direct", "ibgda", "nvshmem"]


@dataclass(frozen=True)
class NicOptions:
    """How large the queues of the software NIC are, and what it does badly, so that a test or a reader can see it.

    Args:
        num_entries: of a send queue, a power of two from 64 to 16384
        batch: entries a doorbell, where they need not leave at once: a power of two from 1 to num_entries / 2
        chunk_bytes: buffers are registered in chunks of so many bytes, a power of two from 256 on, each with a key
        seed: of everything that the NIC does at random. With 0 the bytes of a write come in their order
        max_delay_ns: the NIC waits before each entry, 0 to so long; the emulator counts primitive calls
        from_record: whether the NIC loses all rings of the doorbell, and learns from the record how many entries
            there are; None: with a seed of 0 it loses none, with another one some
        first_entry: number of the first entry of each queue: counters wrap at 2**16 and 2**32
        lost: (rank, peer, queue, entry): the NIC of `rank` never serves this entry, counted from 0, the first on
            its queue pair, nor those behind it
        stopped: (rank, entry): the NIC of `rank` serves no queue pair past this entry
    """

    num_entries: int = 1024
    batch: int = DEFAULT_BATCH
    chunk_bytes: int = 1 << 26
    seed: int = 0
    max_delay_ns: int = 0
    from_record: bool | None = None
    first_entry: int = 0
    lost: tuple[int, int, int, int] | None = None
    stopped: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self._check_power("num_entries", MIN_ENTRIES, MAX_ENTRIES)
        self._check_power("batch", 1, self.num_entries // 2)
        self._check_power("chunk_bytes", 256, 1 << 40)
        integer("nic: seed", self.seed, 0)
        if integer("nic: max_delay_ns", self.max_delay_ns, 0) >= 1 << 31:
            refuse("nic: max_delay_ns", self.max_delay_ns, f"less than {1 << 31}")
        if self.from_record not in (None, False, True):
            refuse("nic: from_record", repr(self.from_record), "None, False or True")
        if integer("nic: first_entry", self.first_entry, 0) > 1 << 48:
            refuse("nic: first_entry", self.first_entry, "at most 2**48")
        for name, length in (("lost", 4), ("stopped", 2)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Sequence) or len(value) != length:
                refuse(f"nic: {name}", repr(value), f"{length} integers")
            for number in value:
                integer(f"nic: {name}", number, 0)

    def _check_power(self, name: str, lowest: int, highest: int) -> None:
        value = integer(f"nic: {name}", getattr(self, name), lowest)
        if value > highest or value & (value - 1):
            refuse(f"nic: {name}", value, f"a power of two from {lowest} to {highest}")

    @classmethod
    def parse(cls, text: str) -> NicOptions:
        """From "seed=3,max_delay_ns=500".

        Raises:
            ValueError: if it names no option, or an option has no integer
        """
        names = [field.name for field in fields(cls) if field.name not in ("lost", "stopped")]
        given: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in names or not value.isdecimal():
                refuse("NBEP_NIC", repr(text), f"name=integer pairs with commas between; names: {', '.join(names)}")
            given[name] = int(value)
        return cls(**given)


@dataclass(frozen=True)
class NetworkOptions:
    """Which transport a buffer has, and what its nodes are. The same on all ranks.

    num_nvl_peers: ranks of a node; num_qps: queue pairs for each peer; use_nvlink: peers of the node are mapped
    nic: the software NIC of "ibgda"
    """

    transport: TransportName
    num_nvl_peers: int
    num_qps: int
    use_nvlink: bool
    nic: NicOptions

    @classmethod
    def check(
        cls, transport: Any, num_nvl_peers: Any, num_qps: Any, use_nvlink: Any, nic: Any, num_ranks: int
    ) -> NetworkOptions:
        """Raises:
        ValueError: for a value that is wrong, or does not fit with the others
        """
        is_known = isinstance(transport, str) and transport in get_args(TransportName)
        if not is_known:
            refuse("transport", repr(transport), f"one of {', '.join(get_args(TransportName))}")
        size = integer("num_nvl_peers", num_nvl_peers, 1)
        if size > MAX_NVL_PEERS or num_ranks % size != 0:
            refuse("num_nvl_peers", size, f"1 to {MAX_NVL_PEERS}, and divide the {num_ranks} ranks of the group")
        if transport == "direct" and not use_nvlink:
            refuse("allow_nvlink_for_low_latency_mode", False, 'True with transport="direct", which maps all peers')
        if isinstance(nic, str) and nic == "nvshmem":
            allowed = 'NicOptions: NVSHMEM posts to its queue pairs itself. transport="nvshmem" reaches a real NIC'
            refuse("nic", "'nvshmem'", allowed)
        if not isinstance(nic, NicOptions):
            refuse("nic", repr(nic), "NicOptions")
        for name, ranks in (("lost", (nic.lost or ())[:2]), ("stopped", (nic.stopped or ())[:1])):
            if any(rank >= num_ranks for rank in ranks):
                refuse(f"nic: {name}", repr(getattr(nic, name)), f"of ranks below {num_ranks}")
        if isinstance(num_qps, float) and num_qps.is_integer():  # num_experts / num_ranks: DeepEP only prints it
            num_qps = int(num_qps)
        return cls(transport, size, integer("num_qps_per_rank", num_qps, 1), bool(use_nvlink), nic)

    def is_in_node(self, rank: int, peer: int) -> bool:
        """Whether a rank sees the memory of another one at all."""
        return self.transport == "direct" or rank // self.num_nvl_peers == peer // self.num_nvl_peers

    def is_mapped(self, rank: int, peer: int) -> bool:
        """Whether kernels that use the network reach a peer through its memory."""
        return rank == peer or (self.use_nvlink and self.is_in_node(rank, peer))


def chosen_options(
    num_ranks: int, transport: Any, num_nvl_peers: Any, num_qps: Any, use_nvlink: Any, nic: Any
) -> NetworkOptions:
    """The network of a buffer: as its arguments say, or else the environment, or else by default."""
    given = {"transport": transport, "num_nvl_peers": num_nvl_peers, "nic": nic}
    variables = {name: f"NBEP_{name.upper()}" for name, value in given.items() if value is None}
    with named_by(variables):
        if transport is None:
            transport = os.environ.get("NBEP_TRANSPORT", "direct")
        if num_nvl_peers is None:
            text = os.environ.get("NBEP_NUM_NVL_PEERS")
            most = max(size for size in range(1, MAX_NVL_PEERS + 1) if num_ranks % size == 0)
            num_nvl_peers = most if text is None else int(text) if text.isdecimal() else text
        if nic is None:
            nic = NicOptions.parse(os.environ.get("NBEP_NIC", ""))
        return NetworkOptions.check(transport, num_nvl_peers, num_qps, use_nvlink, nic, num_ranks)


class Transport(ABC):
    """One rank's end of the network of one buffer.

    Attributes: network_type: of the network that `open` returns; num_blocks_taken: SMs that it takes from the kernels
    """

    network_type: type
    num_blocks_taken = 0

    @abstractmethod
    def allocate(self, comm: Any, wanted: WantedMemory) -> SymmetricMemory:
        """The symmetric memory that the network reaches. Collective. See Runtime.allocate_symmetric."""

    @property
    @abstractmethod
    def handle(self) -> Any:
        """What the other ranks need to reach this one."""

    @abstractmethod
    def open(self, handles: list[Any], table_offset: int, bounds: Bounds) -> Any:
        """Reach the peers, and write the addresses of those that are mapped at an offset of the memory.

        Args:
            handles: of all ranks
            table_offset: where a table of num_ranks s64 has room
            bounds: of kernels' waits

        Returns:
            the network that kernels take

        Raises:
            RuntimeError: if a peer cannot be reached
        """

    def show(self, network: Any, table_offset: int, addresses: np.ndarray) -> Any:
        """Write other addresses of the same memories into that table. Returns the network with these."""
        return network

    @abstractmethod
    def close(self) -> None:
        """Undo open. This rank's kernels have ended, and so have those that wait for what it has sent."""

    def end(self) -> None:  # noqa: B027 - most have made nothing
        """Give back what creating it has made. Collective; it comes last, also if the construction fails."""

    def check_message(self, num_bytes: int) -> None:  # noqa: B027 - most take any
        """Raises:
        ValueError: if put_nbi_warp cannot put so many bytes at once
        """

    @abstractmethod
    def unread_by_nic(self) -> int | None:
        """A peer for whom a NIC has yet to read something from this rank's memory; None if there is none.

        The kernels that have sent it have ended. Memory is handed out by this answer, so each transport has its own.
        """

    def first_refused(self, peer: int, queue: int) -> tuple[int, int] | None:
        """The first entry of a queue that the NIC has refused, and the syndrome; None if that is not recorded."""
        return None

    def describe(self, peer: int) -> list[str]:
        """Lines for the report of a wait for a peer that timed out: what this rank knows of the network."""
        return []


# --- The transports for peers whose memory is mapped, on a GPU or on the host: a table says where


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
