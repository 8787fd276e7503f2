"""What `nbep bench low-latency` computes and reports; its times need a GPU: see tests/cuda/test_benchmarks.py."""

import argparse
import json
from types import SimpleNamespace

import numpy as np
import pytest
from bench_fakes import kernels

from nbep.bench import low_latency
from nbep.bench.harness import command
from nbep.bench.harness.clocks import Spread
from nbep.bench.harness.low_latency_calls import Bytes, Variant, bytes_of, calc_diff
from nbep.bench.harness.report import Report
from nbep.bench.low_latency import add_variant, plot, say_faults
from nbep.device.jit import spec_of
from nbep.device.kernels.low_latency.combine import low_latency_combine
from nbep.device.kernels.low_latency.dispatch import low_latency_dispatch

ALONE = SimpleNamespace(rank=0, size=1, barrier=lambda: None, allgather=lambda value: [value])
PEERS = (0, 2)  # of rank 1


# Arguments


def test_experts_that_ranks_cannot_share_are_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(command, "can_run", lambda *_, **__: True)
    monkeypatch.setattr(command, "mpi_world", lambda: None)
    assert low_latency.main(["--ranks", "5"]) == 2
    assert capsys.readouterr().err == "nbep bench low-latency: 288 experts are no multiple of 5 ranks\n"


@pytest.mark.parametrize(
    ("world", "argv", "graph"),
    [
        (None, [], ["off"]),
        (None, ["--graph", "on"], ["on"]),
        (SimpleNamespace(size=4), [], ["off", "on"]),
        (SimpleNamespace(size=4), ["--graph", "off"], ["off"]),
    ],
    ids=["virtual ranks", "virtual ranks, asked for", "processes", "processes, not asked for"],
)
def test_virtual_ranks_use_graphs_only_if_asked(world, argv, graph, monkeypatch):
    seen = []

    def measure_rank(comm, options):
        seen.append(options.graph)
        return True

    monkeypatch.setattr(command, "can_run", lambda *_, **__: True)
    monkeypatch.setattr(command, "mpi_world", lambda: world)
    monkeypatch.setattr(low_latency, "measure_rank", measure_rank)
    monkeypatch.setattr(low_latency.nbep, "spawn", lambda fn, n, target, args: [fn(None, *args) for _ in range(n)])
    assert low_latency.main(argv) == 0
    assert seen[0] == graph


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_wrong_round_trip_on_any_rank_is_the_exit_code(wrong_rank, monkeypatch):
    monkeypatch.setattr(command, "can_run", lambda *_, **__: True)
    monkeypatch.setattr(command, "mpi_world", lambda: None)
    monkeypatch.setattr(low_latency.nbep, "spawn", lambda fn, n, target, args: [r != wrong_rank for r in range(n)])
    assert low_latency.main([]) == 1


@pytest.mark.parametrize("wrong", [None, 8])
def test_the_host_is_measured_before_any_profile_and_nothing_behind_a_wrong_round_trip(wrong, monkeypatch, capsys):
    did = []

    def prepare_calls(setup, variant):
        faults = ["wrong"] if variant.num_tokens == wrong else []
        return SimpleNamespace(number=variant.num_tokens, round_trip=lambda choices: faults), None

    buffer = SimpleNamespace(destroy=lambda: did.append("destroy"))
    monkeypatch.setattr(low_latency, "prepare", lambda comm, options: SimpleNamespace(buffer=buffer))
    monkeypatch.setattr(low_latency, "prepare_calls", prepare_calls)
    monkeypatch.setattr(low_latency, "host_costs", lambda setup, calls: did.append(f"host {calls.number}") or [])
    monkeypatch.setattr(
        low_latency, "measure_variant", lambda setup, calls, choices: did.append(f"all {calls.number}") or ([], [])
    )
    options = low_latency.parse(["--tokens", "1,8", "--deduplicate", "off"])
    assert low_latency.measure_rank(ALONE, options) == (wrong is None)
    assert did == ["host 1", *([] if wrong else ["host 8", "all 1", "all 8"]), "destroy"]


def test_logfmt_is_not_measured_with_deduplicate():
    options = low_latency.parse(["--tokens", "1,8", "--bf16", "--logfmt"])
    assert low_latency.variants(options) == [
        Variant(tokens, *rest)
        for tokens in (1, 8)
        for rest in (
            (True, False, False),
            (False, False, False),
            (True, True, False),
            (True, False, True),
            (False, False, True),
        )
    ]


