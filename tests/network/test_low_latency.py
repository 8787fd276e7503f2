"""Low-latency round trips over the software NIC, with delay and reordering: the results are the reference's bits.

On a GPU delays are in nanoseconds, and queue pairs are served by the warps of a block.
"""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
from low_latency import (
    ASYNC,
    HOOK,
    Options,
    Trip,
    check,
    make_buffer,
    make_low_latency_case,
    prepare,
    skip_what_the_target_lacks,
)
from low_latency_rounds import Sizes, make_plan, num_rdma_bytes, run_plan
from own_network import Stores
from parts import both_parts
from target import TARGET, spawn

import nbep
from nbep.device.cards import SM80
from nbep.device.network import nic as device_nic
from nbep.device.primitives import FULL_MASK, globaltimer, syncwarp

pytestmark = pytest.mark.long

LOOKS_INSIDE = pytest.mark.emulator_only("it looks at what single functions do")
SMALL = Sizes(hiddens=(128, 512), most_tokens=9, most_topk=4, experts_per_rank=(1, 3))
SHAPES = [(2, 1), (3, 1), (4, 2), (4, 1)]  # ranks, and of a node
MODELS = ["sc", "delayed", "checked"]


def run_rounds(comm, seed: int, num_nvl_peers: int, num_rounds: int) -> list[str]:
    """What is wrong on one rank, of rounds of all kinds and sizes on one buffer."""
    rng = random.Random(seed)
    nic = nbep.NicOptions(
        num_entries=64,
        chunk_bytes=rng.choice((256, 2048, 1 << 26)),
        seed=seed + 1,
        max_delay_ns=rng.choice((0, 300, 2000)),
    )
    buffer = nbep.Buffer(
        comm,
        num_rdma_bytes=num_rdma_bytes(comm.size, SMALL),
        low_latency_mode=True,
        transport="ibgda",
        num_nvl_peers=num_nvl_peers,
        num_qps_per_rank=rng.choice((1, 3, 4)),
        nic=nic,
    )
    wrong = []
    for number in range(num_rounds):
        plan = make_plan(rng, number, comm.size, SMALL)
        trips = [
            (case, replace(options, zero_copy=rng.random() < 0.4 and not options.use_logfmt))
            for case, options in plan.trips
        ]
        plan = plan._replace(trips=trips)
        wrong += [f"{plan}: {name}" for name in run_plan(buffer, plan)]
    buffer.destroy()
    return wrong


@pytest.mark.parametrize("seed", both_parts([], thorough=range(10), long=range(10, 53)))
def test_rounds_of_all_kinds_are_right(seed):
    num_ranks, num_nvl_peers = SHAPES[seed % len(SHAPES)]
    model = {"memory_model": MODELS[seed % len(MODELS)]} if TARGET == "emulator" else {}
    assert spawn(run_rounds, num_ranks, (seed, num_nvl_peers, 2), seed, **model) == [[]] * num_ranks


OPTIONS = [
    Options(),
    Options(use_fp8=True, dispatch_as=HOOK, combine_as=HOOK),
    Options(use_fp8=True, round_scale=True, use_ue8m0=True, combine_as=ASYNC, with_out=True),
    Options(use_logfmt=True, dispatch_as=ASYNC),
    Options(zero_copy=True, with_stats=True),
    Options(deduplicate=True, use_fp8=True),
    Options(deduplicate=True, zero_copy=True),
    Options(compute_capability=SM80),
    Options(compute_capability=SM80, use_fp8=True, deduplicate=True),
]


def round_trips(comm, cases, options: Options, nic: nbep.NicOptions, num_nvl_peers: int):
    prepare(comm, options)
    trips = [(case, options) for case in cases]
    buffer = make_buffer(comm, trips, transport="ibgda", num_nvl_peers=num_nvl_peers, nic=nic)
    outcomes = [Trip(buffer, *trip).whole() for trip in trips]
    buffer.destroy()
    return outcomes


QUICK = [1, 7]  # of OPTIONS


@pytest.mark.parametrize(
    ("options", "memory_model"),
    both_parts(
        [(OPTIONS[i], "sc") for i in QUICK],
        thorough=[
            *((options, "sc") for i, options in enumerate(OPTIONS) if i not in QUICK),
            *((options, model) for options in OPTIONS for model in ("delayed", "checked")),
        ],
    ),
)
def test_every_option_gives_the_references_bits(options, memory_model):
    if TARGET != "emulator" and memory_model != "sc":
        pytest.skip("a GPU has its own memory model")
    skip_what_the_target_lacks(options)
    seed = OPTIONS.index(options)
    cases = [make_low_latency_case(seed + i, num_tokens=(5, 3), num_topk=3, hidden=512) for i in range(2)]
    nic = nbep.NicOptions(num_entries=64, chunk_bytes=256, seed=seed + 1, max_delay_ns=500)
    by_rank = spawn(round_trips, 2, (cases, options, nic, 1), seed, memory_model=memory_model)
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        check(case, options, outcomes, f"schedule {seed}")


