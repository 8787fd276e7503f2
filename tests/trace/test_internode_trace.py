"""A trace of the mode between nodes: roles have names, rings have two levels, and a token is followed both ways."""

import ml_dtypes
import numpy as np
import pytest

import nbep
from nbep.device.kernels.internode import coordinator
from nbep.emulator import DeadlockError
from nbep.lab.notebook import edit
from nbep.lab.trace import Trace
from nbep.specimens.views.rings import COMBINE, DISPATCH
from nbep.specimens.views.token_path import journey
from notebooks.course_pictures import plot_hops

pytestmark = pytest.mark.thorough

NUM_NODES, NUM_PLACES, NUM_TOKENS, NUM_EXPERTS, HIDDEN = 2, 2, 6, 8, 64
NUM_RANKS = NUM_NODES * NUM_PLACES
LATE = "publish_slots(ctx", "publish_slots(ctx._replace(sizes=ctx.sizes._replace(num_max_rdma_send_tokens=3))"
CONFIG = nbep.Config(4, 1, 4, 1, 2)  # two channels, rings of four and of two slots, chunks of one


def main(comm, num_rounds=2):
    tokens = np.arange(NUM_TOKENS)
    x = np.repeat((10 * comm.rank + tokens)[:, None], HIDDEN, axis=1).astype(ml_dtypes.bfloat16)
    topk_idx = np.stack([tokens + comm.rank + 1, 3 * tokens + comm.rank], axis=1) % NUM_EXPERTS
    weights = np.full(topk_idx.shape, 0.5, np.float32)
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 18, num_rdma_bytes=1 << 17, num_nvl_peers=NUM_PLACES)
    layout = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    per_rank, per_node, per_expert, is_token_in_rank, _ = layout
    for _ in range(num_rounds):
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x, None, per_rank, per_node, is_token_in_rank, per_expert, topk_idx, weights, config=CONFIG
        )
        rdma_head = handle.send_rdma_head.copy()
        buffer.combine(recv_x, handle, config=CONFIG)
    buffer.destroy()
    return is_token_in_rank, recv_x[:, 0].astype(int), handle, rdma_head


@pytest.fixture(scope="module")
def traced():
    trace = Trace()
    return trace, nbep.spawn(main, NUM_RANKS, "emulator", seed=3, tracer=trace)


@pytest.fixture(scope="module")
def trace(traced):
    return traced[0]


@pytest.mark.parametrize(
    ("kernel", "cell", "level", "role"),
    [
        (DISPATCH, "tail", "RDMA", "sender coordinator"),
        (DISPATCH, "head", "RDMA", "forwarder coordinator"),
        (DISPATCH, "tail", "NVL", "forwarder"),
        (DISPATCH, "head", "NVL", "NVL receiver"),
        (COMBINE, "tail", "NVL", "NVL sender"),
        (COMBINE, "head", "NVL", "NVL coordinator"),
        (COMBINE, "tail", "RDMA", "RDMA coordinator"),
        (COMBINE, "head", "RDMA", "receiver coordinator"),
    ],
)
def test_each_cell_of_a_ring_is_moved_by_one_role(trace, kernel, cell, level, role):
    moved = trace.events(["store", "atomic"], kernel=kernel, cell=f"{cell}[channel")
    assert {event.role for event in moved if (event.cell.node >= 0) == (level == "RDMA")} == {role}


def test_a_token_is_forwarded_to_other_ranks_and_delivered_to_the_own_one(traced):
    trace, results = traced
    fills = [event for event in trace.events("fill", kernel=DISPATCH) if event.call == 0]
    forwarded = {(event.token[:2], event.cell.owner) for event in fills if event.role == "forwarder"}
    wanted = {
        ((rank, int(token)), int(dst))
        for rank, (goes, *_) in enumerate(results)
        for token, dst in zip(*np.nonzero(goes), strict=True)
    }
    assert forwarded == {(token, dst) for token, dst in wanted if (token[0] - dst) % NUM_PLACES != 0}
    assert sum(event.role == "deliverer" for event in fills) == len(wanted) - len(forwarded)


def test_a_slot_tells_where_its_token_goes(traced):
    trace, results = traced
    for event in trace.events("fill", kernel=DISPATCH):
        if event.token is not None:
            rank, token, destinations = event.token
            assert destinations == tuple(np.flatnonzero(results[rank][0][token]))


