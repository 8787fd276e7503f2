"""Cells that grow from call to call: what every call computes where they pass 2**15, 2**31 and 2**32.

COUNTERS has them all: each row of a ledger that somebody adds to is in it, with the run that starts from other numbers
than 0, or with what keeps it small.
"""

from typing import Any

import numpy as np
import pytest
from cases import make_case
from internode import make_node_case
from ledgers import read_ledgers
from low_latency import HOOK, Options, Trip, make_low_latency_case
from parts import crossed

import nbep
from nbep.device.jit import over
from nbep.device.kernels.low_latency.coordinator import USES
from nbep.device.kernels.network_push import CELL_BYTES, CELLS_BYTES, PushSizes, buffer_bytes, network_push, smem_bytes
from nbep.device.layout.elastic import CALLED, TURN
from nbep.device.layout.internode import MAX_CHANNELS, arrived_offset, head_offset, tail_offset
from nbep.device.layout.low_latency import NUM_HALVES, credit_offset, signal_offset
from nbep.specimens.scenarios.low_latency import two_at_a_time
from nbep.specimens.workloads import elastic, internode, intranode, low_latency
from nbep.specimens.workloads.elastic import ElasticOptions, make_elastic_buffer

pytestmark = pytest.mark.emulator_only("the tests write into the cells")


def words(number: int, count: int) -> np.ndarray:
    """A counter that has come so far, so often."""
    return np.full(count, number & 0xFFFFFFFF, np.uint32).view(np.int32)


def have_passed(cells: np.ndarray, wrap: int) -> bool:
    """Whether counters are at a number or behind it."""
    return bool((cells - words(wrap, 1) >= 0).all())


def between_nodes(wrap: int) -> None:
    """Totals of the rings, arrivals, and what each rank remembers of both."""
    case = make_node_case(1, num_tokens=5)
    options = internode.Options(nbep.Config(2, 1, 4, 1, 2))

    def main(comm: Any) -> list[Any]:
        buffer = intranode.make_buffer(comm, case, options)
        mode, symmetric = buffer._memory.internode, buffer._memory.rdma.symmetric
        nodes, cells = case.num_nodes, mode.rdma.cells
        size = MAX_CHANNELS * nodes
        start = wrap - 3
        for offset in (tail_offset(cells, nodes, 0, 0), head_offset(cells, nodes, 0, 0)):
            symmetric.write(offset, words(start, size))
        symmetric.write(arrived_offset(cells, 0), words(start, nodes))
        for address, count in ((mode.progress.sent, size), (mode.progress.received, size), (mode.progress.rounds, 2)):
            mode.workspace.write(address - mode.workspace.address, words(start, count))
        comm.barrier()
        outcomes = []
        for _ in range(2):
            outcome = intranode.dispatch(buffer, case, options, buffer.rank)
            intranode.combine(buffer, case, options, buffer.rank, outcome)
            outcomes.append(outcome)
        assert have_passed(mode.workspace.read(mode.progress.rounds - mode.workspace.address, 1, np.int32), wrap)
        buffer.destroy()
        return outcomes

    for outcomes in zip(*nbep.spawn(main, case.num_ranks, "emulator", memory_model="checked"), strict=True):
        intranode.check(case, options, list(outcomes), 0)


def elastic_between_nodes(wrap: int) -> None:
    """Arrivals of ranks of several nodes, what each rank remembers of them, and its turns."""
    case = make_case(1, num_ranks=2, num_tokens=3)
    options = ElasticOptions(num_nodes=2)

    def main(comm: Any) -> list[Any]:
        buffer = make_elastic_buffer(comm, [(case, options)])
        memory = buffer._memory.elastic
        memory.symmetric.write(arrived_offset(memory.nodes.cells, 0), words(wrap - 3, case.num_ranks))
        for offset in (CALLED, TURN):
            memory.symmetric.write(offset, words(wrap - 3, 1))
        comm.barrier()
        outcomes = [elastic.call(buffer, case, options) for _ in range(4)]
        assert all(have_passed(memory.symmetric.read(offset, 1, np.int32), wrap) for offset in (CALLED, TURN))
        buffer.destroy()
        return outcomes

    for outcomes in zip(*nbep.spawn(main, case.num_ranks, "emulator", memory_model="checked"), strict=True):
        elastic.check(case, options, list(outcomes), "a call")


def in_the_hosts_memory(wrap: int) -> None:
    """The sums of the barrier without adds; calls of the normal mode, three barriers each trip."""
    case = make_case(1, num_ranks=2, num_tokens=3)
    options = intranode.Options(handle_type="host")

    def main(comm: Any) -> Any:
        buffer = intranode.make_buffer(comm, case, options)
        buffer._memory.symmetric.write(buffer._memory.num_nvl_bytes, words(wrap - 1, comm.size))
        comm.barrier()
        outcome = intranode.dispatch(buffer, case, options, buffer.rank)
        intranode.combine(buffer, case, options, buffer.rank, outcome)
        buffer.destroy()
        return outcome

    intranode.check(case, options, nbep.spawn(main, 2, "emulator", memory_model="checked"), 0)


