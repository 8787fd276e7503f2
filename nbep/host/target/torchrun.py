"""The emulator with one process per rank, under torchrun.

 rank 0: memory <--mmap-- file descriptor --mailbox--> rank 1: mmap --> the same memory

Ranks of a node are on one host and map each other's memory. The memory has no name, and goes when the last process that
has it open does: whatever ends a process, nothing is left behind. NICs reach the memory of other nodes, also on other
hosts, over TCP.

 NIC of rank 0    put(offset, bytes) ----->  a thread of rank 1 for this connection    its memory
                  add(offset, size, n) --->                                            <- the sum, as one store
                  <--- what it was --------
                  flush ------------------>  all that came before has been stored
                  <--- done ---------------

A connection delivers in order. Adds of all connections exclude each other; a kernel's own atomics know nothing of them,
as with a card. Who connects shows the key that came with the address, through the process group.

When a connection breaks, what is under way never arrives: kernels' waits end at their deadlines and name the rank.

Source: memfd_create(2), mmap(2)
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any, Literal, NamedTuple

from nbep.emulator.process import ProcessWorld
from nbep.host.arguments import refuse
from nbep.host.ranks.comm import TorchComm
from nbep.host.target.cuda.mailbox import Mailbox, MailboxAddress
from nbep.host.target.job_memory import JobMemory, JobRuntime, spread_error
from nbep.host.target.memory import Reach, SymmetricMemory, WantedMemory


class MemoryHandle(NamedTuple):
    """What a rank tells its peers: where it wants file descriptors of theirs, and how much of it they map.

    network: where their NICs reach it; None if they do not
    """

    mailbox: MailboxAddress
    mapped_bytes: int
    network: SocketAddress | None = None


class SharedMemory(JobMemory):
    """Memory of this rank that the peers' processes map, and theirs as this process sees it."""

    def __init__(self, space: Any, comm: Any, wanted: WantedMemory, by_nics: bool = False):
        mapped_bytes = self.mapped_bytes(wanted.num_bytes, comm.size)
        self._file = os.memfd_create(f"nbep {wanted.name}", os.MFD_CLOEXEC)
        os.ftruncate(self._file, mapped_bytes)
        self._mailbox = Mailbox()
        super().__init__(space, comm, wanted, memoryview(mmap.mmap(self._file, mapped_bytes)))
        self._channels: list[SocketChannel] = []
        self._server = MemoryServer(self.allocation.memory, comm.size) if by_nics else None
        address = self._server.address if self._server else None
        self.handle = MemoryHandle(self._mailbox.address, mapped_bytes, address)

    def open_peers(self, handles: list[Any], rank: int) -> list[int]:
        """Raises: RuntimeError that names a peer of another host, or of another network namespace"""
        for peer, handle in enumerate(handles):
            if handle is not None and peer != rank:
                try:
                    self._mailbox.send(self._file, handle.mailbox, rank, peer)
                except OSError as error:
                    raise RuntimeError(f"cannot send a file descriptor to rank {peer}: {error}") from error
        addresses = super().open_peers(handles, rank)
        self._mailbox.close()
        return addresses

    def _open(self, handle: Any, peer: int) -> memoryview:
        file = self._mailbox.receive(peer)
        try:
            return memoryview(mmap.mmap(file, handle.mapped_bytes))
        finally:
            os.close(file)

    def channel(self, handle: Any, peer: int) -> SocketChannel | None:
        """Raises: RuntimeError that names a peer to which there is no way"""
        if handle.network is None:
            return None
        try:
            channel = SocketChannel(handle.network)
        except OSError as error:
            host, port, _ = handle.network
            raise RuntimeError(f"cannot connect to rank {peer} at {host}, port {port}: {error}") from error
        self._channels.append(channel)
        return channel

    def close_peers(self) -> None:
        super().close_peers()
        for channel in self._channels:
            channel.close()
        self._channels.clear()

    def free(self) -> None:
        self._mailbox.close()
        if self._server is not None:
            self._server.close()
        super().free()
        os.close(self._file)


class TorchEmulatorRuntime(JobRuntime):
    """Kernels run in a thread of their own while the host is in torch."""

    def allocate_symmetric(self, comm: Any, wanted: WantedMemory, reach: Reach) -> SymmetricMemory:
        if not isinstance(comm, TorchComm):
            refuse("group", type(comm).__name__, "a process group of torch, as the first one of this process")
        nodes = (comm.hosts[first : first + reach.node_size] for first in range(0, comm.size, reach.node_size))
        if any(len(set(hosts)) > 1 for hosts in nodes):
            raise spread_error(reach.node_size, comm.size)
        return SharedMemory(self.space, comm, wanted, reach.by_nics)


def runtime_of_process() -> TorchEmulatorRuntime:
    """This process's rank of a new world, which lives as long as the process."""
    import torch.distributed

    rank = torch.distributed.get_rank()
    return TorchEmulatorRuntime(ProcessWorld(torch.distributed.get_world_size(), local_rank=rank), rank)


# How NICs reach the memory of other processes


KEY_BYTES = 16
CONNECT_S = 30.0
KEY_S = 10.0  # for a connection to show the key, which comes right behind it
PAUSE_S = 0.05
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
MASTER = "MASTER_ADDR", "MASTER_PORT"  # torchrun sets them on all hosts
PUT, ADD, FLUSH = range(3)
REQUEST = struct.Struct("<BQqq")  # which of them, offset, number of bytes, what to add
REPLY = struct.Struct("<q")
CASTS: dict[int, Literal["i", "q"]] = {4: "i", 8: "q"}


