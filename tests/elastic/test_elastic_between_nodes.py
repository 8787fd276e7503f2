"""ElasticBuffer between nodes, against the reference: every form, over both transports of the emulator."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from cases import make_case
from elastic import (
    Crossings,
    ElasticOptions,
    check,
    dispatch_arguments,
    make_elastic_buffer,
    received_trips,
    round_trip,
    run,
    time_outs,
)
from parts import both_parts, crossed, dear
from target import MEMORY_MODELS, spawn

import nbep
from nbep import deep_ep
from nbep.device.cards import SM80
from nbep.host.calls import CallLog

pytestmark = pytest.mark.emulator_only("a GPU's virtual ranks are of one node")

ALONE = ElasticOptions(expert_alignment=3, num_nodes=2, allow_hybrid_mode=False)
FORMS = {
    "compact": ALONE,
    "expanded": replace(ALONE, do_expand=True),
    "one reduction": replace(ALONE, do_expand=True, allow_multiple_reduction=False),
    "hybrid": replace(ALONE, allow_hybrid_mode=True),
    "hybrid, expanded": replace(ALONE, do_expand=True, allow_hybrid_mode=True),
}
TRANSPORTS = "direct", "ibgda"
transport = pytest.mark.parametrize("transport", both_parts(["direct"], thorough=["ibgda"]))


class RowsThatCross(Crossings):
    """Counts rows that come to inboxes: (the rank that they are from, where they come to)."""

    def find(self, name, src, dst):
        begins = re.fullmatch(r"x\[half \d, row \d+\], inbox \d+", name)  # where a row begins
        return (src, dst) if begins else None


@pytest.mark.parametrize(
    ("form", "transport"),
    crossed([("hybrid", "ibgda")], FORMS, TRANSPORTS),
)
@pytest.mark.parametrize("num_nodes", both_parts([2], thorough=[4]))
def test_tokens_arrive_in_order_and_return(form, transport, num_nodes):
    case = make_case(1, num_ranks=4, num_tokens=5, num_topk=3, experts_per_rank=3)
    run(case, replace(FORMS[form], transport=transport, num_nodes=num_nodes))


@pytest.mark.parametrize(("is_hybrid", "transport"), crossed([(True, "direct")], (False, True), TRANSPORTS))
@pytest.mark.parametrize(("num_nodes", "num_ranks"), both_parts([(2, 4)], thorough=[(2, 6), (3, 6), (4, 8)]))
def test_in_hybrid_mode_a_row_crosses_the_network_once_for_each_node(is_hybrid, num_nodes, num_ranks, transport):
    """To the rank with the sender's local index; else once for each rank that has one of its experts."""
    case = make_case(4, num_ranks=num_ranks, num_tokens=5, num_topk=5)
    size = num_ranks // num_nodes
    rows = RowsThatCross()
    options = replace(FORMS["compact"], num_nodes=num_nodes, transport=transport, allow_hybrid_mode=is_hybrid)
    run(case, options, tracer=rows)
    wanted: Counter[tuple[int, int]] = Counter()
    for src in range(num_ranks):
        for experts in case.topk_idx[src]:
            destinations = {int(expert) * num_ranks // case.num_experts for expert in experts if expert >= 0}
            away = {dst for dst in destinations if dst // size != src // size}
            if is_hybrid:
                away = {dst // size * size + src % size for dst in away}
            wanted.update((src, dst) for dst in away)
    assert rows.found == wanted


@pytest.mark.parametrize(("form", "transport"), crossed([("hybrid", "direct")], FORMS, TRANSPORTS))
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize("seed", both_parts([1], thorough=range(2, 6)))
def test_any_schedule_without_cpu_sync_and_with_a_handle(form, transport, memory_model, seed):
    case = make_case(seed, num_ranks=4, num_tokens=(4, 0, 3, 6), num_topk=5)
    options = replace(FORMS[form], transport=transport, do_cpu_sync=False, is_cached=True, num_biases=2)
    run(case, replace(options, own_weights=True, with_stats=True), seed=seed, memory_model=memory_model)


@pytest.mark.parametrize(("form", "transport"), crossed([("hybrid, expanded", "ibgda")], FORMS, TRANSPORTS))
@pytest.mark.parametrize("num_tokens", both_parts([[0, 7, 0, 1]], thorough=[0, 1, 13]))
def test_any_number_of_tokens_including_none(form, transport, num_tokens):
    case = make_case(2, num_ranks=4, num_tokens=num_tokens)
    run(case, replace(FORMS[form], transport=transport, do_cpu_sync=False))


@dear
@transport
@pytest.mark.parametrize("with_weights", both_parts([True], thorough=[False]))
@pytest.mark.parametrize("form", both_parts(["hybrid, expanded"], thorough=["compact", "expanded", "hybrid"]))
def test_fp8_with_scales_and_a_handle(form, with_weights, transport):
    case = make_case(3, num_ranks=4, num_tokens=5, hidden=256)
    options = replace(FORMS[form], fp8="mixed", by_column=True, is_cached=True, expert_alignment=4)
    run(case, replace(options, with_weights=with_weights, transport=transport))


@transport
@pytest.mark.parametrize(("hidden", "has_engine"), both_parts([(4608, True)], thorough=[(264, False), (4608, False)]))
def test_rows_that_take_two_stages_and_cards_without_a_copy_engine(hidden, has_engine, transport):
    def main(comm, case, options):
        if not has_engine:
            comm.runtime.world.compute_capability = SM80
        return round_trip(comm, case, options)

    run(make_case(6, num_tokens=3, hidden=hidden), replace(FORMS["compact"], transport=transport), fn=main)


@transport
def test_a_token_that_names_an_expert_twice_has_two_rows_there(transport):
    case = make_case(8, num_tokens=5, num_topk=4)
    for topk_idx in case.topk_idx:
        topk_idx[::2, 1] = topk_idx[::2, 0]
        topk_idx[1, :] = 3
    run(case, replace(FORMS["one reduction"], transport=transport))


@dear
@transport
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.parametrize(
    ("form", "num_ranks"),
    both_parts([("expanded", 2)], thorough=[("expanded", 3), ("hybrid", 4), ("hybrid, expanded", 4)]),
)
def test_calls_one_behind_another_without_waiting(form, num_ranks, transport, memory_model):
    """Three dispatches, whose handles are all in flight, then their combines; twice."""
    num_nodes = 3 if num_ranks == 3 else 2
    options = replace(FORMS[form], transport=transport, do_cpu_sync=False, num_nodes=num_nodes)
    num_tokens = (3, 1, 4, 0)[:num_ranks]
    cases = [make_case(number, num_ranks=num_ranks, num_tokens=num_tokens, num_topk=3) for number in range(3)]

    def main(comm):
        buffer = make_elastic_buffer(comm, [(case, options) for case in cases])
        outcomes = []
        for _ in range(2):
            trips = received_trips(buffer, cases, options)
            for trip in trips:
                trip.combine()
            outcomes += [trip.end() for trip in trips]
        buffer.destroy()
        return outcomes

    results = spawn(main, num_ranks, seed=3, memory_model=memory_model)
    for number, outcomes in enumerate(zip(*results, strict=True)):
        check(cases[number % 3], options, list(outcomes), f"call {number}")


def test_the_environment_says_what_a_node_is(monkeypatch):
    monkeypatch.setenv("NBEP_NUM_NVL_PEERS", "2")
    monkeypatch.setenv("NBEP_TRANSPORT", "ibgda")

    def main(comm):
        buffer = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=8, hidden=16, num_topk=2)
        hint = deep_ep.ElasticBuffer.get_buffer_size_hint(comm, 8, 16, 2)
        of_group = deep_ep.get_physical_domain_size(comm), deep_ep.get_logical_domain_size(comm)
        assert of_group == (buffer.get_physical_domain_size(), buffer.get_logical_domain_size())
        assert hint == buffer.num_bytes
        assert buffer.get_theoretical_num_sms(16, 4) % 2 == 0
        buffer.destroy()
        return buffer.num_scaleout_ranks, buffer.num_scaleup_ranks, buffer.num_rdma_ranks, buffer.num_nvlink_ranks

    assert spawn(main, 4) == [(2, 2, 2, 2)] * 4


def test_a_buffer_of_given_bytes_is_divided_alike_on_all_ranks_or_refused(monkeypatch):
    monkeypatch.setenv("NBEP_NUM_NVL_PEERS", "1")
    case = make_case(1, num_tokens=5)

    def main(comm):
        with pytest.raises(ValueError, match=r"num_max_tokens_per_rank, hidden, num_topk .*must be the same"):
            nbep.ElasticBuffer(comm, num_bytes=4 << 20, hidden=16 + 16 * comm.rank, num_topk=1 + comm.rank)
        with pytest.raises(ValueError, match=r"allow_hybrid_mode: .*must be the same"):
            nbep.ElasticBuffer(comm, num_bytes=2 << 20, allow_hybrid_mode=comm.rank == 0)
        buffer = nbep.ElasticBuffer(comm, num_bytes=2 << 20)
        arguments = dispatch_arguments(case, ElasticOptions(), comm.rank)
        buffer.dispatch(**arguments)
        with pytest.raises(ValueError, match=r"num_bytes: got 2097152 at construction, of which \d+ are for this"):
            buffer.dispatch(**{**arguments, "num_max_tokens_per_rank": 20_000})
        buffer.destroy()

    spawn(main, 2)


def test_more_ranks_than_a_warp_has_lanes_are_refused():
    def main(comm):
        with pytest.raises(ValueError, match="group: got 40 ranks; must be at most 32 ranks"):
            nbep.ElasticBuffer(comm, num_bytes=2 << 20)

    spawn(main, 40)


@transport
def test_no_rank_passes_a_barrier_before_all_have_come(transport):
    came = []

    def main(comm):
        buffer = make_elastic_buffer(comm, [(make_case(1), replace(FORMS["compact"], transport=transport))])
        buffer.barrier(with_cpu_sync=True)
        came.append(comm.rank)
        buffer.barrier(with_cpu_sync=True)
        assert len(came) == 2
        buffer.destroy()

    spawn(main, 2)


@transport
@pytest.mark.parametrize("kernel", ["elastic_meet_dispatch", "elastic_meet_combine", "elastic_push_sums"])
def test_a_rank_that_waits_too_long_says_for_whom(kernel, transport):
    options = replace(FORMS["compact"], do_cpu_sync=False, transport=transport)
    first = time_outs(make_case(1), options, kernel)[0]
    assert (first.rank, first.peer) == (0, 1)


@transport
def test_in_hybrid_mode_who_is_named_has_come_late_or_given_up(transport):
    """Rank 1 comes late. Others wait for it too long, or for one that has done so."""
    options = replace(FORMS["hybrid"], do_cpu_sync=False, transport=transport)
    raised = time_outs(make_case(1, num_ranks=4), options, "elastic_meet_dispatch")
    assert {fault.rank for fault in raised} >= {0, 2, 3}
    gone = {1}
    for fault in raised:
        assert fault.peer in gone
        gone.add(fault.rank)


@transport
@pytest.mark.parametrize("form", ["compact", "hybrid"])
def test_what_a_rank_of_another_node_passes_differently_is_named_on_all(form, transport, monkeypatch):
    monkeypatch.setattr(CallLog, "shared", classmethod(lambda cls, comm: None))
    case, options = make_case(1, num_ranks=4), replace(FORMS[form], transport=transport)

    def main(comm):
        buffer = make_elastic_buffer(comm, [(case, options)])
        arguments = dispatch_arguments(case, options, comm.rank)
        if comm.rank == 3:
            arguments["num_max_tokens_per_rank"] += 1
        with pytest.raises(ValueError, match=r"^num_max_tokens_per_rank: got .*must be the same on all ranks") as error:
            buffer.dispatch(**arguments)
        return str(error.value)

    most = max(case.num_tokens) + options.spare
    for text in spawn(main, 4, on_deadlock="expire"):
        assert re.search(rf"\b{most}\b", text), text
        assert re.search(rf"\b{most + 1}\b", text), text
