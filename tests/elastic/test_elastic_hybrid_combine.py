"""In hybrid mode a combine adds up what a node has of a token before that crosses the network."""

import re
from collections import Counter
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from arrays import to_numpy, to_target
from cases import make_case
from elastic import (
    Crossings,
    ElasticOptions,
    check,
    dispatch_arguments,
    make_elastic_buffer,
    received_trips,
    run,
    time_outs,
)
from parts import both_parts, crossed, dear
from target import MEMORY_MODELS, spawn

from nbep.lab.check import Run, perform

pytestmark = pytest.mark.emulator_only("a GPU's virtual ranks are of one node")

COMPACT = ElasticOptions(expert_alignment=3, num_nodes=2, do_cpu_sync=False, num_biases=2, own_weights=True)
FORMS = {"compact": COMPACT, "expanded": replace(COMPACT, do_expand=True)}
TRANSPORTS = "direct", "ibgda"
WAYS = "one sum", "not hybrid", "one reduction"
LATE = "cached_notify_dispatch", "elastic_gather_combine", "elastic_send_combine"
form = pytest.mark.parametrize("form", both_parts(["expanded"], thorough=["compact"]))
one_each = pytest.mark.parametrize(("form", "transport"), crossed([("expanded", "ibgda")], FORMS, TRANSPORTS))
shape = pytest.mark.parametrize(
    ("num_nodes", "num_ranks"), both_parts([(2, 4)], thorough=[(2, 6), (3, 6), (4, 8), (2, 8)])
)