@LOOKS_INSIDE
def test_without_nvlink_everything_goes_through_the_nic():
    case = make_low_latency_case(3, num_ranks=4, num_tokens=3, num_topk=4)
    trace = Stores()

    def main(comm):
        arguments = {"transport": "ibgda", "num_nvl_peers": 4, "allow_nvlink_for_low_latency_mode": False}
        buffer = make_buffer(comm, [(case, Options())], **arguments)
        outcome = Trip(buffer, case, Options()).whole()
        buffer.destroy()
        return outcome

    check(case, Options(), nbep.spawn(main, 4, "emulator", tracer=trace), "")
    for rank in range(4):
        rung = {int(re.search(r"to rank (\d)", cell)[1]) for cell in trace.of("doorbell", rank)}
        assert rung == set(range(4)) - {rank}


# Zero copy: a NIC reads what it sends long after the kernel that sends it has ended.


def only_second_experts(seed: int):
    """A case in which rows are on queue 1 alone, so that credits, on queue 0, do not wait behind them."""
    case = make_low_latency_case(seed, num_tokens=4, num_topk=1, experts_per_rank=2, hidden=256, unused=0)
    return replace(case, topk_idx=[topk_idx | 1 for topk_idx in case.topk_idx])


@LOOKS_INSIDE
def test_a_zero_copy_buffer_is_handed_out_when_the_nic_has_read_what_was_sent_from_it(monkeypatch):
    """The NIC of rank 0 holds back the rows of the first combine until rank 0 writes those of the next to their place.

    Rank 0 has received all that was sent to it by then. It waits for its NIC, or other rows go out.
    """
    options = Options(dispatch_as=HOOK, combine_as=HOOK)
    cases = [only_second_experts(seed) for seed in range(2)]
    execute_write = device_nic.execute_write
    gate = {"closed": False, "patience": 1_000_000}

    def held_back(nic, entry, num_segments, peer, start, lane):
        if nic.rank == 0 and lane == 0:
            while gate["closed"] and gate["patience"] > 0:
                globaltimer()
                gate["patience"] -= 1
        syncwarp(FULL_MASK)
        return execute_write(nic, entry, num_segments, peer, start, lane)

    monkeypatch.setattr(device_nic, "execute_write", held_back)

    def main(comm):
        buffer = make_buffer(comm, [(case, options) for case in cases], transport="ibgda", num_nvl_peers=1)
        first = Trip(buffer, cases[0], options)
        first.send_dispatch()
        first.receive_dispatch()
        comm.barrier()
        if comm.rank == 0:
            gate["closed"] = True
        first.send_combine()
        receive_first = first._receive
        second = Trip(buffer, cases[1], replace(options, zero_copy=True))
        second.send_dispatch()
        second.receive_dispatch()
        receive_first()
        if comm.rank == 0:
            place = buffer.get_next_low_latency_combine_buffer(second.handle)
            place[:] = np.nan
            gate["closed"] = False
        second.send_combine()
        first._receive = lambda: None
        first.receive_combine()
        second.receive_combine()
        buffer.destroy()
        return first.outcome, second.outcome

    first, second = zip(*nbep.spawn(main, 2, "emulator"), strict=True)
    check(cases[0], options, first, "the first combine")
    check(cases[1], options, second, "the second combine")
    assert gate["patience"] == 0


@LOOKS_INSIDE
@pytest.mark.parametrize("on_deadlock", ["raise", "expire"])
def test_a_zero_copy_buffer_that_the_nic_never_reads_is_not_handed_out(on_deadlock):
    """A NIC that is stopped: nothing wakes the host. The emulator says so at once, or when the wait times out."""
    case = make_low_latency_case(1, num_tokens=4, num_topk=2, unused=0)
    options = Options(dispatch_as=HOOK)

    def main(comm):
        nic = nbep.NicOptions(stopped=(0, 0))
        buffer = make_buffer(comm, [(case, options)], transport="ibgda", num_nvl_peers=1, nic=nic)
        trip = Trip(buffer, case, options)
        trip.send_dispatch()
        if comm.rank == 0:
            trip.receive_dispatch()
            buffer.get_next_low_latency_combine_buffer(trip.handle)

    with pytest.raises(nbep.DeadlockError if on_deadlock == "raise" else nbep.PeerTimeout) as caught:
        nbep.spawn(main, 2, "emulator", on_deadlock=on_deadlock)
    text = str(caught.value)
    if on_deadlock == "raise":
        assert "the host of rank 0 waits for its NIC to read what goes to rank 1" in text
        return
    error = caught.value
    assert (error.rank, error.peer, error.role, error.cell) == (0, 1, "zero copy", None)
    assert text.startswith("rank 0: its NIC has not read what goes to rank 1 in 100000 ms\n  the network to rank 1: ")
    assert "done up to entry 0" in text
