"""Memory of another process, which only messages reach. A channel that writes a bytearray stands for the process."""

import threading

import numpy as np
import pytest

from nbep.emulator import EmulatorError, OutOfBounds, current_thread
from nbep.emulator.machine.remote import runs
from nbep.emulator.process import ProcessWorld

LIMIT_S = 60  # ends what hangs


class Far:
    """The other process: what has arrived there, and the order of the calls. It answers while `is_open` is set."""

    def __init__(self, nbytes=64):
        self.memory = bytearray(nbytes)
        self.calls = []
        self.under_way = []
        self.is_open = threading.Event()
        self.is_open.set()

    def put(self, offset, data):
        self.calls.append(("put", offset, data))
        self.under_way.append((offset, data))

    def flush(self):
        assert self.is_open.wait(LIMIT_S)
        self.calls.append("flush")
        for offset, data in self.under_way:
            self.memory[offset : offset + len(data)] = data
        self.under_way.clear()

    def fetch_and_add(self, offset, size, value):
        assert self.is_open.wait(LIMIT_S)
        old = int.from_bytes(self.memory[offset : offset + size], "little", signed=True)
        self.memory[offset : offset + size] = (old + value).to_bytes(size, "little", signed=True)
        self.calls.append(("add", offset, size))
        return old


class Nic:
    """A world of one process, a stream of it, memory of its own, and that of two peers."""

    def __init__(self):
        self.world = ProcessWorld(3, local_rank=0)
        self.context = self.world.add_nic(0)
        self.own = self.context.space.allocate(64, "own", zero=True)
        self.fars = [Far(), Far()]
        self.remotes = [
            self.world.map_remote(self.context.space, 1 + i, "far", 64, far, lambda at: f"cell {at}")
            for i, far in enumerate(self.fars)
        ]
        self.far = self.fars[0]
        self.address = self.remotes[0].address

    def launch(self, kernel, *args, name="nic"):
        stream = self.context.create_stream(name)
        stream.launch(kernel, args, 1, 1)
        return stream

    def run(self, kernel, *args):
        self.launch(kernel, *args).synchronize()


@pytest.fixture
def nic():
    nic = Nic()
    yield nic
    for far in nic.fars:
        far.is_open.set()
    nic.world.close()
    for remote in nic.remotes:
        nic.context.space.free(remote)


def store(address, kind, value, order="weak"):
    current_thread().store(address, kind, value, order, "sys")


@pytest.mark.parametrize("releases", ["store", "fence", "atomic"])
def test_weak_stores_are_there_before_a_release_is_seen(nic, releases):
    far = nic.far

    def kernel(remote, own):
        store(remote + 16, "v4", (1, 2, 3, 4))
        store(remote + 32, "s32", -1)
        store(remote + 48, "u8", 300)
        assert far.calls == []
        if releases == "store":
            store(own, "s32", 1, "release")
        elif releases == "fence":
            current_thread().fence("acq_rel", "sys")
        else:
            current_thread().atomic("add", own, "s32", 1, "acq_rel", "sys")
        assert not far.under_way
        assert far.calls[-1] == "flush"

    nic.run(kernel, nic.address, nic.own.address)
    assert np.frombuffer(far.memory, np.int32)[4:9].tolist() == [1, 2, 3, 4, -1]
    assert far.memory[48] == 300 % 256
    assert [call[1] for call in far.calls if call != "flush"] == [16, 48]


def test_no_thread_waits_for_a_relaxed_store_but_it_leaves(nic):
    nic.far.is_open.clear()
    nic.run(store, nic.address, "s32", 7, "relaxed")
    nic.far.is_open.set()
    nic.remotes[0].wire.close()
    assert nic.far.memory[0] == 7


def test_a_fetch_and_add_comes_behind_the_stores_and_returns_what_was_there(nic):
    olds = []

    def kernel(remote):
        t = current_thread()
        for _ in range(2):
            store(remote, "s32", 5)
            olds.append(t.atomic("add", remote, "s32", 1, "acq_rel", "sys"))
        olds.append(t.atomic("add", remote + 8, "s64", -(1 << 40), "acq_rel", "sys"))
        olds.append(t.atomic("add", remote + 8, "s64", 0, "relaxed", "sys"))

    nic.run(kernel, nic.address)
    assert olds == [5, 5, 0, -(1 << 40)]


def test_kernels_go_on_while_a_peer_answers_nothing(nic):
    nic.far.is_open.clear()
    add = nic.launch(lambda a: current_thread().atomic("add", a, "s32", 1, "acq_rel", "sys"), nic.address, name="first")
    nic.run(lambda a: store(a, "s32", 1), nic.address)  # weak, and of another block
    waits = nic.launch(
        lambda a, own: (store(a, "s32", 3), store(own, "s32", 1, "release")), nic.address, nic.own.address
    )
    nic.run(
        lambda a, own: (store(a, "s32", 2), store(own, "s32", 1, "release")), nic.remotes[1].address, nic.own.address
    )
    assert nic.fars[1].memory[0] == 2
    assert waits.running is not None
    nic.far.is_open.set()
    add.synchronize()
    waits.synchronize()
    assert nic.far.memory[0] in (3, 4)


@pytest.mark.parametrize(
    ("access", "kind", "words"),
    [
        (lambda a: current_thread().load(a, "s32", "weak", "sys"), EmulatorError, "only stores and fetch-and-adds"),
        (lambda a: current_thread().atomic("exch", a, "s32", 1, "relaxed", "sys"), EmulatorError, "this is exch"),
        (lambda a: current_thread().atomic("add", a, "u32", 1, "relaxed", "sys"), EmulatorError, "of s32 and s64"),
        (lambda a: current_thread().atomic("add", a + 64, "s32", 1, "relaxed", "sys"), OutOfBounds, "cell|64"),
        (lambda a: store(a + 64, "s32", 1), OutOfBounds, "`far` of rank 1"),
    ],
)
def test_what_does_not_reach_other_processes_is_refused(nic, access, kind, words):
    with pytest.raises(kind, match=words):
        nic.run(access, nic.address)


def test_an_error_on_the_way_is_raised_in_the_kernel(nic):
    def fail():
        raise OSError("the cable is out")

    nic.far.flush = fail
    with pytest.raises(OSError, match="the cable is out"):
        nic.run(lambda a: (store(a, "s32", 1), current_thread().fence("release", "sys")), nic.address)


def test_bytes_side_by_side_are_one_message():
    assert list(runs({5: 1, 3: 2, 4: 3, 9: 4})) == [(3, b"\2\3\1"), (9, b"\4")]


def test_a_memory_model_that_delays_stores_itself_is_refused():
    world = ProcessWorld(2, local_rank=0, memory_model="delayed")
    with pytest.raises(EmulatorError, match="takes 'sc'"):
        world.map_remote(world.add_nic(0).space, 1, "far", 64, Far(), None)
