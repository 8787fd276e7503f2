"""Schedules: one seed is one run, all seeds give one result, and small rings make senders wait."""

import hashlib
import re

import pytest
from cases import make_case
from intranode import Options, round_trip, run
from parts import both_parts, dear
from target import MEMORY_MODELS

import nbep
from nbep.device.cards import SM80

pytestmark = pytest.mark.emulator_only("a seed gives a schedule, and a tracer sees it")

BUFFER = "nvl_buffer"


class Fingerprint:
    """A hash over every access in the order of the run."""

    def __init__(self):
        self.hash = hashlib.sha256()

    def add(self, what, thread, allocation, offset, value):
        place = (thread.rank, thread.block_idx, thread.thread_idx, allocation.name, offset)
        self.hash.update(repr((what, *place, str(value))).encode())

    def on_load(self, thread, allocation, offset, kind, value, order, scope):
        self.add("load", thread, allocation, offset, value)

    def on_store(self, thread, allocation, offset, kind, value, order, scope):
        self.add("store", thread, allocation, offset, value)

    def on_atomic(self, thread, allocation, offset, atomic, order, scope):
        self.add("atomic", thread, allocation, offset, atomic.old)


class RingWatcher:
    """Follows head and tail of every ring of every rank, and who waits for a head."""

    def __init__(self):
        self.cells: dict = {}  # (kernel, rank, ring) -> {"head": value, "tail": value}
        self.fullest: dict[str, int] = {}  # kernel -> most slots in use in one ring
        self.wrapped: set[str] = set()
        self.waiting_senders: set[tuple[str, int]] = set()  # (kernel, rank of the sender)

    def on_store(self, thread, allocation, offset, kind, value, order, scope):
        match = self.ring_cell(allocation, offset)
        kernel = thread.block.launch.name
        if match is not None and kernel in ("dispatch", "combine"):
            name, ring = match.groups()
            cells = self.cells.setdefault((kernel, allocation.rank, ring), {"head": 0, "tail": 0})
            assert value >= cells[name], f"{name} of ring {ring} at rank {allocation.rank} moves back"
            cells[name] = value
            used = cells["tail"] - cells["head"]
            assert used >= 0, f"head of ring {ring} at rank {allocation.rank} is past its tail"
            self.fullest[kernel] = max(self.fullest.get(kernel, 0), used)

    def on_park(self, thread, cells):
        for allocation, offset, *_ in cells:
            match = self.ring_cell(allocation, offset)
            if match is not None and match[1] == "head":
                self.waiting_senders.add((thread.block.launch.name, thread.rank))

    @staticmethod
    def ring_cell(allocation, offset):
        if getattr(allocation, "name", None) != BUFFER:  # a thread may wait for an mbarrier, too
            return None
        return re.fullmatch(r"(head|tail)\[(.*)\]", allocation.describe(offset))


def fingerprint(seed: int, memory_model: str = "sc") -> str:
    tracer = Fingerprint()
    run(make_case(1, num_tokens=5), seed=seed, memory_model=memory_model, tracer=tracer)
    return tracer.hash.hexdigest()


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
def test_same_seed_gives_the_same_schedule(memory_model):
    assert fingerprint(7, memory_model) == fingerprint(7, memory_model)


@pytest.mark.emulator_only("new arrays of a GPU hold what the memory held before")
def test_rows_that_nothing_wrote_are_the_same_in_every_run():
    options = Options(num_worst_tokens=20)
    first, second = (run(make_case(1), options) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.recv_x.tobytes() == b.recv_x.tobytes()


@dear
def test_other_seeds_give_other_schedules():
    assert len({fingerprint(seed) for seed in range(5)}) == 5


@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("seeds", both_parts([range(1)], thorough=[range(1, 16)], long=[range(16, 40)]))
def test_all_seeds_give_one_result(seeds, memory_model):
    case = make_case(2, num_tokens=(9, 6), hidden=128, num_topk=3)
    for seed in seeds:
        run(case, Options(num_biases=1), seed=seed, memory_model=memory_model)
        run(
            case,
            Options(fp8="column", config=nbep.Config(2, 3, 5, num_threads=128)),
            seed=seed,
            memory_model=memory_model,
        )


@dear
@pytest.mark.parametrize(
    ("num_ranks", "seeds"),
    both_parts([(4, range(1))], thorough=[(4, range(1, 3)), (8, range(1))], long=[(4, range(3, 8)), (8, range(1, 5))]),
)
@pytest.mark.parametrize("memory_model", ["delayed", "checked"])
def test_more_ranks_give_one_result_if_stores_may_be_late_or_must_be_ordered(num_ranks, seeds, memory_model):
    for seed in seeds:
        run(make_case(3, num_ranks=num_ranks, num_tokens=4, num_topk=3), seed=seed, memory_model=memory_model)


@pytest.mark.parametrize(
    ("num_slots", "seeds"), both_parts([(3, range(2))], thorough=[(3, range(2, 9)), (5, range(16))])
)
def test_senders_wait_for_slots_of_rings_smaller_than_the_traffic(num_slots, seeds):
    case = make_case(4, num_tokens=24, routing="everywhere")
    waiting_senders = set()
    for seed in seeds:
        watcher = RingWatcher()
        run(case, Options(nbep.Config(2, 2, num_slots)), seed=seed, tracer=watcher)
        waiting_senders |= watcher.waiting_senders
        check_small_rings(watcher, num_slots)
    assert waiting_senders == {(kernel, rank) for kernel in ("dispatch", "combine") for rank in range(2)}


def check_small_rings(watcher, num_slots):
    """Of two ranks that send each other 24 tokens."""
    for kernel in ("dispatch", "combine"):
        rings = {key: cells for key, cells in watcher.cells.items() if key[0] == kernel}
        assert {(rank, ring) for _, rank, ring in rings} == {(0, "channel 0, src 1"), (1, "channel 0, src 0")}, (
            "what a rank sends to itself takes no ring"
        )
        assert all(cells["tail"] == 24 for cells in rings.values()), "every ring wraps"
        assert watcher.fullest[kernel] <= num_slots


def test_no_sender_waits_for_rings_larger_than_the_traffic():
    watcher = RingWatcher()
    case = make_case(4, num_tokens=8, routing="everywhere")
    run(case, Options(nbep.Config(2, 2, 16)), seed=1, tracer=watcher)
    assert watcher.waiting_senders == set()
    assert watcher.fullest["dispatch"] <= 8


def test_kernels_without_bulk_copies_give_the_same():
    def main(comm, case, options):
        comm.runtime.world.compute_capability = SM80
        return round_trip(comm, case, options)

    run(make_case(5, num_tokens=9, hidden=264), fn=main)
    run(make_case(6, num_tokens=9, hidden=128), Options(fp8="row"), fn=main)
