"""The pictures show what happened: arrows for all stores that were read, waits that nothing hides, hangs to the end."""

import ml_dtypes
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb, to_rgba
from parts import both_parts
from traced_runs import hanging_run, hanging_run_between_nodes, traced_run

import nbep
from nbep.lab.notebook import boxes
from nbep.lab.trace.events import Cell, Event, readings
from nbep.lab.trace.space_time import Touches, arrows_of
from nbep.lab.trace.style import FAINT, RANK_COLORS, STUCK_COLOR, TAIL_COLOR, WAIT_COLOR
from notebooks.course_pictures import block_picture, plot_call, plot_hops


def arrows(axes) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """From where to where, in steps and lanes."""
    return [(text.xyann, text.xy) for text in axes.texts if getattr(text, "arrow_patch", None) is not None]


def bars(axes, color: str) -> list[tuple[float, float, float, float]]:
    """Left, right, bottom and top of the bars of a colour."""
    return [
        (
            *path.vertices[:, 0].min(keepdims=True),
            path.vertices[:, 0].max(),
            path.vertices[:, 1].min(),
            path.vertices[:, 1].max(),
        )
        for bar in axes.collections
        if isinstance(bar, PolyCollection) and tuple(bar.get_facecolor()[0][:3]) == to_rgb(color)
        for path in bar.get_paths()
    ]


@pytest.mark.parametrize("kernel", ["notify_dispatch", "cached_notify_combine"])
def test_each_signal_to_another_rank_has_its_arrow(kernel):
    trace = traced_run("intranode")
    axes = trace.plot_cells("barrier_signal", kernel).axes[0]
    events = trace.events(["store", "atomic", "see"], cell="barrier_signal", kernel=kernel)
    first = {}
    for stored, seen in readings(events):
        first.setdefault(stored, seen)
    across = [(events[a], events[b]) for a, b in first.items() if events[a].rank != events[b].rank]
    assert len(across) == 2
    drawn = arrows(axes)
    for stored, seen in across:
        assert ((stored.step, 1 - stored.rank), (seen.step, 1 - seen.rank)) in drawn


@pytest.mark.parametrize("mode", both_parts(["intranode", "low latency"], thorough=["internode"]))
def test_only_who_was_read_has_an_arrow(mode):
    events = traced_run(mode).events()
    read = {pair.stored for pair in readings(events)}
    stores = [i for i, event in enumerate(events) if event.what in ("store", "atomic")]
    found = arrows_of(events, lambda event: event.rank)
    assert [arrow.stored for arrow in found] == [events[i] for i in stores]
    assert {i for i, arrow in zip(stores, found, strict=True) if arrow.seen is not None} == read
    assert 0 < len(read) < len(stores)


def test_an_arrow_goes_to_another_lane_where_somebody_there_looks():
    events = traced_run("intranode").events(kernel="dispatch")
    lanes = {arrow.stored.step: arrow for arrow in arrows_of(events, lambda event: event.rank)}
    tails = [event for event in events if event.what == "store" and event.cell.name == "tail"]
    read = [lanes[tail.step] for tail in tails if lanes[tail.step].seen is not None]
    assert read
    assert all(arrow.seen.rank == arrow.stored.cell.owner != arrow.stored.rank for arrow in read)


def test_no_mark_lies_on_a_wait():
    trace = traced_run("intranode")
    axes = trace.plot_channel(0, 1).axes[0]
    waits = bars(axes, WAIT_COLOR)
    assert waits
    axes.figure.canvas.draw()
    height = axes.get_window_extent().height / (axes.get_ylim()[1] - axes.get_ylim()[0])  # pixels between two lanes
    for line in axes.lines:
        if line.get_marker() == "o":
            radius = line.get_markersize() / 2 * axes.figure.dpi / 72 / height
            for y in line.get_ydata():
                assert not any(bottom < y + radius and y - radius < top for _, _, bottom, top in waits)


def test_a_short_wait_can_be_seen():
    trace = traced_run("intranode")
    axes = trace.plot_channel(0, 1).axes[0]
    begin, end = axes.get_xlim()
    width = axes.get_window_extent().width
    assert all((right - left) / (end - begin) * width >= 1.5 for left, right, _, _ in bars(axes, WAIT_COLOR))


def test_who_is_never_woken_waits_to_the_end_of_the_run():
    trace = hanging_run()
    axes = trace.plot_channel(1, 0).axes[0]
    stuck = bars(axes, STUCK_COLOR)
    (wait,) = [event for event in trace.events("wait", cell="tail", rank=0) if event.until is None]
    lefts = {event.step for event in trace.hangs() if event.rank == 0 and event.role == "receiver"}
    assert {left for left, *_ in stuck} == {wait.step} | lefts, "those at the barrier of the team too"
    least = 0.0025 * (axes.get_xlim()[1] - axes.get_xlim()[0])
    assert all(right == max(trace.last_step, left + least) for left, right, *_ in stuck)
    assert axes.get_xlim()[1] >= trace.last_step
    assert "waits for ever" in [text.get_text() for text in axes.get_legend().get_texts()]


@pytest.mark.thorough
def test_who_is_never_woken_between_nodes_waits_to_the_end_of_the_run():
    trace = hanging_run_between_nodes()
    picture = plot_hops(trace, 0, 3)
    axes = picture.axes[0]
    stuck = bars(axes, STUCK_COLOR)
    assert {right for _, right, *_ in stuck} == {trace.last_step}
    assert min(left for left, *_ in stuck) < trace.last_step - 1000
    assert axes.get_xlim()[1] >= trace.last_step
    names = [label.get_text().split("\n")[0] for label in axes.get_yticklabels()]
    lanes = {names[round((bottom + top) / 2)] for _, _, bottom, top in stuck}
    assert lanes == {"RDMA sender", "sender coordinator", "forwarder", "forwarder coordinator", "NVL receiver"}
    picture.canvas.draw()
    legend = axes.get_legend().get_window_extent()
    assert legend.x0 >= 0
    assert legend.x1 <= picture.bbox.width, "it fits"