def with_low_latency(wrap: int, deduplicate: bool = False) -> None:
    """Uses of a half, the credits for it, and the barriers of clean_low_latency_buffer."""
    case = make_low_latency_case(1, num_ranks=2, num_tokens=2, num_topk=2, experts_per_rank=1, hidden=128)
    options = Options(dispatch_as=HOOK, combine_as=HOOK, deduplicate=deduplicate)

    def main(comm: Any) -> list[Any]:
        buffer = low_latency.make_buffer(comm, [(case, options)])
        mode, start = buffer._memory.low_latency, wrap - 2
        for half in range(NUM_HALVES):
            mode.symmetric.write(credit_offset(mode.num_rdma_bytes, comm.size, half, 0), words(start + 1, comm.size))
        mode.symmetric.write(signal_offset(mode.num_rdma_bytes, comm.size, 0), words(start, comm.size))
        at = mode.workspace.address
        mode.workspace.write(mode.work.state - at + 4 * USES, words(start, NUM_HALVES))
        mode.workspace.write(mode.work.barriers - at, words(start, comm.size))
        comm.barrier()
        trips = [Trip(buffer, case, options) for _ in range(3)]
        two_at_a_time(trips)
        assert have_passed(mode.workspace.read(mode.work.state - at + 4 * USES, NUM_HALVES, np.int32), wrap)
        for _ in range(2):
            buffer.clean_low_latency_buffer(max(case.num_tokens), case.hidden, case.num_experts)
        assert have_passed(mode.workspace.read(mode.work.barriers - at, comm.size, np.int32), wrap)
        trips.append(Trip(buffer, case, options))
        trips[-1].whole()
        buffer.destroy()
        return [trip.outcome for trip in trips]

    for outcomes in zip(*nbep.spawn(main, case.num_ranks, "emulator", memory_model="checked"), strict=True):
        low_latency.check(case, options, outcomes, f"wrap {wrap:#x}")


def once_a_rank(wrap: int) -> None:
    with_low_latency(wrap, deduplicate=True)


