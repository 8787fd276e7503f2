"""How NICs of the emulator reach memory over TCP; without torch, and in one process."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain

import numpy as np
import pytest

from nbep.host.target.sockets import ADD, KEY_BYTES, REQUEST, MemoryServer, SocketChannel, own_host

NUM_BYTES = 256


@pytest.fixture
def memory(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "9")
    return np.zeros(NUM_BYTES, np.uint8)


@pytest.fixture
def server(memory):
    server = MemoryServer(memoryview(memory))
    yield server
    server.close()


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


def test_nobody_without_the_key_is_let_in(memory, server):
    with socket.create_connection(server.address[:2]) as connection:
        connection.sendall(bytes(KEY_BYTES) + REQUEST.pack(ADD, 0, 4, 1))
        with suppress(ConnectionResetError):  # what was sent has not been read
            assert connection.recv(1) == b""
    assert not memory.any()


def test_what_goes_to_a_rank_that_is_gone_never_arrives(memory, monkeypatch):
    class Waits(Exception):
        pass

    def wait():
        raise Waits

    server = MemoryServer(memoryview(memory))
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
