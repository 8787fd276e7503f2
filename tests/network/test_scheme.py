"""The entries that low-latency calls write for the NIC, counted against DeepEP's scheme.

Source: DeepEP v1.2.1 csrc/kernels/internode_ll.cu: nvshmemi_ibgda_put_nbi_warp for each token and expert, and one
nvshmemi_ibgda_amo_nonfetch_add for each expert and rank. nbep's credits are atomics besides, and the words of a call.
"""

import re
from collections import Counter
from functools import cache
from typing import NamedTuple

import mlx5_layouts as mlx5
import numpy as np
import pytest
from cases import Case
from low_latency import Options, Trip, check, make_buffer, make_low_latency_case, prepare
from parts import both_parts

import nbep
from nbep.device.layout.low_latency import WORDS_OF_CALL

pytestmark = pytest.mark.emulator_only("it reads the entries as they are written")

SLOT = re.compile(r": entry (\d+) of queue pair \d+ \(queue (\d+) to rank (\d+)\) \+ (\d+) ")
CELL = re.compile(
    r"(counts|credits|arrivals|calls)\[half \d, rank \d+(?:, local expert (\d+)|, word \d)?\]|recv\[half \d\]"
)
DISPATCH, COMBINE = "low_latency_dispatch", "low_latency_combine"


class Entry(NamedTuple):
    """What one entry says. expert: the local expert whose count it adds to, if it does."""

    kernel: str
    rank: int
    peer: int
    queue: int
    opcode: int
    num_bytes: int
    cell: str
    expert: int


