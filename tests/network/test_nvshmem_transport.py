"""The network's functions over NVSHMEM, on the emulator, where a stand-in serves NVSHMEM's device calls.

The stand-in does no more than NVSHMEM promises: a put reads its source and writes its destination when the rank calls
quiet, and an add that comes before that is an error here.
"""

import sys

import numpy as np
import pytest
from target import MEMORY_MODELS

import nbep
from nbep.device import primitives as ptx
from nbep.device.jit import kernel
from nbep.device.network.seam import amo_add, is_message, keep_message, own_ptr, put_nbi_warp, quiet, sends_from_buffer
from nbep.device.protocols.peers import BARRIER_SIGNAL_BYTES
from nbep.device.types import Out
from nbep.emulator import current_thread

if sys.platform != "linux":
    pytest.skip("NVSHMEM is Linux's", allow_module_level=True)

from nbep.device.network import nvshmem
from nbep.device.network.nvshmem import NvshmemNetwork
from nbep.device.network.seam import Place

pytestmark = pytest.mark.emulator_only("it has a stand-in for NVSHMEM's device calls")

NUM_RANKS = 4
MESSAGE = 512  # bytes: 16 of each lane
MESSAGES, KEPT, CELL, TABLE, NUM_BYTES = 0, 4096, 5120, 6144, 8192
ANSWERS = NUM_RANKS * MESSAGE
ALL = sum(100 + rank for rank in range(NUM_RANKS))
DEADLINE_NS = 10**12


@kernel(max_threads=32)
def send_to_all(out: Out, network: NvshmemNetwork):
    """One warp puts a message to every rank, and adds 100 + rank to a cell of each. Then it waits for theirs.

    out: the messages that have come, then what is_message says of each rank, then sends_from_buffer
    """
    lane = ptx.thread_idx()
    stage = ptx.smem_base()
    ptx.st_shared_v4(stage + 16 * lane, (network.rank, lane, 3, 4))
    ptx.fence_proxy_async_shared()
    ptx.syncwarp(ptx.FULL_MASK)
    keep_message(network, KEPT, stage, MESSAGE, lane)
    for peer in range(network.num_ranks):
        put_nbi_warp(network, Place(MESSAGES + MESSAGE * network.rank, KEPT, peer, 0), stage, MESSAGE, lane)
    quiet(network, lane)
    if lane < network.num_ranks:
        amo_add(network, CELL, 100 + network.rank, lane, 0, True)
        ptx.st_weak_s32(out + ANSWERS + 4 * lane, 1 if is_message(network, lane) else 0)
    if lane == 0:
        ptx.st_weak_s32(out + ANSWERS + 4 * network.num_ranks, 1 if sends_from_buffer(network) else 0)
        deadline = ptx.deadline_after(DEADLINE_NS)
        while ptx.ld_acquire_sys_s32(own_ptr(network, CELL)) != ALL:
            if ptx.wait_expired(deadline):
                ptx.trap()
    ptx.syncwarp(ptx.FULL_MASK)
    for peer in range(network.num_ranks):
        at = MESSAGE * peer + 16 * lane
        ptx.st_na_v4(out + at, ptx.ld_na_v4(own_ptr(network, MESSAGES + at)))


class StandIn:
    """NVSHMEM's device calls. bases: where each rank sees the buffers of all; calls: (rank, PE, bytes) of the puts."""

    def __init__(self):
        self.bases = {}
        self.pending = {rank: [] for rank in range(NUM_RANKS)}
        self.calls = set()

    def there(self, address, pe):
        rank = current_thread().rank
        offset = address - self.bases[rank][rank]
        assert 0 <= offset < NUM_BYTES
        return self.bases[rank][pe] + offset

    def put_nbi_warp(self, dst, src, num_bytes, pe):
        rank = current_thread().rank
        self.calls.add((rank, pe, num_bytes))
        put = (self.there(dst, pe), src, num_bytes)
        if put not in self.pending[rank]:  # all lanes call it
            self.pending[rank].append(put)

    def quiet(self):
        pending = self.pending[current_thread().rank]
        while pending:
            dst, src, num_bytes = pending.pop()
            for offset in range(0, num_bytes, 16):
                ptx.st_na_v4(dst + offset, ptx.ld_na_v4(src + offset))
        ptx.fence_acq_rel_sys()

    def add(self, cell, value, pe):
        assert not self.pending[current_thread().rank], "an add while messages are on their way"
        ptx.atom_add_relaxed_sys_s32(self.there(cell, pe), value)