# Transports


class FakeBuffer:
    """Attributes: made_with: the keywords of the latest one"""

    made_with: dict

    def __init__(self, comm, **keywords):
        FakeBuffer.made_with = keywords

    @staticmethod
    def get_low_latency_rdma_size_hint(*_):
        return 128


@pytest.mark.parametrize(("transport", "num_nvl_peers"), [("direct", None), ("ibgda", 1), ("nvshmem", 1)])
def test_each_rank_is_a_node_without_memory_for_push_unless_all_is_mapped(transport, num_nvl_peers, monkeypatch):
    monkeypatch.setattr(low_latency.nbep, "Buffer", FakeBuffer)
    monkeypatch.setattr(low_latency, "Gap", lambda: lambda: None)
    low_latency.prepare(SimpleNamespace(size=2), low_latency.parse(["--transport", transport]))
    made_with = FakeBuffer.made_with
    assert (made_with["transport"], made_with["num_nvl_peers"]) == (transport, num_nvl_peers)
    assert (made_with["num_nvl_bytes"] > 0) == (transport == "direct")


# Bytes


@pytest.mark.parametrize("deduplicate", [False, True], ids=["every choice", "deduplicate"])
@pytest.mark.parametrize("use_fp8", [False, True], ids=["bf16", "fp8"])
def test_wire_bytes_are_those_of_the_messages_that_leave_a_rank(use_fp8, deduplicate):
    num_ranks, num_tokens, num_topk, hidden, num_experts = 3, 5, 4, 512, 12
    rng = np.random.default_rng(0)
    choices = np.stack(
        [[rng.permutation(num_experts)[:num_topk] for _ in range(num_tokens)] for _ in range(num_ranks)]
    ).astype(np.int64)
    choices[1, 2] = -1
    moved = bytes_of(Variant(num_tokens, use_fp8, False, deduplicate), choices, 1, hidden, num_experts)

    message = (512 + 4 * 4 if use_fp8 else 1024) + 16 + (12 * num_topk if deduplicate else 0)
    sent = returned = 0
    for peer in PEERS:
        for token in range(num_tokens):
            there = sum(expert // 4 == peer for expert in choices[1, token])
            here = sum(expert // 4 == 1 for expert in choices[peer, token])
            sent += min(there, 1) if deduplicate else there
            returned += min(here, 1) if deduplicate else here
    selection = 512 + 4 * 4 + 16 if use_fp8 else 1024
    num_choices = (num_tokens - 1) * num_topk
    assert moved["dispatch"] == Bytes(num_choices * selection, sent * message)
    assert moved["combine"] == Bytes(num_choices * 1024, returned * 1024)


def test_logfmt_counts_ten_bits_a_value():
    choices = np.array([[[0]], [[0]]])
    moved = bytes_of(Variant(1, True, True), choices, 0, 256, 2)
    assert moved["combine"] == Bytes(256 * 10 / 8 + 8, 256 * 10 / 8 + 8)


def test_calc_diff_is_zero_only_for_equal_arrays():
    x = np.linspace(-1, 1, 100)
    assert calc_diff(x, x) == pytest.approx(0, abs=1e-12)
    assert calc_diff(x, 1.1 * x) > 1e-4
    assert not calc_diff(x, x * np.nan) < 1


# Series


class FakeCalls:
    """Calls that only note their names."""

    def __init__(self):
        self.did: list[str] = []
        self.variant = Variant(1)

    def __getattr__(self, name):
        return lambda: self.did.append(name)


class FakeGraph:
    def __init__(self, call):
        self.replay = call


@pytest.fixture
def series(monkeypatch):
    """What each series of either clock calls in a round."""
    of_clocks: dict[str, list[list[str]]] = {"events": [], "kernel": []}

    def by_events(calls, steps):
        calls.did.clear()
        for step in steps:
            step.call()
        of_clocks["events"].append(list(calls.did))
        return {step.label: [10.0] for step in steps if step.label}

    def by_profile(calls, call, names):
        calls.did.clear()
        call()
        of_clocks["kernel"].append(list(calls.did))
        return [kernels(*names)]

    monkeypatch.setattr(low_latency, "by_events", by_events)
    monkeypatch.setattr(low_latency, "by_profile", by_profile)
    monkeypatch.setattr(low_latency, "capture", lambda calls, call: FakeGraph(call))
    return of_clocks


HALF_CALLS = ["send_dispatch", "gap", "receive", "send_combine", "gap", "receive"]


def test_without_graphs_pairs_and_halves_are_measured_by_both_clocks(series):
    calls = FakeCalls()
    samples = low_latency.eager_samples(calls, calls, low_latency.WORKS)
    labels = [*low_latency.PAIR, "both", *low_latency.HALVES]
    assert set(samples) == {(label, clock, False) for label in labels for clock in ("events", "kernel")}
    assert series == {"events": [["dispatch", "combine"], ["both"], HALF_CALLS], "kernel": [["both"], ["halves"]]}


def test_graphs_hold_ten_calls_of_a_kind_and_their_time_is_a_tenth(series):
    calls = FakeCalls()
    samples = low_latency.graph_samples(calls, calls, low_latency.WORKS)
    assert series["events"] == [[name] * 10 for name in ("dispatch", "combine", "both")]
    assert series["kernel"] == [["both"] * 10, ["halves"]]
    assert {label for label, clock, _ in samples if clock == "events"} == {"dispatch", "combine", "both"}
    assert samples["dispatch", "events", True] == [1.0]
    assert len(samples["combine", "kernel", True]) == 10
    assert {label for label, clock, _ in samples if clock == "kernel"} > set(low_latency.HALVES)


@pytest.mark.parametrize("measure", [low_latency.eager_samples, low_latency.graph_samples])
@pytest.mark.parametrize("work", low_latency.WORKS)
def test_only_what_is_asked_for_is_run(measure, work, series):
    calls = FakeCalls()
    samples = measure(calls, calls, [work])
    assert ("halves" in str(series["kernel"])) == (work == "halves")
    assert {low_latency.work_of(label) for label, _, _ in samples} >= {work}
    assert len(series["kernel"]) == 1


# Rows


def test_the_profiler_is_asked_for_the_names_of_the_kernels():
    names = [spec_of(kernel).full_name for kernel in (low_latency_dispatch, low_latency_combine)]
    assert low_latency.names_of(["dispatch", "combine"]) == names
    assert low_latency.names_of(low_latency.HALVES) == [names[0], names[0], names[1], names[1]]


def test_both_is_from_the_start_of_dispatch_to_the_end_of_combine():
    pair = low_latency.PAIR
    samples = low_latency.kernel_samples([kernels("d", "c", "d", "c")], pair * 2, True)
    assert samples == {
        ("dispatch", "kernel", True): [1.0, 3.0],
        ("combine", "kernel", True): [2.0, 4.0],
        ("both", "kernel", True): [12.0, 14.0],
    }
    halves = low_latency.kernel_samples([kernels("d", "d", "c", "c")], low_latency.HALVES, False)
    assert {label for label, _, _ in halves} == set(low_latency.HALVES)
    assert low_latency.kernel_samples(None, pair, False) == {}


MOVED = {"dispatch": Bytes(8000, 6000), "combine": Bytes(16000, 12000)}
PUSHES = [
    {**Variant(128).columns, "verb": "dispatch", "wire_bytes": 6000, "kernel_us": 2.0, "events_us": 3.0},
    {**Variant(128).columns, "verb": "combine", "wire_bytes": 12000, "kernel_us": 4.0, "events_us": 5.0},
]
HOST = {"deduplicate": False, "call": "dispatch", "us": 21.5, "least_us": 18.25, "in_a_row_us": 19.75}


@pytest.mark.parametrize(
    ("label", "clock", "graph", "rates"),
    [
        ("dispatch", "kernel", False, (0.8, 0.6, 0.2)),
        ("combine", "events", False, (1.6, 1.2, 0.5)),
        ("combine", "events", True, (1.6, 1.2, 0.4)),
        ("both", "kernel", False, (2.4, 1.8, 0.6)),
        ("dispatch send", "kernel", False, (None, None, None)),
    ],
)
def test_rates_are_of_the_bytes_of_a_call_and_push_has_the_same_clock(label, clock, graph, rates):
    row = low_latency.make_row(Variant(128), label, clock, graph, Spread(10.0, 9.0, 11.0, 10.5), MOVED, PUSHES)
    assert (row["gbps"], row["wire_gbps"], row["of_push"]) == pytest.approx(rates)
    assert [row[name] for name in ("us", "min_us", "max_us", "average_us")] == [10.0, 9.0, 11.0, 10.5]
    assert {**row, "num_tokens": 128, "dispatch": "fp8", "combine": "bf16", "deduplicate": False} == row


def test_without_push_there_is_no_ratio():
    row = low_latency.make_row(Variant(1), "both", "kernel", False, Spread(1, 1, 1, 1), MOVED, [])
    assert row["of_push"] is None
    assert row["gbps"] is not None


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_push_has_whole_rows_for_all_bytes(num_ranks):
    row_bytes = low_latency.ROW_BYTES
    assert low_latency.push_rows(1, num_ranks) == 1
    assert low_latency.push_rows(5 * row_bytes * (num_ranks - 1), num_ranks) == 5
    assert low_latency.push_rows(5 * row_bytes * (num_ranks - 1) + 1, num_ranks) == 6


# Report


@pytest.fixture
def report(tmp_path):
    files = {"json": tmp_path / "all.json", "plot": tmp_path / "plot.png"}
    options = argparse.Namespace(transport="direct", hidden=7168, topk=8, experts=288, repeat=30, **files)
    return Report(options, num_ranks=4, rows=[], push=[], host=[])


def rows_of(variant: Variant) -> list[dict]:
    spread = Spread(10.0 + variant.num_tokens, 9.0, 11.0, 10.5)
    return [
        low_latency.make_row(variant, label, "kernel", False, spread, MOVED, PUSHES)
        for label in ("dispatch", "combine", "dispatch send")
    ]


def test_every_variant_is_told_and_written_when_it_is_measured(report, capsys):
    variant = Variant(128)
    add_variant(report, variant, rows_of(variant), PUSHES, [HOST])
    told = capsys.readouterr().out
    assert (
        "4 ranks over direct, 128 tokens, hidden 7168, top-8 of 288, dispatch fp8, combine bf16, deduplicate off"
        in told
    )
    assert "138.0" in told
    assert "host cost: dispatch 21.5 us (least 18.2, in a row 19.8)" in told
    assert "no times of kernels" not in told
    add_variant(report, Variant(8), rows_of(Variant(8)), [], [])
    written = json.loads(report.options.json.read_text())
    assert [row["work"] for row in written["rows"]] == ["dispatch", "combine", "dispatch send"] * 2
    assert [row["num_tokens"] for row in written["rows"]] == [128] * 3 + [8] * 3
    assert written["rows"][0]["us"] == 138.0
    assert written["push"][1]["kernel_us"] == 4.0
    assert written["host"] == [HOST]


def test_times_of_kernels_that_are_missing_are_told(report, capsys):
    row = low_latency.make_row(Variant(1), "dispatch", "events", False, Spread(1, 1, 1, 1), MOVED, [])
    add_variant(report, Variant(1), [row], [], [])
    assert "no times of kernels" in capsys.readouterr().out


def test_what_is_wrong_is_told_with_its_rank(capsys):
    say_faults(Variant(4), [[], ["recv_count is [1], not [2]"]])
    assert capsys.readouterr().err.splitlines()[1:] == ["  rank 1: recv_count is [1], not [2]"]


def test_the_plot_has_a_line_for_each_work_and_push(report, monkeypatch):
    from matplotlib.axes import Axes

    drawn = {}
    draw = Axes.plot

    def remember(axes, x, y, **style):
        drawn[style["label"]] = (x, y)
        return draw(axes, x, y, **style)

    monkeypatch.setattr(Axes, "plot", remember)
    rows = [row for tokens in (8, 1) for row in rows_of(Variant(tokens, deduplicate=True))]
    report.add(rows=rows, push=PUSHES)
    plot(report)
    assert report.options.plot.stat().st_size > 0
    assert drawn == {
        "dispatch fp8 deduplicated": ([1, 8], [11.0, 18.0]),
        "combine bf16 deduplicated": ([1, 8], [11.0, 18.0]),
        "push as dispatch fp8": ([128], [2.0]),
        "push as combine bf16": ([128], [4.0]),
    }
