"""How NICs of the emulator reach the memory of other processes under torchrun: over TCP.

 NIC of rank 0    put(offset, bytes) ----->  a thread of rank 1 for this connection    its memory
                  add(offset, size, n) --->                                            <- the sum, as one store
                  <--- what it was --------
                  flush ------------------>  all that came before has been stored
                  <--- done ---------------

A connection delivers in order. Adds of all connections exclude each other; a kernel's own atomics know nothing of them,
as with a card. Who connects shows the key that came with the address, through the process group.

When a connection breaks, what is under way never arrives: kernels' waits end at their deadlines and name the rank.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from typing import Literal, NamedTuple

KEY_BYTES = 16
CONNECT_S = 30.0
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

    Raises: RuntimeError if nobody has said who that is; OSError if its name is unknown, or there is no way to it
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
    """Lets the NICs of other ranks into this rank's memory. `address` is for them."""

    def __init__(self, memory: memoryview):
        self._memory = memory.cast("B")
        self._one_add = threading.Lock()
        host = own_host()
        self._listening = socket.create_server((host, 0), family=_family(host))
        self.address = SocketAddress(host, self._listening.getsockname()[1], secrets.token_bytes(KEY_BYTES))
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, function: object, *args: object) -> None:
        thread = threading.Thread(target=function, args=args, name="nbep-let-in", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # close
            while True:
                connection, _ = self._listening.accept()
                self._connections.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not secrets.compare_digest(receive(connection, KEY_BYTES), self.address.key):
                return
            while True:
                what, offset, num_bytes, value = REQUEST.unpack(receive(connection, REQUEST.size))
                if what == PUT:
                    self._memory[offset : offset + num_bytes] = receive(connection, num_bytes)
                else:
                    old = self._add(offset, num_bytes, value) if what == ADD else 0
                    connection.sendall(REPLY.pack(old))

    def _add(self, offset: int, num_bytes: int, value: int) -> int:
        with self._one_add, self._memory[offset : offset + num_bytes].cast(CASTS[num_bytes]) as cell:
            old = int(cell[0])
            bits = 8 * num_bytes
            cell[0] = (old + value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
            return old

    def close(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listening.close()
        self._threads[0].join()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        self._memory.release()


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


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
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
