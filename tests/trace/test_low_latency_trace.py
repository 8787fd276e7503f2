"""A trace of the low-latency mode: roles follow what a warp does, cells have the names of the call that uses them."""

import ml_dtypes
import numpy as np
import pytest

import nbep
from nbep.device.kernels.parts.arrivals import ABSENT, TAG, completion, is_complete
from nbep.lab.trace import Trace
from nbep.specimens.views.low_latency import in_tags
from notebooks.course_pictures import plot_call

NUM_RANKS, NUM_TOKENS, NUM_EXPERTS, HIDDEN = 2, 4, 4, 128
RDMA_BYTES = nbep.Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, NUM_RANKS, NUM_EXPERTS)
TOPK_IDX = [np.array([[0, 2], [1, 3], [2, 0], [3, 1]]), np.array([[2, 3], [0, 3], [1, 2], [3, -1]])]
WEIGHTS = np.full((NUM_TOKENS, 2), 0.5, np.float32)


def main(comm, hooks: bool, deduplicate: bool):
    buffer = nbep.Buffer(comm, num_rdma_bytes=RDMA_BYTES, low_latency_mode=True)
    x = np.full((NUM_TOKENS, HIDDEN), comm.rank, ml_dtypes.bfloat16)
    topk_idx = TOPK_IDX[comm.rank]
    weights = WEIGHTS if deduplicate else None
    calls = [
        buffer.low_latency_dispatch(
            x,
            topk_idx,
            NUM_TOKENS,
            NUM_EXPERTS,
            use_fp8=False,
            return_recv_hook=hooks,
            deduplicate=deduplicate,
            topk_weights=weights,
        )
        for _ in range(2)
    ]
    for recv_x, _, handle, _, hook in calls:
        if hooks:
            hook()
        _, _, hook = buffer.low_latency_combine(recv_x, topk_idx, WEIGHTS, handle, return_recv_hook=hooks)
        if hooks:
            hook()
    buffer.destroy()


def traced(hooks: bool = False, deduplicate: bool = False, seed: int = 5) -> Trace:
    trace = Trace()
    nbep.spawn(main, NUM_RANKS, "emulator", (hooks, deduplicate), seed, tracer=trace)
    return trace


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "hooks"])
def trace(request) -> Trace:
    return traced(request.param)


@pytest.fixture(scope="module")
def deduplicated() -> Trace:
    return traced(deduplicate=True)


def num_chosen(expert: int, src: int) -> int:
    return int((TOPK_IDX[src] == expert).sum())


def roles(trace: Trace, what: str, cell: str, kernel: str) -> set[str]:
    return {event.role for event in trace.events(what, cell=cell, kernel=f"low_latency_{kernel}")}


def test_each_call_takes_the_other_half_and_its_phases_share_its_number(trace):
    hooks = any(launch.phases == "receive" for launch in trace.launches)
    phases = ["send", "receive"] if hooks else ["send and receive"]
    halves = [("low_latency_dispatch", 0, 0), ("low_latency_dispatch", 1, 1)]
    halves += [("low_latency_combine", 0, 0), ("low_latency_combine", 1, 1)]
    for rank in range(NUM_RANKS):
        for kernel, call, half in halves:
            launches = [a for a in trace.launches if (a.rank, a.kernel, a.call) == (rank, kernel, call)]
            # Behind the hooks of dispatch, which come when the next call has been sent, a launch frees the half.
            expected = [*phases, "free"] if hooks and kernel == "low_latency_dispatch" else phases
            assert [(launch.half, launch.phases) for launch in launches] == [(half, phase) for phase in expected]


def test_messages_are_put_by_senders_and_unpacked_by_receivers(trace):
    assert roles(trace, "fill", "message", "dispatch") == {"sender"}
    assert roles(trace, "fill", "recv_x", "dispatch") == {"receiver"}
    assert roles(trace, "fill", "row", "combine") == {"sender"}
    assert roles(trace, "fill", "combined_x", "combine") == {"receiver"}


def test_senders_and_counters_tell_an_expert_s_rank(trace):
    assert roles(trace, "atomic", "slots", "dispatch") == {"sender"}
    assert roles(trace, "atomic", "counts", "dispatch") == {"sender", "counter"}
    receivers = {"receiver"} if any(launch.phases == "send and receive" for launch in trace.launches) else set()
    assert roles(trace, "see", "credits", "dispatch") == {"sender", "counter", *receivers}
    assert roles(trace, "see", "counts", "dispatch") == {"receiver"}
    assert roles(trace, "atomic", "counts", "combine") == {"sender"}
    assert roles(trace, "see", "counts", "combine") == {"receiver"}


def test_a_count_says_how_many_messages_its_source_has_for_the_expert(trace):
    for rank in range(NUM_RANKS):
        for local_expert in range(2):
            for src in range(NUM_RANKS):
                cell = f"counts[half 0, local expert {local_expert}, src {src}]"
                adds = trace.events("atomic", cell=cell, kernel="low_latency_dispatch")
                values = [event.value for event in adds if event.cell.owner == rank]
                chosen = num_chosen(2 * rank + local_expert, src)
                assert len(values) == chosen + 1
                assert values[-1] == -chosen - 1
                assert [value for value in values[:-1] if is_complete(value)] == []


