"""NVSHMEM without GPUs: nvshmem4py's calls, between threads that stand for processes, in memory of the host.

A collective call waits for all PEs, and fails the test if they do not all make it. `calls` of each PE are in order.
"""

import ctypes
import itertools
import threading
from types import SimpleNamespace

LIMIT_S = 60
UNIQUE_ID_BYTES = 128
MODULE = 7000  # handle of the first kernel's module


class FakeWorld:
    """What the PEs of a unique id share."""

    def __init__(self, num_pes):
        self.num_pes = num_pes
        self.barrier = threading.Barrier(num_pes, timeout=LIMIT_S)
        self.heaps = {}  # (number of the allocation, PE) -> memory


class FakeNvshmem:
    """The machine that all ranks are on.

    fails: (rank, call) -> error that this call raises there; no_room: allocations find none; unmapped: pairs (rank, PE)
    """

    def __init__(self, num_ranks):
        self.num_ranks = num_ranks
        self.calls = [[] for _ in range(num_ranks)]
        self.worlds = {}
        self.fails = {}
        self.no_room = False
        self.unmapped = set()
        self.environments = {}
        self._lock = threading.Lock()
        self._ids = itertools.count(1)

    def rank(self, rank):
        return FakeRank(self, rank)

    def world(self, unique_id, num_pes):
        with self._lock:
            return self.worlds.setdefault(unique_id, FakeWorld(num_pes))

    def new_id(self):
        return next(self._ids).to_bytes(UNIQUE_ID_BYTES, "little")


class Hang(AssertionError):
    """NVSHMEM waits for a completion that never comes."""


class FakeQueuePair:
    """A queue pair of a card. Who posts keeps a head; the card serves by its own count and never looks back."""

    def __init__(self):
        self.num_served = 0

    def post(self, head):
        """Post one entry at `head` and wait for its completion. Returns the new head."""
        if head < self.num_served:
            raise Hang(f"entry {head} is posted where the card has served {self.num_served} already")
        self.num_served = head + 1
        return head + 1


class FakeRank:
    """One process. It has the parts of nvshmem.core and of nvshmem.bindings that nbep uses."""

    def __init__(self, machine, rank):
        self.machine = machine
        self.number = rank
        self.world = None
        self.pe = -1
        self.registered = set()
        self.addresses = {}  # address -> number of the allocation
        self._num_allocations = 0
        self._kept = []
        self.queue_pair, self.head = FakeQueuePair(), 0  # the head is NVSHMEM's own

    def post(self):
        """What NVSHMEM's collectives and device calls do where peers are reached through a card."""
        self.head = self.queue_pair.post(self.head)

    def _call(self, name, *details):
        self.machine.calls[self.number].append(" ".join(map(str, (name, *details))))
        if (self.number, name) in self.machine.fails:
            raise self.machine.fails[self.number, name]

    def _running(self):
        assert self.world is not None, "NVSHMEM does not run"
        return self.world

    # nvshmem.core

    def get_version(self):
        return SimpleNamespace(libnvshmem_version="3.8.0")

    def get_unique_id(self, empty=False):
        storage = ctypes.create_string_buffer(b"" if empty else self.machine.new_id(), UNIQUE_ID_BYTES)
        self._kept.append(storage)
        return SimpleNamespace(ptr=ctypes.addressof(storage))

    def init(self, *, device, uid, rank, nranks, initializer_method):
        assert initializer_method == "uid"
        assert self.world is None, "it runs already"
        self._call("init", device, rank, nranks)
        world = self.machine.world(ctypes.string_at(uid.ptr, UNIQUE_ID_BYTES), nranks)
        assert (world.num_pes, len(self.registered)) == (nranks, 0)
        world.barrier.wait()
        self.world, self.pe, self._num_allocations = world, rank, 0
        self.queue_pair, self.head = FakeQueuePair(), 0

    def finalize(self):
        self._call("finalize")
        assert not self.registered, "modules would keep addresses of what is gone"
        self.post()
        self._running().barrier.wait()
        self.world, self.addresses = None, {}

    # nvshmem.bindings

    def cumodule_init(self, module):
        self._running()
        self._call("cumodule_init", module - MODULE)
        self.registered.add(module)
        return 0

    def cumodule_finalize(self, module):
        self._running()
        self._call("cumodule_finalize", module - MODULE)
        self.registered.remove(module)
        return 0

    def align(self, alignment, num_bytes):
        self._call("align", alignment, num_bytes)
        world = self._running()
        self.post()
        number, self._num_allocations = self._num_allocations, self._num_allocations + 1
        if not self.machine.no_room:
            storage = (ctypes.c_uint8 * num_bytes)(*[0xEE] * num_bytes)
            world.heaps[number, self.pe] = storage
        world.barrier.wait()
        if self.machine.no_room:
            return 0
        address = ctypes.addressof(storage)
        self.addresses[address] = number
        return address

    def free(self, address):
        self._call("free")
        self.post()
        del self.addresses[address]
        self._running().barrier.wait()

    def ptr(self, address, pe):
        if (self.number, pe) in self.machine.unmapped:
            return 0
        return ctypes.addressof(self._running().heaps[self.addresses[address], pe])


class FakeComm:
    """A communicator of threads that stand for processes. It carries bytes and tuples, by reference."""

    def __init__(self, rank, group):
        self.rank = rank
        self.size = group.size
        self._group = group

    def allgather(self, sendobj):
        self._group.brought[self.rank] = sendobj
        self._group.barrier.wait()
        everything = list(self._group.brought)
        self._group.barrier.wait()
        return everything

    def barrier(self):
        self.allgather(None)


class FakeGroup:
    def __init__(self, size):
        self.size = size
        self.brought = [None] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