def of_a_benchmark(wrap: int) -> None:
    """Messages and acknowledgements of `network_push`, which counts its rounds."""
    sizes = PushSizes(16, 1, 1, 0)

    def main(comm: Any) -> None:
        num_bytes = buffer_bytes(4, sizes)
        memory = nbep.SharedMemory.create(comm, -(-num_bytes // 128) * 128, transport="direct")
        kernel = over(network_push, memory.transport.network_type)
        before = wrap // 4 - 1  # rounds; in each four warps add to the cell of a queue, and a rank to the last one
        memory.symmetric.write(num_bytes - CELLS_BYTES, words(4 * before, 1))
        memory.symmetric.write(num_bytes - CELL_BYTES, words(before, 1))
        comm.barrier()
        for number in range(before + 1, before + 4):
            arguments = sizes._replace(round=number), memory.network, memory.bounds
            memory.runtime.launch(memory.comm_stream, kernel, 1, 128, smem_bytes(128, 16), *arguments)
        memory.wait()
        memory.close()

    nbep.spawn(main, 2, "emulator", memory_model="checked")


RESET = "its owner writes 0 before each use"
OF_A_CALL = "it begins at 0 in each launch and counts tokens or warps of it"
OF_THE_CALLER = "the caller's statistics: s32 counts tokens as in DeepEP, s64 cycles"
BACK_TO_0 = "each call adds to it and takes as much away: it counts how far one rank is ahead"
ANY = "any cell of another ledger"
OF_QUEUES = "see tests/network/test_counters_that_wrap.py"

# Ledger -> cell -> the run that starts from other numbers, or what keeps it small.
COUNTERS: dict[str, dict[str, Any]] = {
    "kernels/get_dispatch_layout.py": {"shared count[i]": OF_A_CALL, "totals[i]": RESET, "arrivals": RESET},
    "kernels/internode/cached_notify.py": {"arrived[n]": between_nodes},
    "kernels/internode/combine_forwarder.py": {"tails[c, d] of (n, l)": between_nodes, "heads[c, n]": between_nodes},
    "kernels/internode/combine_receiver.py": {"tails[c, d]": between_nodes, "heads[c, n] of (d, l)": between_nodes},
    "kernels/internode/coordinator.py": {"tails[c, n] of (d,l)": between_nodes, "heads[c, d] of (n,l)": between_nodes},
    "kernels/internode/dispatch_forwarder.py": {"tails[c, n]": between_nodes, "heads[c, d] of (n,l)": between_nodes},
    "kernels/internode/dispatch_sender.py": {"tails[c, n] of (d,l)": between_nodes, "heads[c, d]": between_nodes},
    "kernels/internode/meet_nodes.py": {
        "arrived[n]": between_nodes,
        "call[r, i]": "it changes once: the buffer is of no use then",
    },
    "kernels/internode/notify_dispatch.py": {"arrived[n]": between_nodes},
    "kernels/elastic/combine.py": {"next_token": RESET},
    "kernels/elastic/meet.py": {"arrived[s]": elastic_between_nodes},
    "kernels/intranode/direct_dispatch.py": {"arrived[s]": RESET},
    "kernels/parts/fetched_sums.py": {"next_token": RESET},
    "kernels/low_latency/calls.py": {"calls[h, s, word]": RESET},
    "kernels/low_latency/clean_low_latency_buffer.py": {"barrier_signal[a][b]": with_low_latency},
    "kernels/low_latency/combine.py": {"counts[e]": RESET, "arrivals[r]": RESET},
    "kernels/low_latency/coordinator.py": {
        "slots[h]": RESET,
        "counts, arrivals": RESET,
        "credit[h, peer]": with_low_latency,
        "credit[h, own]": with_low_latency,
    },
    "kernels/low_latency/deduplicated_combine.py": {"arrivals[r]": RESET, "parts sent": OF_A_CALL},
    "kernels/low_latency/deduplicated_dispatch.py": {
        "slots[h, e, r]": RESET,
        "arrivals[s]": RESET,
        "counts[e, s]": RESET,
        "histogram": OF_A_CALL,
        "cumulative_recv_stats": OF_THE_CALLER,
    },
    "kernels/low_latency/dispatch.py": {
        "slots[h, e]": RESET,
        "counts[e, s]": RESET,
        "cumulative_recv_stats": OF_THE_CALLER,
    },
    "kernels/network_push.py": {"arrived[q]": of_a_benchmark, "acknowledged": of_a_benchmark},
    "network/direct.py": {"message": ANY, "cell": ANY},
    "network/host.py": {"message": ANY},
    "network/ibgda/queue_pair.py": {"RESERVED": OF_QUEUES},
    "network/nic.py": {"cell there": ANY},
    "network/nvshmem.py": {"message in r": ANY},
    "kernels/parts/arrivals.py": {
        "count, arrival": RESET,
        "word": RESET,
        "sum": RESET,
        "credit": once_a_rank,
        "wait_recv_cost_stats": OF_THE_CALLER,
    },
    "protocols/barrier.py": {"signal[a][b]": BACK_TO_0},
    "kernels/parts/calls.py": {"signal[a][b]": BACK_TO_0},
    "protocols/grid_barrier.py": {"arrivals": "it is 0 or -2**31 between barriers, see test_grid_barrier.py"},
}
# What its owner alone counts on.
STORED = {
    "kernels/elastic/meet.py": {"called": elastic_between_nodes, "turn": elastic_between_nodes},
    "kernels/internode/coordinator.py": {"sent, received": between_nodes},
    "kernels/internode/meet_nodes.py": {"called": between_nodes},
    "kernels/internode/notify_dispatch.py": {"rounds, called": between_nodes},
    "kernels/low_latency/coordinator.py": {"state": with_low_latency},
    "kernels/low_latency/clean_low_latency_buffer.py": {"barriers[a][b]": with_low_latency},
    "protocols/host_barrier.py": {"sent[a][b]": in_the_hosts_memory, "sent[a][a]": in_the_hosts_memory},
    "network/ibgda/queue_pair.py": {"READY": OF_QUEUES},
    "network/nic.py": {"served, state": OF_QUEUES},
}
WRAPS = 1 << 15, 1 << 31, 1 << 32
RUNS = {
    run.__name__: run for cells in (*COUNTERS.values(), *STORED.values()) for run in cells.values() if callable(run)
}


def adds(order: str) -> bool:
    return order.startswith("atom_add") or order == "amo_add"


def test_the_list_has_every_cell_that_somebody_adds_to():
    found = {
        path: {row.cell for row in ledger.rows if any(map(adds, row.orders))} for path, ledger in read_ledgers().items()
    }
    assert {path: cells for path, cells in found.items() if cells} == {
        path: set(cells) for path, cells in COUNTERS.items()
    }
    for path, cells in STORED.items():
        assert cells.keys() <= {row.cell for row in read_ledgers()[path].rows}, path


@pytest.mark.parametrize(
    ("name", "wrap"),
    crossed([(name, 1 << 31) for name in RUNS if name not in ("once_a_rank", "elastic_between_nodes")], RUNS, WRAPS),
)
def test_a_counter_may_pass_a_power_of_two(name, wrap):
    RUNS[name](wrap)
