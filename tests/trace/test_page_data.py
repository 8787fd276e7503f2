"""What the page of a trace shows: slots follow the rings, lines are the kernels', no network is needed."""

import html
import json
import linecache
import re
from pathlib import Path

import pytest
from parts import both_parts
from traced_runs import EACH_MODE, hanging_run, traced_run

import nbep
from nbep.device import primitives as ptx
from nbep.emulator import DataRace, DeadlockError, World
from nbep.emulator.machine.errors import OutOfBounds
from nbep.lab.trace import Trace
from nbep.lab.trace.page import EMPTY, FILLING, FULL, KINDS, all_slots, page_data, page_html
from nbep.lab.trace.perfetto import timeline

WITH_RINGS = both_parts(["intranode"], thorough=["internode", "ibgda"])


def states_at(slots, step: int) -> list[int]:
    states = [EMPTY] * slots.count
    for at, slot, state, _ in slots.changes:
        if at <= step:
            states[slot] = state
    return states


@pytest.mark.parametrize("mode", WITH_RINGS)
def test_as_many_slots_are_published_as_the_ring_is_full(mode):
    trace = traced_run(mode)
    fills = {
        (ring.rank, ring.kernel, ring.call, ring.channel, ring.src, ring.level, ring.node): ring
        for ring in trace.rings()
    }
    rows = [slots for slots in all_slots(trace) if slots.kind == "ring"]
    assert {slots.kernel for slots in rows} == {kernel for _, kernel, *_ in fills}
    for slots in rows:
        level, src, channel, node = re.fullmatch(
            r"(?:(\w+) )?ring from rank (\d+), channel (\d+)(?:, for node (\d+))?", slots.title
        ).groups()
        key = slots.rank, slots.kernel, slots.call, int(channel), int(src), level or "", int(node or -1)
        ring = fills[key]
        states, changes = [EMPTY] * slots.count, slots.changes
        for index, (step, slot, state, _) in enumerate(changes):
            states[slot] = state
            if index + 1 == len(changes) or changes[index + 1][0] > step:
                assert states.count(FULL) == ring.at(step)


@pytest.mark.parametrize("mode", WITH_RINGS)
def test_a_slot_is_filled_then_published_then_given_back(mode):
    for slots in all_slots(traced_run(mode)):
        if slots.kind == "ring":
            for slot in range(slots.count):
                states = [state for _, number, state, _ in slots.changes if number == slot]
                assert states == ([FILLING, FULL, EMPTY] * len(states))[: len(states)]


def test_a_half_holds_what_was_put_into_it_until_its_call_is_received():
    trace = traced_run("low latency")
    rows = [slots for slots in all_slots(trace) if slots.kind == "half"]
    assert {(slots.rank, slots.title) for slots in rows} >= {(0, "half 0: dispatch 0"), (1, "half 1: combine 0")}
    for slots in rows:
        fills = [
            event
            for name in ("message", "row")
            for event in trace.events("fill", cell=name, kernel=slots.kernel)
            if (event.cell.owner, event.call) == (slots.rank, slots.call)
        ]
        assert states_at(slots, max(event.step for event in fills)) == [FULL] * len({event.cell for event in fills})
        assert states_at(slots, slots.end) == [EMPTY] * slots.count


@pytest.mark.thorough
def test_a_send_queue_has_a_place_for_each_entry_that_is_under_way():
    rows = [slots for slots in all_slots(traced_run("ibgda")) if slots.kind == "queue"]
    assert rows
    for slots in rows:
        for slot in range(slots.count):
            states = [state for _, number, state, _ in slots.changes if number == slot]
            assert states == ([FILLING, FULL, EMPTY] * len(states))[: len(states)]


