"""Ranks of several nodes, once per rank: `network_programs.py NAME [NUMBER ...][, NAME ...]`. A failure ends all."""

import sys
import traceback
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))

import internode as internode_support
import internode_rounds
import intranode
import numpy as np
import pytest
from low_latency import ASYNC, HOOK, Options, Trip, check, make_buffer, make_low_latency_case
from world import group_of, world

import nbep
from nbep.device.jit import kernel
from nbep.device.network.ibgda.transport import IbgdaNetwork, fetched_32, fetched_64, post_add, wait_written
from nbep.device.network.seam import own_ptr, peer_ptr
from nbep.device.primitives import st_weak_s32, st_weak_s64, thread_idx
from nbep.device.types import I32, I64
from nbep.emulator import Unmapped

KINDS = (
    Options(),
    Options(use_fp8=True, deduplicate=True, dispatch_as=HOOK, combine_as=HOOK),
    Options(use_fp8=True, with_stats=True, use_logfmt=True, dispatch_as=ASYNC, combine_as=ASYNC),
    Options(deduplicate=True, with_out=True),
    Options(zero_copy=True),
)


def make_case(seed: int, num_ranks: int):
    num_tokens = [(5 * rank + 3) % 8 for rank in range(num_ranks)]
    return make_low_latency_case(seed, num_ranks=num_ranks, num_tokens=num_tokens, num_topk=3, hidden=256)


def low_latency(comm, num_nvl_peers, use_nvlink, num_kinds, seed, max_delay_ns):
    """Dispatch and combine on one buffer, in nodes of num_nvl_peers ranks, over NICs that take their time."""
    trips = [(make_case(seed + i, comm.size), options) for i, options in enumerate(KINDS[:num_kinds])]
    nic = nbep.NicOptions(num_entries=64, chunk_bytes=256, seed=seed, max_delay_ns=max_delay_ns)
    buffer = make_buffer(
        group_of(comm),
        trips,
        transport="ibgda",
        num_nvl_peers=num_nvl_peers,
        allow_nvlink_for_low_latency_mode=bool(use_nvlink),
        nic=nic,
    )
    outcomes = [Trip(buffer, case, options).whole() for case, options in trips]
    buffer.destroy()
    for (case, options), outcome in zip(trips, outcomes, strict=True):
        gathered = comm.gather(outcome)
        if comm.rank == 0:
            check(case, options, gathered, f"inputs {case.seed}, NIC {nic}")


def internode(comm, is_direct, num_rounds, seed, max_delay_ns):
    """Random rounds of the normal mode on two nodes of half of the ranks."""
    sizes, num_nvl_peers = internode_rounds.SMALL, comm.size // 2
    nic = nbep.NicOptions(num_entries=64, chunk_bytes=256, seed=seed, max_delay_ns=max_delay_ns)
    buffer = nbep.Buffer(
        group_of(comm),
        **internode_rounds.num_bytes(2, num_nvl_peers, sizes),
        transport="direct" if is_direct else "ibgda",
        num_nvl_peers=num_nvl_peers,
        num_qps_per_rank=sizes.most_channels,
        nic=nic,
    )
    wrong = internode_rounds.wrong_rounds(buffer, 2, seed, num_rounds, sizes)
    buffer.destroy()
    assert not wrong, "\n".join(wrong)


def calls_that_differ(comm, odd):
    """What one rank passes with a handle reaches those of its node and place, and through them the others."""
    case = internode_support.make_node_case(1, num_tokens=6)
    options = internode_support.Options(transport="ibgda")
    other = replace(options.config, num_max_rdma_chunked_recv_tokens=6)
    buffer = intranode.make_buffer(group_of(comm), case, replace(options, config=other))
    outcome = intranode.dispatch(buffer, case, options, comm.rank)
    config = other if comm.rank == odd else options.config

    def call():
        buffer.combine(np.zeros_like(outcome.recv_x), outcome.handle, config=config)
        buffer._memory.wait()

    own, theirs, ranks = ("6", "4", rf"[^{odd}]") if comm.rank == odd else ("4", "6", odd)
    got = f"config.num_max_rdma_chunked_recv_tokens: got {own} on rank {comm.rank}, {theirs} on rank {ranks}"
    comm.barrier()
    with pytest.raises(ValueError, match=f"^{got} in the same combine; must be the same on all ranks$"):
        call()
    buffer.destroy()


def pretended_hosts(comm, num_hosts, *arguments):
    """Run with variables that let MPICH take the machine for several: `low_latency`, and without a network nothing."""
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    if host.size == comm.size:
        print("one host")
        return
    assert host.size * num_hosts == comm.size
    with pytest.raises(
        ValueError, match=r'group: got 4 ranks on several hosts; must be on one host.*transport="ibgda"'
    ):
        nbep.Buffer(comm, num_nvl_bytes=256)
    spread = "group: got 4 ranks" if num_hosts == 2 else "num_nvl_peers: got 2; must be such"
    with pytest.raises(ValueError, match=spread):
        nbep.SharedMemory.create(comm, 256, transport="ibgda", num_nvl_peers=2 * host.size)
    low_latency(comm, *arguments)


CELL_32, CELL_64, FETCHED_32, FETCHED_64, MEMORY_BYTES = 0, 8, 256, 1024, 4096
LARGE = (1 << 33) + 1