class Entries:
    """A tracer: the bytes of all entries. The queues must not wrap."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int, int, int], tuple[str, bytearray]] = {}  # rank, peer, queue, number
        self.segments: dict[int, dict] = {}  # what the addresses of a rank mean

    def on_store(self, thread, allocation, offset, kind, value, order, scope):
        slot = SLOT.search(allocation.cell(offset)) if allocation.name == "queue pairs" else None
        if slot is None:
            return
        number, queue, peer, byte = map(int, slot.groups())
        if peer not in self.segments:
            self.segments[peer] = dict(thread.world.spaces[peer].segments)
        place, empty = (thread.rank, peer, queue, number), bytearray(mlx5.ENTRY_BYTES)
        _, data = self.slots.setdefault(place, (thread.block.launch.name, empty))
        data[byte : byte + 16] = np.array(value, np.uint32).tobytes()

    def entries(self) -> list[Entry]:
        return [self._decode(*place, kernel, bytes(data)) for place, (kernel, data) in self.slots.items()]

    def _decode(self, rank: int, peer: int, queue: int, number: int, kernel: str, data: bytes) -> Entry:
        address = mlx5.unpack(mlx5.REMOTE_ADDRESS, data[16:32])["raddr"]
        memory = self.segments[peer][address >> 32]
        assert (memory.name, memory.rank) == ("rdma_buffer", peer)
        name, expert = CELL.search(memory.cell(address & 0xFFFFFFFF)).groups()
        opcode = mlx5.unpack(mlx5.CONTROL, data[:16])["opcode"]
        num_bytes = mlx5.unpack(mlx5.DATA, data[32:48])["byte_count"] if opcode == mlx5.OPCODE_RDMA_WRITE else 0
        local_expert = -1 if expert is None else int(expert)
        return Entry(kernel, rank, peer, queue, opcode, num_bytes, name or "message", local_expert)


@cache
def entries_of_trip(num_ranks: int, num_nvl_peers: int) -> list[Entry]:
    """Those of one plain trip with `make_case`."""
    return entries_of(make_case(num_ranks), Options(), num_nvl_peers)


def entries_of(case: Case, options: Options, num_nvl_peers: int, num_trips: int = 1) -> list[Entry]:
    """The entries of some trips, whose results are right. A buffer is one chunk, so that no message is in two."""
    trace = Entries()

    def main(comm):
        prepare(comm, options)
        trips = [(case, options)] * num_trips
        buffer = make_buffer(comm, trips, transport="ibgda", num_nvl_peers=num_nvl_peers, nic=nbep.NicOptions())
        outcomes = [Trip(buffer, case, options).whole() for _ in trips]
        buffer.destroy()
        return outcomes

    by_rank = nbep.spawn(main, case.num_ranks, "emulator", tracer=trace)
    for i in range(num_trips):
        check(case, options, [outcomes[i] for outcomes in by_rank], f"trip {i}")
    return trace.entries()


def count(entries: list[Entry], kernel: str, opcode: int, cell: str) -> Counter:
    """How many such entries there are, by (rank, peer, queue)."""
    return Counter(
        (entry.rank, entry.peer, entry.queue)
        for entry in entries
        if (entry.kernel, entry.opcode, entry.cell) == (kernel, opcode, cell)
    )


def unmapped(case: Case, num_nvl_peers: int) -> list[tuple[int, int]]:
    """All pairs of ranks that are not of one node."""
    ranks = range(case.num_ranks)
    return [(rank, peer) for rank in ranks for peer in ranks if rank // num_nvl_peers != peer // num_nvl_peers]


def choices(case: Case, rank: int, peer: int) -> Counter:
    """How often the tokens of a rank choose each expert of another, by its number there."""
    num_local = case.num_experts // case.num_ranks
    chosen = case.topk_idx[rank].ravel()
    return Counter(int(expert) % num_local for expert in chosen if expert >= 0 and expert // num_local == peer)


def words_sent(case: Case, num_nvl_peers: int) -> Counter:
    """The words of a call, which each rank tells every other one."""
    return Counter({(*pair, 0): WORDS_OF_CALL for pair in unmapped(case, num_nvl_peers)})


WRITE, ADD = mlx5.OPCODE_RDMA_WRITE, mlx5.OPCODE_MASKED_FETCH_ADD
SHAPES = both_parts([(3, 1)], thorough=[(4, 2)])


def make_case(num_ranks: int, routing: str = "uniform") -> Case:
    num_tokens = [5, 0, 7, 3][:num_ranks]
    return make_low_latency_case(
        num_ranks, num_ranks=num_ranks, num_tokens=num_tokens, num_topk=4, experts_per_rank=3, routing=routing
    )


@pytest.mark.parametrize(("num_ranks", "num_nvl_peers"), SHAPES)
def test_a_dispatch_is_a_write_for_each_token_and_expert_and_an_atomic_for_each_expert_and_rank(
    num_ranks, num_nvl_peers
):
    case = make_case(num_ranks)
    entries = entries_of_trip(num_ranks, num_nvl_peers)
    writes, adds, differing = Counter(), Counter(), words_sent(case, num_nvl_peers)
    for rank, peer in unmapped(case, num_nvl_peers):
        writes.update({(rank, peer, expert): n for expert, n in choices(case, rank, peer).items()})
        adds.update({(rank, peer, expert): 1 for expert in range(3)})  # also of experts that get nothing
    assert count(entries, DISPATCH, WRITE, "message") == writes
    assert count(entries, DISPATCH, ADD, "counts") == adds
    of_dispatch = [entry for entry in entries if entry.kernel == DISPATCH]
    assert count(entries, DISPATCH, ADD, "calls") == differing
    assert len(of_dispatch) == writes.total() + adds.total() + differing.total()
    assert len({entry.num_bytes for entry in of_dispatch if entry.opcode == WRITE}) == 1


@pytest.mark.parametrize(("num_ranks", "num_nvl_peers"), SHAPES)
def test_a_combine_is_a_write_for_each_row_and_an_atomic_for_each_expert_and_source_with_rows(num_ranks, num_nvl_peers):
    case = make_case(num_ranks)
    entries = entries_of_trip(num_ranks, num_nvl_peers)
    writes, adds, given, differing = Counter(), Counter(), Counter(), words_sent(case, num_nvl_peers)
    for rank, peer in unmapped(case, num_nvl_peers):
        rows = choices(case, peer, rank)
        writes.update({(rank, peer, expert): n for expert, n in rows.items()})
        adds.update({(rank, peer, expert): 1 for expert in rows})
        given[rank, peer, 0] = 1  # for the dispatch
    assert count(entries, COMBINE, WRITE, "message") == writes
    assert count(entries, COMBINE, ADD, "counts") == adds
    assert count(entries, COMBINE, ADD, "credits") == given
    of_combine = [entry for entry in entries if entry.kernel == COMBINE]
    assert count(entries, COMBINE, ADD, "calls") == differing
    assert len(of_combine) == writes.total() + adds.total() + given.total() + differing.total()


def test_data_and_count_of_an_expert_share_a_queue_pair():
    entries = entries_of_trip(3, 1)
    for entry in entries:
        if entry.cell == "counts":
            assert entry.queue == entry.expert
    counts = {(e.kernel, e.rank, e.peer, e.queue) for e in entries if e.cell == "counts"}
    assert {(e.kernel, e.rank, e.peer, e.queue) for e in entries if e.cell == "message"} <= counts


def test_a_later_call_gives_one_credit_to_each_rank_besides():
    num_trips = 2
    case = make_case(2)
    entries = entries_of(case, Options(), 1, num_trips)
    for kernel, launches in ((DISPATCH, num_trips - 1), (COMBINE, num_trips)):
        assert count(entries, kernel, ADD, "credits") == {(*pair, 0): launches for pair in unmapped(case, 1)}
        assert count(entries, kernel, ADD, "arrivals") == {}
    assert count(entries, DISPATCH, ADD, "counts").total() == num_trips * case.num_experts  # each from the other rank


@pytest.mark.parametrize(("num_ranks", "num_nvl_peers"), SHAPES)
def test_with_deduplicate_a_token_goes_to_each_rank_once_with_its_note(num_ranks, num_nvl_peers):
    """Two writes a message, values and note; an atomic for each expert and rank, and one for all messages of a rank."""
    case = make_case(num_ranks)
    entries = entries_of(case, Options(deduplicate=True), num_nvl_peers)
    pairs = unmapped(case, num_nvl_peers)
    num_local = case.num_experts // case.num_ranks
    writes = Counter()
    for rank, peer in pairs:
        owners = np.where(case.topk_idx[rank] >= 0, case.topk_idx[rank] // num_local, -1)
        writes[rank, peer, 0] = 2 * int((owners == peer).any(axis=1).sum())
    assert count(entries, DISPATCH, WRITE, "message") == writes
    assert count(entries, DISPATCH, ADD, "counts") == {(*pair, 0): num_local for pair in pairs}
    assert count(entries, DISPATCH, ADD, "arrivals") == {(*pair, 0): 1 for pair in pairs}
