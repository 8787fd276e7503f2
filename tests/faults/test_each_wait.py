"""Each wait of nbep's kernels expires once, and each report is provoked: the result is right, or the call raises.

WAITS has every place where a kernel waits, and which site it reports; ELSEWHERE has what no such wait reports, with the
test that provokes it. Together they have all sites.
"""

from functools import cache
from pathlib import Path

import internode
import intranode
import low_latency
import numpy as np
import pytest
from cases import make_case
from in_trouble import MODES, Mode, normal, run
from parts import both_parts
from target import spawn
from troubles import ANY_RANK, EXPIRED, Trouble

import nbep
from nbep.device.compile import load_kernels
from nbep.device.jit import over
from nbep.device.kernels.network_push import PushSizes, buffer_bytes, network_push, smem_bytes
from nbep.device.protocols.waits import OWN_SITES, SITES
from nbep.host.calls import CallLog
from nbep.specimens.workloads.cases import only_to

pytestmark = pytest.mark.emulator_only("what goes wrong is planted in the emulator")

# Rings of one or two slots, which are full now and then.
FULL = {
    "intranode": normal(
        intranode.Options(nbep.Config(2, 1, 2)),
        make_case(3, num_ranks=2, num_tokens=(6, 5), hidden=16, num_topk=3, routing="everywhere"),
    ),
    "internode": normal(
        internode.Options(nbep.Config(2, 1, 2, 1, 2)),
        internode.make_node_case(3, num_tokens=[6, 5, 6, 4], num_topk=3, hidden=16, routing="everywhere"),
    ),
}
# A coordinator's wait: those that it stands behind may still come on, so it looks twice.
COORDINATORS = {7, 22, 25, 31}
MEET = "wait_call < meet_by_adding < wait_peer"
# Of a mode: who waits, and the site of the report.
WAITS: dict[str, dict[str, int]] = {
    "intranode, full": {
        f"{MEET} < meet_block in intranode/notify_dispatch": 1,
        "wait_announced < receive_offsets < receive_tokens in intranode/dispatch": 3,
        "wait_tail_past < receive_tokens in intranode/dispatch": 4,
        "wait_free_slots < send_tokens in intranode/dispatch": 2,
        f"{MEET} < meet_block in intranode/cached_notify": 1,
        "coordinate in intranode/combine": 7,
        "wait_shared_tail_past < receive_tokens in intranode/combine": 6,
        "wait_free_slots < send_tokens in intranode/combine": 5,
    },
    "without rings": {
        "wait_blocks_arrived < receive in intranode/direct_dispatch": 32,
        f"{MEET} < meet_block in intranode/offer_rows": 1,
    },
    "internode": {
        "wait_arrivals < barrier_grid in internode/notify_dispatch": 9,
        "wait_arrived < wait_node < exchange in internode/notify_dispatch": 20,
        f"{MEET} < exchange in internode/notify_dispatch": 1,
        "find_batch < next_batch < deliver_tokens < forward in internode/dispatch": 23,
        "find_batch < next_batch < forward_tokens < forward in internode/dispatch": 23,
        "wait_tail_past < receive_tokens < send_and_receive in internode/dispatch": 26,
        "wait_call < meet_by_adding < wait_peer < come_together in internode/cached_notify": 1,
        "wait_arrived < wait_node < come_together in internode/cached_notify": 20,
        "wait_total < receive_sums < send_and_receive in internode/combine": 30,
        "wait_tail_past < forward_sums < forward in internode/combine": 28,
        "publish_slots < publish_tails < coordinate_senders < send_and_receive in internode/dispatch": 22,
        "publish_slots < publish_heads < coordinate_forwarders < forward in internode/dispatch": 25,
        "publish_nvl_heads < forward in internode/combine": 25,
        "publish_slots < publish_tails < coordinate_sums < forward in internode/combine": 25,
        "publish_slots < publish_heads < coordinate_receivers < send_and_receive in internode/combine": 31,
    },
    "internode, full": {
        "wait_total_free < send_tokens < send_and_receive in internode/dispatch": 21,
        "wait_free_slots < forward_tokens < forward in internode/dispatch": 24,
        "wait_total_free < forward_sums < forward in internode/combine": 29,
        "find_room < send_rows < send_and_receive in internode/combine": 27,
    },
    "internode over ibgda": {
        "wait_turn < submit < post_few < put_nbi_warp < put_part < send_token < send_tokens < send_and_receive in "
        "internode/dispatch": 16
    },
    "low latency": {
        "wait_arrival < wait_counts < receive_choices in low_latency/dispatch": 11,
        "wait_number < compare_calls in low_latency/dispatch": 37,
        "wait_arrival < locate_row < list_rows < receive_rows in low_latency/combine": 12,
        "wait_number < compare_calls in low_latency/combine": 37,
    },
    "low latency, deduplicate": {
        "wait_arrival < wait_sources < receive_from_ranks in low_latency/dispatch": 11,
        "wait_number < load_counts < receive_from_ranks in low_latency/dispatch": 11,
        "wait_arrival < locate_row < list_rows < receive_rows in low_latency/combine": 12,
    },
    "low latency over ibgda": {
        "wait_turn < submit < post_add < amo_add < empty_half < end_earlier_calls in low_latency/combine": 16,
        "wait_turn < submit < post_few < put_nbi_warp < put_row < send_expert_rows in low_latency/combine": 16,
    },
}
# Site -> the test that provokes it.
ELSEWHERE = {
    8: "faults/test_each_wait.py::test_too_few_rows_for_what_passes_through_are_reported",
    10: "faults/test_each_wait.py::test_a_half_that_a_peer_never_frees",
    13: "faults/test_each_wait.py::test_calls_that_do_not_take_the_halves_in_turn",
    14: "faults/test_each_wait.py::test_an_expert_that_is_chosen_twice",
    15: "faults/test_each_wait.py::test_a_rank_that_does_not_come_to_a_clean",
    17: "network/test_nic_troubles.py::test_who_waits_for_room_reports_the_last_entry_that_is_done",
    18: "network/test_wrong_entries.py::test_a_wrong_entry_ends_in_an_error_that_names_peer_queue_entry_and_syndrome",
    19: "faults/test_each_wait.py::test_a_neighbour_that_does_not_push",
    35: "host/test_calls_alike.py::test_a_peer_that_does_not_tell_its_words_is_named",
    38: "low_latency/test_calls_alike.py::test_all_ranks_name_the_one_that_differs",
    39: "elastic/test_elastic_calls.py::test_a_rank_that_waits_too_long_says_for_whom",
}