class SumsThatCross(Crossings):
    """Counts sums that come to slots: (the rank that they are from, where they come to, the token)."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def find(self, name, src, dst):
        begins = re.fullmatch(r"x\[place \d+, token (\d+)\] \+ 0", name)
        return (src, dst, int(begins[1])) if begins and src // self.size != dst // self.size else None


@pytest.mark.parametrize(
    ("form", "transport", "way"),
    crossed(
        [("compact", "ibgda", WAYS[0])],
        *(FORMS, TRANSPORTS, WAYS),
    ),
)
@shape
def test_a_sum_of_a_token_crosses_the_network_once_for_each_node(num_nodes, num_ranks, way, transport, form):
    """From the rank with the sender's local index. Else once from each rank, or each row of it."""
    case = make_case(4, num_ranks=num_ranks, num_tokens=4, num_topk=5)
    size = num_ranks // num_nodes
    sums = SumsThatCross(size)
    options = replace(FORMS[form], num_nodes=num_nodes, transport=transport, allow_hybrid_mode=way != "not hybrid")
    options = replace(options, allow_multiple_reduction=way != "one reduction")
    run(case, options, tracer=sums)
    wanted: Counter[tuple[int, int, int]] = Counter()
    for rank in range(num_ranks):
        for token, experts in enumerate(case.topk_idx[rank]):
            away = [int(e) * num_ranks // case.num_experts for e in experts if e >= 0]
            away = [owner for owner in away if owner // size != rank // size]
            if way == "one sum":
                away = list({owner // size * size + rank % size for owner in away})
            elif way == "not hybrid" or form == "compact":
                away = list(set(away))
            wanted.update((owner, rank, token) for owner in away)
    assert sums.found == wanted


@one_each
@pytest.mark.parametrize(
    "routing", both_parts(["one_rank"], thorough=["one_node", "avoid_rank_0", "avoid_node_0", "nowhere", "everywhere"])
)
@shape
def test_wherever_tokens_go_the_sums_are_those_of_plain_loops(num_nodes, num_ranks, routing, transport, form):
    num_tokens = [3, 0, 5, 1, 2, 0, 4, 7][:num_ranks]
    case = make_case(2, num_ranks=num_ranks, num_tokens=num_tokens, num_topk=5, routing=routing, num_nodes=num_nodes)
    run(case, replace(FORMS[form], num_nodes=num_nodes, transport=transport))


@dear
@pytest.mark.parametrize(
    ("form", "num_topk", "with_weights"),
    crossed([("expanded", 32, True)], FORMS, (1, 2, 4, 32), (False, True)),
)
def test_places_of_ranks_and_of_choices_with_weights_and_without(num_topk, with_weights, form):
    """Up to the 32nd choice, whose mark is the sign of a word; a choice named twice has two rows."""
    case = make_case(6, num_ranks=4, num_tokens=3, num_topk=num_topk, experts_per_rank=10)
    for topk_idx in case.topk_idx:
        topk_idx[::2, -1] = topk_idx[::2, 0]
    run(case, replace(FORMS[form], with_weights=with_weights, own_weights=with_weights))


@form
@pytest.mark.parametrize("memory_model", MEMORY_MODELS)
@pytest.mark.thorough
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_handles_in_flight_are_combined_in_any_order_and_again(form, memory_model, transport):
    """Each has a shape of its own, so its marks and slots lie elsewhere."""
    options = replace(FORMS[form], transport=transport, is_cached=True)
    shapes = ((3, 1, 4, 0), 3), ((1, 6, 0, 2), 5), ((0, 0, 0, 0), 2)
    cases = [make_case(i, num_ranks=4, num_tokens=n, num_topk=k) for i, (n, k) in enumerate(shapes)]
    order = (1, 0, 2, 0, 1)

    def main(comm):
        buffer = make_elastic_buffer(comm, [(case, options) for case in cases])
        trips = received_trips(buffer, cases, options)
        outcomes = []
        for number in order:
            trips[number].combine()
            outcomes.append(replace(trips[number].end()))
        buffer.destroy()
        return outcomes

    results = spawn(main, 4, seed=5, memory_model=memory_model)
    for number, outcomes in zip(order, zip(*results, strict=True), strict=True):
        check(cases[number], options, list(outcomes), f"case {number}")


@pytest.mark.thorough
@pytest.mark.parametrize("choice", [0, 3])
def test_rows_that_the_caller_has_added_up_are_taken_where_the_handle_says(choice):
    """As inside a node: the rows of each token in the handle are rewritten, to one that may stand at any choice."""
    case, options = make_case(3, num_ranks=4, num_tokens=5, num_topk=4), replace(FORMS["expanded"], do_cpu_sync=True)

    def main(comm, dense):
        buffer = make_elastic_buffer(comm, [(case, options)])
        _, _, _, handle, _ = buffer.dispatch(**dispatch_arguments(case, options, comm.rank))
        metadata = to_numpy(handle.recv_src_metadata).copy()
        expanded = np.zeros((handle.num_expanded_tokens, 16), ml_dtypes.bfloat16)
        sums = (np.arange(len(metadata))[:, None] / 7 + np.zeros((1, 16)) + comm.rank).astype(ml_dtypes.bfloat16)
        for i, rows in enumerate(metadata[:, 2:]):
            expanded[rows[rows >= 0][0]] = sums[i]
        if dense:
            metadata[:, 2:] = -1
            metadata[:, 2 + choice] = np.arange(len(metadata))
            handle.recv_src_metadata = to_target(metadata)
        combined, _, _ = buffer.combine(to_target(sums if dense else expanded), handle)
        buffer.destroy()
        return to_numpy(combined).tobytes()

    assert spawn(main, 4, (True,)) == spawn(main, 4, (False,))


@pytest.mark.parametrize(("kernel", "transport"), crossed([(LATE[1], "direct")], LATE, TRANSPORTS))
def test_who_is_named_has_come_late_or_given_up(kernel, transport):
    """Rank 1 comes late, to the meeting of its node or of all. Others wait for it, or for one that has given up."""
    raised = time_outs(make_case(1, num_ranks=4), replace(COMPACT, transport=transport), kernel)
    assert raised
    gone = {1}
    for fault in raised:
        assert fault.peer in gone
        gone.add(fault.rank)


@pytest.mark.thorough
def test_without_the_meeting_of_the_node_sums_are_read_that_may_not_be_there():
    base = Run("elastic.hybrid", (), seed=0, memory_model="checked")
    found = perform(replace(base, faults=("intranode.cached_notify.cached_notify_dispatch: meet_block",)))
    assert found is not None
    assert re.search(r"marks\[node \d, token \d, rank \d of this node\]", found.message)