@pytest.mark.parametrize("mode", EACH_MODE)
def test_columns_say_what_the_events_say(mode):
    trace = traced_run(mode)
    data = json.loads(json.dumps(page_data(trace)))
    columns, step = data["events"], 0
    assert len(columns["step"]) == len(trace.events())
    for i, event in enumerate(trace.events()):
        step += columns["step"][i]
        assert step == event.step
        assert data["kinds"][columns["kind"][i]] == event.what
        rank, role, block, warp = data["threads"][columns["thread"][i]]
        assert (rank, block, 32 * warp + columns["lane"][i]) == (event.rank, event.block, event.thread)
        assert role in (event.role, "all threads")
        assert data["calls"][columns["call"][i]] == [event.kernel, event.call]
        assert data["cells"][columns["cell"][i]] == [event.cell.owner, event.cell.text]
        assert data["orders"][columns["order"][i]] == event.order
        if event.what == "wait":
            assert columns["until"][i] == (-1 if event.until is None else event.until)


@pytest.mark.parametrize(
    ("what", "cell", "code"),
    [
        ("store", "tail", "st_release_sys_s32(ring.tail"),
        ("wait", "tail", "wait_or_report(load, tail"),
        ("fill", "x[", "tma_store_1d"),
        ("atomic", "barrier_signal", "add_release_sys_s32"),
    ],
)
def test_an_event_has_the_line_of_the_kernel_that_made_it(what, cell, code):
    trace = traced_run("intranode")
    data = page_data(trace)
    events = trace.events()
    chosen = [
        i for i, e in enumerate(events) if e.what == what and e.cell.text.startswith(cell) and e.kernel != "combine"
    ]
    assert chosen
    codes = set()
    for i in chosen:
        source, number = data["lines"][data["stacks"][data["events"]["stack"][i]][0]]
        source = data["sources"][source]
        codes.add(source["text"].splitlines()[number - source["begin"]])
        file = Path(nbep.__file__).parents[1] / source["file"]
        assert (
            linecache.getline(str(file), number).rstrip("\n") == source["text"].splitlines()[number - source["begin"]]
        )
    assert any(code in each for each in codes)