def run(monkeypatch, is_mapped, seed=0, **options):
    """What each rank has then: messages, answers, whether a message was kept in its buffer. And the stand-in."""
    stand_in = StandIn()
    monkeypatch.setattr(nvshmem, "nvshmem_put_nbi_warp", stand_in.put_nbi_warp)
    monkeypatch.setattr(nvshmem, "nvshmem_quiet", stand_in.quiet)
    monkeypatch.setattr(nvshmem, "nvshmem_add", stand_in.add)

    def main(comm):
        memory = nbep.SharedMemory.create(comm, NUM_BYTES)
        own = memory.symmetric.address
        bases = memory.symmetric.read(NUM_BYTES + BARRIER_SIGNAL_BYTES, comm.size, np.int64).tolist()
        stand_in.bases[comm.rank] = bases
        seen = [base if peer == comm.rank or is_mapped(comm.rank, peer) else 0 for peer, base in enumerate(bases)]
        memory.symmetric.write(TABLE, np.array(seen, np.int64))
        network = NvshmemNetwork(own + TABLE, comm.rank, comm.size, seen.count(0), seen[comm.rank])
        out = memory.runtime.allocate_host_visible(ANSWERS + 4 * (NUM_RANKS + 1), "out")
        comm.barrier()
        memory.runtime.launch(memory.comm_stream, send_to_all, 1, 32, MESSAGE, out.address, network)
        memory.wait()
        comm.barrier()
        kept = memory.symmetric.read(KEPT, MESSAGE // 4, np.int32)
        words = out.array(np.int32)
        messages = words[: ANSWERS // 4].reshape(NUM_RANKS, 32, 4).tolist()
        answers = words[ANSWERS // 4 :].tolist()
        memory.close()
        return messages, answers, bool(kept.any())

    return nbep.spawn(main, NUM_RANKS, target="emulator", seed=seed, **options), stand_in


NODES = {
    "all mapped": lambda rank, peer: True,
    "nodes of two": lambda rank, peer: rank // 2 == peer // 2,
    "none mapped": lambda rank, peer: False,
}
EXPECTED = [[[rank, lane, 3, 4] for lane in range(32)] for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("nodes", NODES)
def test_messages_and_what_is_added_arrive_at_all_ranks(monkeypatch, nodes, memory_model):
    for seed in range(5):
        results, _ = run(monkeypatch, NODES[nodes], seed, memory_model=memory_model)
        assert [messages for messages, _, _ in results] == [EXPECTED] * NUM_RANKS


@pytest.mark.parametrize("nodes", NODES)
def test_nvshmem_is_called_for_peers_that_are_not_mapped_and_for_no_others(monkeypatch, nodes):
    is_mapped = NODES[nodes]
    results, stand_in = run(monkeypatch, is_mapped)
    for rank, (_, answers, is_kept) in enumerate(results):
        remote = [peer for peer in range(NUM_RANKS) if peer != rank and not is_mapped(rank, peer)]
        assert {call for call in stand_in.calls if call[0] == rank} == {(rank, peer, MESSAGE) for peer in remote}
        assert answers == [int(peer in remote) for peer in range(NUM_RANKS)] + [int(bool(remote))]
        assert is_kept == bool(remote)


def test_without_the_stand_in_the_emulator_says_that_nvshmem_needs_gpus():
    for call in (nvshmem.nvshmem_quiet, lambda: nvshmem.nvshmem_add(0, 1, 0)):
        with pytest.raises(nvshmem.NeedsGpu, match="NVSHMEM needs GPUs"):
            call()