def mode_of(name: str) -> Mode:
    return FULL[name.removesuffix(", full")] if name.endswith(", full") else MODES[name]


@cache
def looks(name: str, seed: int) -> dict[str, set[int]]:
    """Where a run of a mode looks at a deadline, and the ranks that do."""
    found: dict[str, set[int]] = {}
    for look in run(mode_of(name), Trouble(EXPIRED, ANY_RANK, -1), seed)[1]:
        found.setdefault(look.site, set()).add(look.rank)
    return found


ROWS = [(name, site) for name, sites in WAITS.items() for site in sites]
QUICK = "intranode, full", "without rings"
SHORT = [
    row
    for row in ROWS
    if row[0] in QUICK or row[1].startswith(("find_batch < next_batch < f", "wait_arrival < wait_c"))
]


@pytest.mark.parametrize(("name", "site"), both_parts(SHORT, thorough=[row for row in ROWS if row not in SHORT]))
def test_a_wait_that_expires_is_reported_and_nothing_wrong_is_given(name, site):
    number = WAITS[name][site]
    seed = next(seed for seed in range(20) if site in looks(name, seed))
    for rank in looks(name, seed)[site]:
        raised: list[Exception] = []
        trouble = Trouble(EXPIRED, rank, 0, site, lasts=number in COORDINATORS)
        wrong, _ = run(mode_of(name), trouble, seed, raised)
        assert not wrong, f"{trouble}, seed {seed}: {wrong}"
        assert [error.report.site for error in raised[:1]] == [number], f"{trouble}, seed {seed}: {raised}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", WAITS)
def test_the_table_has_every_wait_of_a_run(name):
    known = {site for sites in WAITS.values() for site in sites}
    found = {site for seed in range(3) for site in looks(name, seed) if not site.startswith("must_stop")}
    assert {site for site in found if "wait_turn < " not in site} <= known  # every entry on a queue waits for its turn


def test_every_site_is_provoked():
    load_kernels()
    numbers = {number for sites in WAITS.values() for number in sites.values()}
    assert numbers & ELSEWHERE.keys() == set()
    assert numbers | ELSEWHERE.keys() == {number for number in SITES if number < OWN_SITES}
    for place in ELSEWHERE.values():
        path, _, test = place.partition("::")
        assert f"def {test}" in (Path(__file__).parents[1] / path).read_text(), place


# Reports that no wait of a run above makes


@pytest.mark.parametrize("is_enough", [False, True])
def test_too_few_rows_for_what_passes_through_are_reported(is_enough):
    """All tokens go to rank 1. Those of the other node come through rank 0, which keeps none of them."""
    case = internode.make_node_case(2, num_tokens=6, num_topk=4, hidden=16, routing="everywhere")
    case = only_to(case, [[1]] * 4)
    options = internode.Options(nbep.Config(2, 2, 8, 2, 4), num_worst_tokens=24)
    errors = []

    def main(comm):
        buffer = intranode.make_buffer(comm, case, options)
        _, arguments = intranode.dispatch_arguments(buffer, case, options, comm.rank)
        if comm.rank != 1 and not is_enough:
            arguments["num_worst_tokens"] = 4  # each rank of the node passes on as many at most
        try:
            buffer.dispatch(**arguments)
        except (ValueError, nbep.PeerTimeout) as error:
            errors.append((comm.rank, str(error)))

    spawn(main, 4, on_deadlock="expire")
    assert bool(errors) is not is_enough
    assert is_enough or any(rank == 0 and "recv_x: got 8 rows on rank 0" in text for rank, text in errors), errors