def test_a_thread_at_a_barrier_that_never_fills_hangs_since_it_came():
    def kernel():
        for turn in range(4):
            if turn < 3 or ptx.thread_idx() < 64:
                ptx.bar_sync(2 if turn < 3 else 3 + ptx.thread_idx() // 32, 96 if turn < 3 else 64)

    trace = Trace()
    world = World(1, seed=1, tracer=trace)

    def host():
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (), 1, 96)
        stream.synchronize()

    with pytest.raises(nbep.DeadlockError):
        world.run([host])
    hangs = trace.hangs()
    at = [(event.thread // 32, event.cell.text, event.value) for event in hangs]
    expected = [(warp, f"barrier[{3 + warp}] of 64 threads", 32) for warp in range(2)]
    assert sorted(at) == sorted(32 * expected)
    assert {event.at[0].function for event in hangs} == {"kernel"}
    assert min(event.step for event in hangs) >= 3 * 96, "not since the barriers that were complete"
    steps = [event.step for event in hangs]
    assert steps == sorted(steps)
    assert len(set(steps)) > 32, "each since it came"
    assert list(trace.exits()) == [(0, "kernel", 0, 0, 2)]


def test_each_warp_of_a_launch_that_has_ended_has_left_before():
    trace = traced_run("intranode")
    exits = trace.exits()
    assert len(exits) == sum(launch.grid * launch.block // 32 for launch in trace.launches)
    for launch in trace.launches:
        steps = [step for warp, step in exits.items() if warp[:3] == (launch.rank, launch.kernel, launch.call)]
        assert launch.begin < min(steps) <= max(steps) <= launch.end


@pytest.mark.parametrize("mode", EACH_MODE)
def test_a_run_that_ends_leaves_no_thread_hanging(mode):
    trace = traced_run(mode)
    assert trace.hangs() == []
    data = page_data(trace)
    waits = KINDS.index("wait")
    nics = {i for i, (rank, *_) in enumerate(data["threads"]) if rank >= data["nicNumbers"]}
    columns = zip(*(data["events"][name] for name in ("kind", "thread", "until")), strict=True)
    assert not [1 for kind, thread, until in columns if kind == waits and until < 0 and thread not in nics]


def test_the_page_of_a_run_that_hangs_says_who_waits_for_ever():
    trace = hanging_run()
    data = page_data(trace)
    stuck = {
        (data["threads"][thread][:2][1], data["cells"][cell][1].partition("[")[0])
        for thread, cell, until in zip(*(data["events"][name] for name in ("thread", "cell", "until")), strict=True)
        if until == -1
    }
    assert stuck == {("receiver", "tail"), ("receiver", "barrier")}


def wait(flag):
    while ptx.ld_acquire_sys_s32(flag) == 0:
        ptx.wait_expired(1 << 62)


def out_of_bounds(flag):
    ptx.st_release_sys_s32(flag + 1000, 1)


def races(flag):
    ptx.st_weak_s32(flag + 4, 1)


def raises(flag):
    raise ValueError("of its own")


def never_meets(flag):
    if ptx.thread_idx() < 32:
        ptx.bar_sync(1, 64)
    else:
        wait(flag)


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (out_of_bounds, OutOfBounds),
        (races, DataRace),
        (raises, ValueError),
        (never_meets, DeadlockError),
        (None, KeyError),
    ],
)
def test_the_page_of_a_run_that_something_stops_ends_with_that_and_at_its_line(act, error):
    """Who waits then hangs only in a deadlock."""

    def kernel(flag):
        wait(flag) if ptx.block_idx() == 0 or act is None else act(flag)

    trace = Trace()
    world = World(1, seed=1, tracer=trace, memory_model="checked")

    def host():
        flag = world.ranks[0].space.allocate(64, "flag", zero=True)
        world.ranks[0].create_stream("s").launch(kernel, (flag.address,), 2, 64)
        if act is not None:
            world.host_wait(lambda: False, "nothing")
        world.host_wait(lambda: world.calls > 200, "a while")
        raise KeyError("of the host")

    with pytest.raises(error) as raised:
        world.run([host])
    data = page_data(trace)
    hangs = {
        KINDS[kind] for kind, until in zip(data["events"]["kind"], data["events"]["until"], strict=True) if until < 0
    }
    last = data["stories"][0]["steps"][-1]
    assert last["report"] == str(raised.value)
    assert last["step"] == data["lastStep"] == trace.last_step
    if error is DeadlockError:
        assert hangs == {"wait", "hang"}
        return
    assert hangs == ({"finding"} if act is not None else set())
    assert (last["title"], last["text"]) == ("The finding", f"{error.__name__} stops the run here.")
    assert "waits for ever" not in str(timeline(trace))
    if act is not None:
        source, number = data["lines"][last["line"]]
        assert data["sources"][source]["function"] == act.__name__
        assert number == act.__code__.co_firstlineno + 1
        assert f"{error.__name__}: {str(raised.value).splitlines()[0]}" in trace.table("finding")


@pytest.mark.parametrize("mode", EACH_MODE)
def test_the_page_names_no_other_file_and_no_place_of_this_machine(mode):
    page = page_html(traced_run(mode))
    assert not re.search(r"https?:|<link|<img|src=|@import|url\((?!#)|import\(|fetch\(", page)
    assert str(Path(nbep.__file__).parents[1]) not in page
    assert "/* " not in re.sub(r"<script.*|<style.*?</style>", "", page, flags=re.DOTALL), "a part is missing"


def test_no_name_of_a_cell_ends_the_script():
    def kernel(cell):
        ptx.st_release_sys_s32(cell, 1)

    trace = Trace()
    world = World(1, seed=1, tracer=trace)

    def host():
        cell = world.ranks[0].space.allocate(128, "</script><b>", zero=True)
        stream = world.ranks[0].create_stream("s")
        stream.launch(kernel, (cell.address,), 1, 1)
        stream.synchronize()

    world.run([host])
    page = page_html(trace)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert [0, "</script><b>[byte 0]"] in json.loads(data)["cells"]


def test_a_notebook_shows_the_page_in_a_frame(tmp_path):
    trace = traced_run("intranode")
    shown = trace.page()._repr_html_()
    page = html.unescape(re.fullmatch(r'<iframe srcdoc="([^"]*)".*></iframe>', shown, re.DOTALL)[1])
    assert trace.to_html(tmp_path / "trace.html").read_text() == page