@kernel()
def add_many(network: IbgdaNetwork, peer: I32, num_adds: I32, large: I64):
    """Add 1 to one cell of a peer and a large number to another, again and again; keep what was there. One thread."""
    for i in range(num_adds):
        wait_written(network, peer, 0, post_add(network, CELL_32, 1, False, peer, 0))
        st_weak_s32(own_ptr(network, FETCHED_32 + 4 * i), fetched_32(network, peer, 0))
        wait_written(network, peer, 1, post_add(network, CELL_64, large, True, peer, 1))
        st_weak_s64(own_ptr(network, FETCHED_64 + 8 * i), fetched_64(network, peer, 1))


def adds_to_one_cell(comm, num_adds):
    """All ranks but the last add to cells of the last one."""
    nic = nbep.NicOptions(seed=1)
    group = group_of(comm)
    memory = nbep.SharedMemory.create(group, MEMORY_BYTES, transport="ibgda", num_nvl_peers=1, num_qps=2, nic=nic)
    owner = comm.size - 1
    if comm.rank != owner:
        memory.runtime.launch(memory.comm_stream, add_many, 1, 1, 0, memory.network, owner, num_adds, LARGE)
    memory.wait()
    comm.barrier()
    total = num_adds * owner
    if comm.rank == owner:
        assert memory.symmetric.read(CELL_32, 1, np.int32)[0] == total
        assert memory.symmetric.read(CELL_64, 1, np.int64)[0] == total * LARGE
    fetched = [
        np.concatenate(comm.allgather(memory.symmetric.read(at, num_adds, dtype))[:owner])
        for at, dtype in ((FETCHED_32, np.int32), (FETCHED_64, np.int64))
    ]
    assert np.sort(fetched[0]).tolist() == list(range(total))
    assert np.sort(fetched[1]).tolist() == [i * LARGE for i in range(total)]
    memory.close()


@kernel()
def store_at(network: IbgdaNetwork, address: I64):
    st_weak_s32(address, 1)


@kernel()
def store_in_node(network: IbgdaNetwork, peer: I32):
    """Tell a peer of the node who was here, with a plain store."""
    if thread_idx() == 0:
        st_weak_s32(peer_ptr(network, 4 * network.rank, peer), 1 + network.rank)


def plain_stores(comm):
    """With 4 ranks, in nodes of two: a store arrives in the node; to another node it is refused, and ends the work."""
    memory = nbep.SharedMemory.create(comm, MEMORY_BYTES, transport="ibgda", num_nvl_peers=2)
    runtime, stream = memory.runtime, memory.comm_stream
    addresses = comm.allgather(memory.symmetric.address)
    table = memory.symmetric.read(memory.network.buffer_ptrs - memory.symmetric.address, comm.size, np.int64)
    assert [address != 0 for address in table] == [rank // 2 == comm.rank // 2 for rank in range(comm.size)]
    neighbour = comm.rank ^ 1
    runtime.launch(stream, store_in_node, 1, 32, 0, memory.network, neighbour)
    memory.wait()
    comm.barrier()
    assert memory.symmetric.read(4 * neighbour, 1, np.int32)[0] == 1 + neighbour
    if comm.rank == 0:
        runtime.launch(stream, store_at, 1, 1, 0, memory.network, addresses[2])
        with pytest.raises(Unmapped, match="store of 4 bytes"):
            memory.wait()
    comm.barrier()
    with pytest.raises(RuntimeError, match=r"rank 0: .*store of 4 bytes"):
        memory.close()


def nic_that_stops(comm):
    """Run with a small NBEP_TIMEOUT_MS: the NIC of rank 1 serves one entry a queue pair. Who waits for it raises."""
    case, options = make_case(3, comm.size), Options(dispatch_as=ASYNC)
    nic = nbep.NicOptions(stopped=(1, 0))
    buffer = make_buffer(comm, [(case, options)], transport="ibgda", num_nvl_peers=1, num_qps_per_rank=1, nic=nic)
    trip = Trip(buffer, case, options)
    comm.barrier()
    if comm.rank == 1:
        trip.send_dispatch()
        trip.receive_dispatch()
    else:
        trip.send_dispatch()
        pattern = r"the network from rank 1: queue 0 \(its queue pair \d+\): done up to entry 0"
        with pytest.raises(nbep.PeerTimeout, match=pattern) as failure:
            trip.receive_dispatch()
        assert (failure.value.rank, failure.value.peer) == (comm.rank, 1)
    comm.barrier()
    buffer.destroy()


def too_few_threads(comm):
    """Run with MPI initialized for one thread at a time: without a network all is well."""
    nbep.SharedMemory.create(comm, 256).close()
    with pytest.raises(RuntimeError, match="MPI: was not initialized with MPI_THREAD_MULTIPLE"):
        nbep.SharedMemory.create(comm, 256, transport="ibgda", num_nvl_peers=1)


def main():
    comm = world()
    try:
        for program in " ".join(sys.argv[1:]).split(","):
            name, *numbers = program.split()
            globals()[name](comm, *map(int, numbers))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
    print(f"rank {comm.rank} is done", flush=True)


if __name__ == "__main__":
    main()