def two_ranks(**more):
    case = low_latency.make_low_latency_case(1, num_ranks=2, num_tokens=2, num_topk=2)
    return case, low_latency.Options(dispatch_as=low_latency.HOOK, **more)


def test_a_half_that_a_peer_never_frees():
    case, options = two_ranks()

    def main(comm):
        buffer = low_latency.make_buffer(comm, [(case, options)])
        trips = [low_latency.Trip(buffer, case, options) for _ in range(3)]
        trips[0].send_dispatch()
        trips[1].send_dispatch()
        if comm.rank == 0:
            trips[0].receive_dispatch()
            with pytest.raises(nbep.PeerTimeout, match="the peer's half of the buffer to be free again") as caught:
                trips[2].send_dispatch()
            assert caught.value.report.site == 10

    spawn(main, 2, on_deadlock="expire")


def test_calls_that_do_not_take_the_halves_in_turn():
    """As replays of a graph with an odd number of calls."""
    case, options = two_ranks()

    def main(comm):
        buffer = low_latency.make_buffer(comm, [(case, options)])
        buffer._memory.low_latency.num_calls = 1
        with pytest.raises(ValueError, match=f"got one in half 1 on rank {comm.rank}; must be in half 0"):
            low_latency.Trip(buffer, case, options).whole()

    spawn(main, 2, on_deadlock="expire")


def test_an_expert_that_is_chosen_twice(monkeypatch):
    """As what a graph replays with other contents: on a GPU they are not checked."""
    monkeypatch.setattr("nbep.host.low_latency.dispatch.check_choices", lambda *_: None)

    def main(comm):
        num_bytes = nbep.Buffer.get_low_latency_rdma_size_hint(1, 128, 2, 2)
        buffer = nbep.Buffer(comm, num_rdma_bytes=num_bytes, low_latency_mode=True)
        x, topk_idx = np.ones((1, 128), nbep.reference.BF16), np.zeros((1, 2), np.int64)
        with pytest.raises((ValueError, nbep.PeerTimeout)) as caught:
            buffer.low_latency_dispatch(x, topk_idx, 1, 2, use_fp8=False)
        return str(caught.value)

    assert all("]: got 0 on rank" in text for text in spawn(main, 2, on_deadlock="expire"))


def test_a_rank_that_does_not_come_to_a_clean():
    case, options = two_ranks()

    def main(comm):
        buffer = low_latency.make_buffer(comm, [(case, options)])
        if comm.rank == 0:
            with pytest.raises(nbep.PeerTimeout, match="the peer's arrival at the barrier") as caught:
                buffer.clean_low_latency_buffer(max(case.num_tokens), case.hidden, case.num_experts)
            assert caught.value.report.site == 15

    spawn(main, 2, on_deadlock="expire")


def test_a_neighbour_that_does_not_push():
    sizes = PushSizes(16, 1, 1, 1)

    def main(comm):
        memory = nbep.SharedMemory.create(comm, -(-buffer_bytes(1, sizes) // 128) * 128, transport="direct")
        if comm.rank == 0:
            arguments = sizes, memory.network, memory.bounds
            kernel = over(network_push, memory.transport.network_type)
            memory.runtime.launch(memory.comm_stream, kernel, 1, 32, smem_bytes(32, 16), *arguments)
            with pytest.raises(nbep.PeerTimeout, match="the neighbour's messages") as caught:
                memory.wait()
            assert caught.value.report.site == 19

    spawn(main, 2, on_deadlock="expire")


def test_a_rank_of_another_node_that_does_not_tell_its_words(monkeypatch):
    monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))  # as in processes
    monkeypatch.setattr("nbep.device.kernels.internode.meet_nodes.send_call", lambda *_: None)
    case = internode.make_node_case(2, 2, 1, num_tokens=2, num_topk=2, hidden=16)
    options = [internode.Options(nbep.Config(2, 2, 8, 2, num_slots)) for num_slots in (4, 6)]

    def main(comm):
        buffer = intranode.make_buffer(comm, case, options[1])
        with pytest.raises(nbep.PeerTimeout, match="the peer to say what it has called: something else") as caught:
            intranode.dispatch(buffer, case, options[comm.rank], comm.rank)
        return caught.value.report.site

    assert spawn(main, 2, on_deadlock="expire") == [35, 35]