def test_every_message_and_every_row_has_a_cell_of_its_own(trace):
    for kernel, name in (("low_latency_dispatch", "message"), ("low_latency_combine", "row")):
        for half in range(2):
            fills = trace.events("fill", cell=f"{name}[half {half}, ", kernel=kernel)
            cells = [(event.cell.owner, event.cell.text) for event in fills]
            assert len(cells) == len(set(cells)) == sum(int((idx >= 0).sum()) for idx in TOPK_IDX)
    message = trace.events("fill", cell="message[half 0, local expert 1, src 1, slot 0]")
    assert {event.cell.owner for event in message} == {0, 1}
    assert {event.rank for event in message} == {1}
    row = trace.events("fill", cell="row[half 0, expert 3, token 1]")
    assert {event.cell.owner for event in row} == {0, 1}, "token 1 of both ranks has chosen expert 3"
    assert {event.rank for event in row} == {1}


def test_coordinators_give_credits_to_peers_behind_empty_counts(trace):
    given = trace.events("atomic", cell="credits")
    assert {event.role for event in given} == {"coordinator"}
    assert {event.order for event in given} == {"release"}
    assert {(event.rank, event.cell.owner) for event in given} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    first = min(given, key=lambda event: event.step)
    emptied = [event for event in trace.events("store", cell="counts", rank=first.rank) if event.step < first.step]
    assert {event.value for event in emptied} == {0}
    assert len(emptied) == 4


def test_what_a_coordinator_empties_has_the_names_of_the_call_before(trace):
    emptied = trace.events("store", cell="counts")
    dispatches = [event for event in emptied if "local expert" in event.cell.text]
    combines = [event for event in emptied if "local expert" not in event.cell.text]
    # On each rank later launches end two dispatches and the first combine, of four cells each.
    assert len(dispatches) == NUM_RANKS * 2 * 4
    assert len(combines) == NUM_RANKS * 4


def test_the_launch_state_is_the_coordinator_s(trace):
    events = trace.events("store", cell="state")
    assert {event.role for event in events} == {"coordinator"}
    halves = [event.value for event in events if "next half" in event.cell.text and event.rank == 0]
    assert halves == [1, 0, 1, 0]


def test_with_deduplicate_a_message_has_a_source_and_an_arrival_follows(deduplicated):
    messages = deduplicated.events("fill", cell="message[half 0, src ")
    num_messages = sum(len({expert // 2 for expert in row if expert >= 0}) for idx in TOPK_IDX for row in idx)
    assert len(messages) == num_messages
    arrivals = deduplicated.events("atomic", cell="arrivals[half 0", kernel="low_latency_dispatch")
    assert {event.role for event in arrivals} == {"sender", "counter"}
    complete = [event for event in arrivals if is_complete(event.value)]
    assert len(complete) == NUM_RANKS * NUM_RANKS
    for arrival in complete:
        key = (arrival.rank, arrival.cell.owner)
        sent = [event for event in messages if (event.rank, event.cell.owner) == key]
        assert max(event.step for event in sent) < arrival.step, f"arrival {arrival}"
        assert arrival.value == -len(sent) - 1
    counts = deduplicated.events("atomic", cell="counts[half 0, ", kernel="low_latency_dispatch")
    assert {event.role for event in counts} == {"counter"}
    assert len(counts) == NUM_RANKS * NUM_EXPERTS
    rows = deduplicated.events("fill", cell="row[half 0, rank 1, token 1]")
    assert {(event.rank, event.cell.owner) for event in rows} == {(1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (-3, "-3"), (TAG, "TAG"), (2 * TAG, "2 TAG"), (completion(2), "-3 - 2 TAG"), (ABSENT, "ABSENT")],
)
def test_a_count_is_shown_in_tags(value, words):
    assert in_tags(value) == words


def test_the_table_says_when_a_count_is_complete(trace):
    table = trace.table("atomic", cell="counts[half 0, local expert 0, src 0]", kernel="low_latency_dispatch", rank=0)
    lines = [line for line in table.splitlines() if line.endswith(" 0")]
    assert len(lines) == 3
    assert "makes counts[half 0, local expert 0, src 0] -3 (" in lines[-1]
    assert any("TAG (release)" in line for line in lines[:-1])  # the counter's add may come first
    fills = trace.table("fill", cell="message", kernel="low_latency_dispatch")
    assert "sender  fills message[half 0, local expert 0, src 0, slot 0]" in fills


def test_pictures_of_a_call_have_a_lane_for_each_role(trace):
    axes = plot_call(trace, "low_latency_dispatch").axes[0]
    lanes = [label.get_text() for label in axes.get_yticklabels()][::-1]
    assert lanes == [f"{role}\nrank {rank}" for rank in range(2) for role in ("sender", "counter", "receiver")]
    axes = plot_call(trace, "low_latency_combine", call=1).axes[0]
    assert next(label.get_text() for label in axes.get_yticklabels()) == "receiver\nrank 1"
    assert "half 1" in axes.get_title(loc="left")


def test_the_picture_of_the_halves_has_a_panel_for_each_rank(trace, tmp_path):
    picture = trace.plot_halves()
    assert [axes.get_title(loc="left") for axes in picture.axes] == ["rank 0", "rank 1"]
    words = [text.get_text() for axes in picture.axes for text in axes.texts]
    assert words.count("dispatch 0") == words.count("combine 1") == NUM_RANKS
    dots = [line for line in picture.axes[0].lines if line.get_marker() == "o"]
    assert len(dots) == 3, "the three calls of the peer that a later one ends"
    picture.savefig(tmp_path / "halves.png")


def test_a_call_that_is_not_there_is_named(trace):
    with pytest.raises(ValueError, match="no low_latency_combine number 2"):
        plot_call(trace, "low_latency_combine", call=2)
    empty = Trace()
    with pytest.raises(ValueError, match="no low-latency call"):
        empty.plot_halves()