@pytest.mark.parametrize("call", [0, 1])
def test_a_journey_ends_in_the_rows_of_its_token(traced, call):
    trace, results = traced
    for rank, (goes, _, _, rdma_head) in enumerate(results):
        for token in range(NUM_TOKENS):
            way = journey(trace, rank, token, call)
            rows = {event.cell.owner: event.cell.row for event in way if event.cell.name == "recv_x"}
            assert set(rows) == set(np.flatnonzero(goes[token]))
            assert all(results[dst][1][row] == 10 * rank + token for dst, row in rows.items())
            assert [event.cell.row for event in way if event.role == "RDMA receiver"] == [token]
            for kernel, role in ((DISPATCH, "RDMA sender"), (COMBINE, "forwarder")):
                slots = sorted(event.cell.slot for event in way if (event.kernel, event.role) == (kernel, role))
                assert slots == sorted(head % 2 for head in rdma_head[token] if head >= 0)
            others = [dst for dst in rows if (dst - rank) % NUM_PLACES != 0]
            assert sum(event.role == "NVL sender" for event in way) == len(others)


def test_all_slots_and_rows_are_shared_out_among_the_journeys(traced):
    trace, results = traced
    for call in (0, 1):
        found = [
            id(event)
            for rank, (goes, *_) in enumerate(results)
            for token in range(len(goes))
            for event in journey(trace, rank, token, call)
        ]
        fills = [event for event in trace.events("fill") if event.kernel in (DISPATCH, COMBINE) and event.call == call]
        assert sorted(found) == sorted(map(id, fills))


def test_rings_of_both_levels_are_filled_from_zero_in_every_call(traced):
    trace, results = traced
    for ring in trace.rings(DISPATCH):
        assert 0 <= ring.peak <= ring.capacity
        assert ring.fill[-1] == 0
    for rank, (_, _, handle, _) in enumerate(results):
        from_nodes = handle.recv_rdma_channel_prefix_matrix[:, -1]
        for call in (0, 1):
            tokens = np.zeros(NUM_NODES, int)
            for ring in trace.rings(DISPATCH):
                if (ring.rank, ring.level, ring.call) == (rank, "RDMA", call):
                    tokens[ring.src // NUM_PLACES] += ring.num_tokens
            assert (tokens == from_nodes).all()


def test_a_ring_of_combine_is_named_after_the_node_that_its_rows_go_back_to(trace):
    rings = [ring for ring in trace.rings(COMBINE) if (ring.rank, ring.level, ring.call) == (3, "NVL", 0)]
    assert {(ring.src, ring.node) for ring in rings} == {(2, 0), (2, 1)}


def test_the_picture_of_both_hops_has_a_lane_for_each_role(trace):
    picture = plot_hops(trace, 0, 3, kernel=DISPATCH, token=(0, 0))
    lanes, *fills = picture.axes
    assert [label.get_text().partition("\n")[0] for label in lanes.get_yticklabels()][::-1] == [
        "RDMA sender",
        "sender coordinator",
        "forwarder",
        "forwarder coordinator",
        "NVL receiver",
    ]
    assert [axes.get_ylabel() for axes in fills] == ["RDMA ring", "NVL ring"]
    back = plot_hops(trace, 3, 0, kernel=COMBINE, call=1).axes
    assert len(back[0].get_yticklabels()) == 6
    for kernel, src, dst in ((DISPATCH, 0, 2), (COMBINE, 2, 0)):  # the same place: no NVL ring
        assert len(plot_hops(trace, src, dst, kernel=kernel).axes) == 2


def test_what_the_trace_lacks_is_refused(trace):
    with pytest.raises(ValueError, match="no internode_dispatch number 7"):
        plot_hops(trace, call=7)
    with pytest.raises(ValueError, match="no internode_dispatch number 7"):
        trace.journey(0, 0, call=7)
    with pytest.raises(ValueError, match="token 99 of rank 0 goes nowhere"):
        trace.journey(0, 99)
    with pytest.raises(ValueError, match="no rings from rank 0 to rank 3, channel 5"):
        plot_hops(trace, channel=5)


def test_the_picture_of_rings_has_a_row_for_each_ring_of_both_levels(trace):
    rows = {label.get_text() for label in trace.plot_rings(COMBINE).axes[0].get_yticklabels()}
    assert {"NVL from rank 1, channel 1, for node 1", "RDMA from rank 2, channel 0"} <= rows


def test_after_a_deadlock_the_trace_says_which_role_waits_for_what():
    trace = Trace()
    with edit(coordinator.publish_heads, *LATE), pytest.raises(DeadlockError):
        nbep.spawn(main, NUM_RANKS, "emulator", seed=3, tracer=trace)
    lines = trace.stuck(DISPATCH).splitlines()[1:]
    assert any("RDMA sender" in line and "head[channel" in line and line.endswith("0") for line in lines)
    assert not trace.stuck(COMBINE).splitlines()[1:]
    assert len(lines) == len(set(lines))