class SocketAddress(NamedTuple):
    """Where a rank's memory is reached, and the key that opens it."""

    host: str
    port: int
    key: bytes


def own_host() -> str:
    """The address at which other hosts reach this one: from which it would reach the master. Nothing is sent.

    Raises: RuntimeError if the environment does not name the master; OSError if the name is unknown, or out of reach
    """
    if any(name not in os.environ for name in MASTER):
        raise RuntimeError(f"{' and '.join(MASTER)}: not set; the emulator's NICs need them, as torchrun sets them")
    host, port = (os.environ[name] for name in MASTER)
    family, kind, protocol, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)
        return str(way.getsockname()[0])


def receive(connection: socket.socket, num_bytes: int) -> bytearray:
    """So many bytes. Raises: OSError if the connection ends before"""
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        received = connection.recv_into(rest)
        if received == 0:
            raise ConnectionError("the connection has ended")
        rest = rest[received:]
    return data


class MemoryServer:
    """Lets the NICs of other ranks into this rank's memory. `address` is for them.

    One thread accepts connections, and each of them has a thread, which serves it once it has shown the key. Whoever
    else may connect, too, and say nothing: such connections end after KEY_S, and the oldest make room for new ones.
    """

    def __init__(self, memory: memoryview, num_ranks: int):
        self._memory = memory.cast("B")
        self._one_add = threading.Lock()
        self.max_waiting = num_ranks + 16
        host = own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family, backlog=max(128, self.max_waiting))
        self.address = SocketAddress(host, self._listening.getsockname()[1], secrets.token_bytes(KEY_BYTES))
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._waiting: dict[socket.socket, None] = {}  # those that have not shown the key, the oldest first
        self._is_closed = False
        self._accepts = threading.Thread(target=self._let_in, name="nbep-let-in", daemon=True)
        self._accepts.start()

    def _let_in(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if error.errno in NO_ROOM and not self._turn_away_oldest():
                    time.sleep(PAUSE_S)  # the process may close files of its own
                continue  # else who has connected is gone
            if len(self._waiting) >= self.max_waiting:
                self._turn_away_oldest()
            thread = threading.Thread(target=self._serve, args=(connection,), name="nbep-let-in", daemon=True)
            self._connections[connection], self._waiting[connection] = thread, None
            try:
                thread.start()
            except RuntimeError:  # the process can have no more threads
                del self._connections[connection], self._waiting[connection]
                connection.close()

    def _turn_away_oldest(self) -> bool:
        """End the connection that waits longest without the key. False if there is none."""
        for connection in list(self._waiting):
            if self._waits_no_more(connection):
                thread = self._connections.get(connection)
                _shut(connection)
                if thread is not None:
                    thread.join()
                return True
        return False

    def _waits_no_more(self, connection: socket.socket) -> bool:
        """Whether it has waited until now: who asks first, its own thread or the one that accepts, decides on it."""
        return self._waiting.pop(connection, False) is None

    def _serve(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError), connection:
                connection.settimeout(KEY_S)
                key = receive(connection, KEY_BYTES)
                if not (self._waits_no_more(connection) and secrets.compare_digest(key, self.address.key)):
                    return
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    what, offset, num_bytes, value = REQUEST.unpack(receive(connection, REQUEST.size))
                    if what == PUT:
                        self._memory[offset : offset + num_bytes] = receive(connection, num_bytes)
                    else:
                        old = self._add(offset, num_bytes, value) if what == ADD else 0
                        connection.sendall(REPLY.pack(old))
        finally:
            self._waiting.pop(connection, None)
            self._connections.pop(connection, None)

    def _add(self, offset: int, num_bytes: int, value: int) -> int:
        with self._one_add, self._memory[offset : offset + num_bytes].cast(CASTS[num_bytes]) as cell:
            old = int(cell[0])
            bits = 8 * num_bytes
            cell[0] = (old + value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
            return old

    def close(self) -> None:
        """Accept no more connections, and end those that there are."""
        self._is_closed = True
        _shut(self._listening)  # wakes the thread that accepts
        self._accepts.join()
        self._listening.close()
        for connection, thread in list(self._connections.items()):
            _shut(connection)
            thread.join()
        self._memory.release()


def _shut(connection: socket.socket) -> None:
    """Let a thread that waits for it go on."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class SocketChannel:
    """The way to the memory of one rank, as `nbep.emulator.machine.remote` wants it."""

    def __init__(self, address: SocketAddress):
        self._connection = socket.create_connection(address[:2], timeout=CONNECT_S)
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(address.key)
        self._closed = threading.Event()

    def put(self, offset: int, data: bytes) -> None:
        self._send(REQUEST.pack(PUT, offset, len(data), 0) + data)

    def flush(self) -> None:
        self._ask(FLUSH, 0, 0, 0)

    def fetch_and_add(self, offset: int, size: int, value: int) -> int:
        return self._ask(ADD, offset, size, value)

    def _ask(self, what: int, offset: int, size: int, value: int) -> int:
        self._send(REQUEST.pack(what, offset, size, value))
        try:
            return int(REPLY.unpack(receive(self._connection, REPLY.size))[0])
        except OSError:
            return self._never()

    def _send(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError:
            self._never()

    def _never(self) -> int:
        """The peer is gone: what is under way stays so."""
        self._closed.wait()
        return 0

    def close(self) -> None:
        self._closed.set()
        _shut(self._connection)
        self._connection.close()
