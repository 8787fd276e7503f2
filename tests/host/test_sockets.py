"""How NICs of the emulator reach memory over TCP; without torch, and in one process."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

import numpy as np
import pytest
from processes import LIMIT_S

from nbep.host.target import torchrun
from nbep.host.target.torchrun import (
    ADD,
    KEY_BYTES,
    REPLY,
    REQUEST,
    MemoryServer,
    SocketAddress,
    SocketChannel,
    own_host,
    receive,
)

NUM_BYTES = 256
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "9")
    return np.zeros(NUM_BYTES, np.uint8)


@pytest.fixture
def server(memory):
    server = MemoryServer(memoryview(memory), 2)
    yield server
    server.close()


def silent(address, number):
    """Connections that say nothing, or less than the key."""
    connections = [socket.create_connection(address[:2]) for _ in range(number)]
    for connection in connections[::2]:
        connection.sendall(address.key[:-1])
    return connections


def has_ended(connection):
    connection.settimeout(LIMIT_S)
    with suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def serves(address):
    channel = SocketChannel(address)
    old = channel.fetch_and_add(0, 4, 1)
    assert channel.fetch_and_add(0, 4, 1) == old + 1
    channel.close()


def test_bytes_are_there_after_a_flush(memory, server):
    channel = SocketChannel(server.address)
    channel.put(3, b"abc")
    channel.put(100, bytes(range(50)))
    channel.flush()
    assert memory[3:6].tobytes() == b"abc"
    assert memory[100:150].tolist() == list(range(50))
    assert not memory[:3].any()
    assert not memory[6:100].any()
    assert not memory[150:].any()
    channel.close()


def test_adds_return_what_was_there_and_wrap(memory, server):
    channel = SocketChannel(server.address)
    assert channel.fetch_and_add(8, 4, 7) == 0
    assert channel.fetch_and_add(8, 4, 2**31 - 1) == 7
    assert channel.fetch_and_add(16, 8, -(2**63)) == 0
    assert channel.fetch_and_add(16, 8, -1) == -(2**63)
    assert memory.view(np.int32)[2] == 7 + (2**31 - 1) - 2**32
    assert memory.view(np.int64)[2] == 2**63 - 1
    channel.close()


def test_adds_of_several_ranks_to_one_cell_lose_nothing(memory, server):
    def add(_):
        channel = SocketChannel(server.address)
        fetched = [channel.fetch_and_add(0, 4, 1) for _ in range(100)]
        channel.close()
        return fetched

    with ThreadPoolExecutor(4) as ranks:
        fetched = list(ranks.map(add, range(4)))
    assert memory.view(np.int32)[0] == 400
    assert sorted(chain(*fetched)) == list(range(400))


def test_no_connection_without_the_key_is_let_in(memory, server):
    with socket.create_connection(server.address[:2]) as connection:
        connection.sendall(bytes(KEY_BYTES) + REQUEST.pack(ADD, 0, 4, 1))
        with suppress(ConnectionResetError):  # what was sent has not been read
            assert connection.recv(1) == b""
    assert not memory.any()


def test_connections_without_a_key_make_room_for_others(server):
    connections = silent(server.address, 100)
    serves(server.address)
    assert all(map(has_ended, connections[: -server.max_waiting]))
    for connection in connections:
        connection.close()


FEW_FILES = """
import resource, sys
from nbep.host.target.torchrun import MemoryServer

resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
server = MemoryServer(memoryview(bytearray(64)), 200)
opened = []
try:
    while sys.argv[1] == "none":
        opened.append(open("/dev/null"))
except OSError:
    pass
print(*server.address[:2], server.address.key.hex(), flush=True)
input()
del opened
input()
server.close()
"""


@pytest.mark.parametrize("left", ["some", "none"])
def test_a_server_survives_that_its_process_can_open_no_more_files(memory, left):
    with subprocess.Popen([sys.executable, "-c", FEW_FILES, left], **PIPES) as process:
        try:
            host, port, key = process.stdout.readline().split()
            address = SocketAddress(host, int(port), bytes.fromhex(key))
            connections = [] if left == "none" else silent(address, 100)
            channel = SocketChannel(address)
            channel.put(0, b"x")
            process.stdin.write("\n")
            process.stdin.flush()
            channel.flush()
            serves(address)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(LIMIT_S) == 0
        finally:
            process.kill()
    for connection in connections:
        connection.close()


def test_a_connection_without_a_key_has_a_limit_and_its_thread_ends(server, monkeypatch):
    monkeypatch.setattr(torchrun, "KEY_S", 0.1)
    connections = silent(server.address, 8)
    with SocketChannel(server.address)._connection as slow:
        assert all(map(has_ended, connections))
        slow.sendall(REQUEST.pack(ADD, 0, 4, 1))  # who has shown the key may take any time
        receive(slow, REPLY.size)
        deadline = time.monotonic() + LIMIT_S
        while len(server._connections) > 1 and time.monotonic() < deadline:
            time.sleep(0)  # lets their threads end
        assert len(server._connections) == 1


def test_what_goes_to_a_rank_that_is_gone_never_arrives(memory, monkeypatch):
    class Waits(Exception):
        pass

    def wait():
        raise Waits

    server = MemoryServer(memoryview(memory), 2)
    channel = SocketChannel(server.address)
    channel.flush()
    server.close()
    monkeypatch.setattr(channel._closed, "wait", wait)
    with pytest.raises(Waits):
        channel.flush()
    with pytest.raises(ConnectionRefusedError):
        SocketChannel(server.address)
    channel.close()


def test_the_own_address_is_that_towards_the_master(memory, monkeypatch):
    assert own_host() in ("127.0.0.1", "::1")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(RuntimeError, match="MASTER_ADDR and MASTER_PORT: not set; the emulator's NICs need them"):
        own_host()