def test_an_arrow_prefers_a_look_from_another_lane():
    cell = Cell.parse(0, "flag")
    stored, near, far = (
        Event(step, what, rank, "kernel", 0, 0, thread, "kernel", cell, 1, "")
        for step, (what, rank, thread) in enumerate([("store", 0, 0), ("see", 0, 1), ("see", 1, 0)])
    )
    assert arrows_of([stored, near, far], lambda event: event.rank) == [(stored, far)]
    assert arrows_of([stored, near], lambda event: event.rank) == [(stored, near)]


@pytest.mark.thorough
def test_what_combine_leaves_in_a_ring_is_explained():
    trace = traced_run("internode")
    left = [ring for ring in trace.rings() if ring.left]
    assert {ring.kernel for ring in left} == {"internode_combine"}
    text = "may end above zero"
    assert text in trace.plot_rings().get_suptitle()
    assert text not in trace.plot_rings("internode_dispatch").get_suptitle()
    ring = left[0]
    picture = plot_hops(
        trace, src=ring.src, dst=2 * ring.node + ring.rank % 2, kernel="internode_combine", call=ring.call
    )
    texts = [text.get_text() for axes in picture.axes for text in axes.texts]
    assert f"{ring.left} received and left here: no sender waits for another head" in texts


def test_many_ranks_have_colours_and_some_can_be_chosen():
    trace = traced_run("internode")
    axes = trace.plot_cells("barrier_signal").axes[0]
    assert [to_rgb(label.get_color()) for label in axes.get_yticklabels()][::-1] == [*map(to_rgb, RANK_COLORS[:4])]
    for text in axes.texts:
        if getattr(text, "arrow_patch", None) is not None:
            rank = round(3 - text.xyann[1])
            assert text.arrow_patch.get_edgecolor()[:3] == to_rgb(RANK_COLORS[rank])
    chosen = trace.plot_cells("barrier_signal", ranks=(1, 3)).axes[0]
    assert [label.get_text() for label in chosen.get_yticklabels()] == ["rank 3", "rank 1"]
    panels = trace.plot_rings("internode_combine", ranks=(2,)).axes
    assert [axes.get_title(loc="left") for axes in panels] == ["rank 2 receives"]
    low_latency = plot_call(traced_run("low latency"), ranks=(1,)).axes[0]
    assert {label.get_text().split("\n")[1] for label in low_latency.get_yticklabels()} == {"rank 1"}


def test_the_bars_of_launches_do_not_squeeze_what_happens():
    trace = traced_run("intranode")
    axes = trace.plot_cells("barrier_signal", "notify_dispatch").axes[0]
    steps = [event.step for event in trace.events(cell="barrier_signal", kernel="notify_dispatch")]
    begin, end = axes.get_xlim()
    assert begin < min(steps)
    assert max(steps) < end
    assert (max(steps) - min(steps)) / (end - begin) > 0.6


def test_the_threads_of_all_blocks_have_squares_and_each_access_a_line_between_squares():
    touches = Touches(["x"], ["x_fp8"])
    x = np.ones((1, 256), ml_dtypes.bfloat16)  # 128 columns for the warp of each block
    nbep.spawn(lambda comm: nbep.per_token_cast_to_fp8(x), 1, "emulator", tracer=touches)
    axes = touches.plot().axes[0]
    squares = {(x, y) for marks in axes.collections for x, y in marks.get_offsets().round(6)}
    threads = sorted(x for x, y in squares if y == -1)
    assert len(threads) == 64
    ends = {(round(x, 6), y) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)}
    assert sorted(x for x, y in ends if y == -1) == threads
    assert all(0 < x < 1 for x, _ in ends)


def test_blocks_have_frames_and_the_followed_elements_a_colour():
    touches = Touches(["x"], ["x_fp8"])
    x = np.ones((1, 256), ml_dtypes.bfloat16)  # 128 columns for the warp of each block
    nbep.spawn(lambda comm: nbep.per_token_cast_to_fp8(x), 1, "emulator", tracer=touches)
    axes = block_picture(touches, {"x_fp8": [0]}).axes[0]
    assert len(axes.patches) == touches.shape[0] == 2
    colored = [line for line in axes.lines if line.get_color() == TAIL_COLOR]
    assert len(colored) == 1
    assert len(axes.lines) == len(touches.places)


def test_a_followed_count_alone_keeps_its_colour():
    trace = traced_run("low latency")
    kernel = "low_latency_dispatch"
    words = ["local expert 0", "src 1"]
    plain, followed = (
        [text for text in plot_call(trace, kernel, follow=follow).axes[0].texts if getattr(text, "arrow_patch", None)]
        for follow in ([], words)
    )
    assert len(followed) == len(plain) > 0
    assert not [text for text in plain if text.arrow_patch.get_edgecolor() == to_rgba(FAINT)]
    greys = [text.arrow_patch.get_edgecolor() == to_rgba(FAINT) for text in followed]
    assert any(greys)
    assert not all(greys)


def test_a_box_holds_each_value_and_the_followed_one_has_a_colour():
    axes = boxes({"expert 0": [10, 12, ""], "expert 1": [12]}, follow=12, title="slots").axes[0]
    colors = [bar.get_facecolor() for bar in axes.patches]
    assert len(colors) == 4
    assert colors.count(to_rgba(TAIL_COLOR)) == 2
