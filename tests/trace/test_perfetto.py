"""The timeline for Perfetto is valid in the trace event format, and has a slice for each wait and a flow for each read.

The format's rules that hold here, from "Trace Event Format" of the Catapult project: each event has a
phase, a process and a time; a complete event has a length; slices of one thread nest; a flow begins in a slice and ends
in a later one with the same id.
"""

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from traced_runs import EACH_MODE, hanging_run, traced_run

from nbep.lab.trace.events import readings
from nbep.lab.trace.perfetto import timeline

NEEDED = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "dur": int, "args": dict},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "id": int},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": int, "id": int, "bp": str},
    "C": {"name": str, "pid": int, "tid": int, "ts": int, "args": dict},
    "M": {"name": str, "pid": int, "tid": int, "ts": int, "args": dict},
}
META = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}


def of_phase(entries: list[dict], phase: str) -> list[dict]:
    return [entry for entry in entries if entry["ph"] == phase]


@pytest.fixture(scope="module", params=EACH_MODE)
def run(request, tmp_path_factory):
    trace = traced_run(request.param)
    path = trace.to_perfetto(tmp_path_factory.mktemp("perfetto") / "trace.json")
    return trace, json.loads(path.read_text())["traceEvents"]


def test_each_entry_has_the_fields_of_its_phase(run):
    _, entries = run
    for entry in entries:
        needed = NEEDED[entry["ph"]]
        assert {name: type(entry.get(name)) for name in needed} == needed
        assert set(entry) == {*needed, "ph"}
        assert entry["ts"] >= 0
    assert {entry["name"] for entry in of_phase(entries, "M")} == set(META)
    for entry in of_phase(entries, "M"):
        assert list(entry["args"]) == [META[entry["name"]]]
    for entry in of_phase(entries, "C"):
        assert all(isinstance(value, int) and value >= 0 for value in entry["args"].values())
    for entry in of_phase(entries, "f"):
        assert entry["bp"] == "e", "else a flow ends at the next slice"


def test_slices_of_one_thread_do_not_overlap_and_each_thread_has_a_name(run):
    _, entries = run
    threads = defaultdict(list)
    for entry in of_phase(entries, "X"):
        threads[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
    for slices in threads.values():
        assert all(end > begin for begin, end in slices)
        slices.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(slices))
    named = {(entry["pid"], entry["tid"]): entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert named.keys() == threads.keys()


def test_ranks_are_processes_and_roles_are_threads(run):
    trace, entries = run
    ranks = {entry["pid"]: entry["args"]["name"] for entry in entries if entry["name"] == "process_name"}
    assert {name for rank, name in ranks.items() if rank < trace.num_ranks} == {
        f"rank {rank}" for rank in range(trace.num_ranks)
    }
    roles = {(entry["pid"], entry["args"]["name"]) for entry in entries if entry["name"] == "thread_name"}
    assert {(event.rank, event.role) for event in trace.events(["store", "atomic", "fill", "wait"])} <= roles


def test_each_wait_is_a_slice_that_says_for_what(run):
    trace, entries = run
    slices = sorted(
        (entry["pid"], entry["ts"], entry["dur"], entry["name"])
        for entry in of_phase(entries, "X")
        if entry["cat"] == "wait"
    )
    last = trace.last_step
    assert slices == sorted(
        (
            event.rank,
            event.step,
            max((last if event.until is None else event.until) - event.step, 1),
            f"waits for {'ever for ' if event.until is None else ''}{event.cell.text}",
        )
        for event in trace.events("wait")
    )


def test_each_store_that_was_read_has_a_flow_to_who_read_it(run):
    trace, entries = run
    begins = {entry["id"]: entry for entry in of_phase(entries, "s")}
    ends = {entry["id"]: entry for entry in of_phase(entries, "f")}
    assert begins.keys() == ends.keys()
    assert len(begins) == len(of_phase(entries, "s"))
    events = trace.events()
    expected = sorted(
        (events[stored].rank, events[stored].step, events[seen].rank, events[seen].step)
        for stored, seen in readings(events)
    )
    assert expected == sorted((begins[i]["pid"], begins[i]["ts"], ends[i]["pid"], ends[i]["ts"]) for i in begins)
    slices = {(entry["pid"], entry["tid"], entry["ts"]): entry["cat"] for entry in of_phase(entries, "X")}
    for entry in begins.values():
        assert slices[entry["pid"], entry["tid"], entry["ts"]] in ("store", "atomic")
    for entry in ends.values():
        assert slices[entry["pid"], entry["tid"], entry["ts"]] in ("see", "atomic")


def test_a_counter_says_how_full_each_ring_is(run):
    trace, entries = run
    counters = defaultdict(list)
    for entry in of_phase(entries, "C"):
        counters[entry["pid"], entry["name"]].append(entry["args"]["slots in use"])
    peaks = defaultdict(int)
    for ring in trace.rings():
        node = f", for node {ring.node}" if ring.node >= 0 else ""
        name = f"{ring.level} ring from rank {ring.src}, channel {ring.channel}{node}".strip()
        peaks[ring.rank, name] = max(peaks[ring.rank, name], ring.peak)
    assert {key: max(values) for key, values in counters.items()} == peaks


def test_what_never_ends_is_as_long_as_the_run():
    trace = hanging_run()
    entries = timeline(trace)["traceEvents"]
    open_ones = [entry for entry in of_phase(entries, "X") if entry["name"].startswith("waits for ever for")]
    assert {entry["name"].split()[4].partition("[")[0] for entry in open_ones} == {"tail", "barrier"}
    assert all(entry["ts"] + entry["dur"] == max(trace.last_step, entry["ts"] + 1) for entry in open_ones)
