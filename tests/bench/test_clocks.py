"""The clocks of the benchmarks, on a torch that only takes notes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_fakes import kernels

from nbep.bench.harness import clocks
from nbep.bench.harness.clocks import Clock, KernelTime, Spread, Step

ALONE = SimpleNamespace(rank=0, size=1, barrier=lambda: None, allgather=lambda value: [value])


class FakeCuda:
    """torch.cuda with a clock that steps on by 1 ms at every event; `did` is what was queued."""

    def __init__(self, monkeypatch):
        self.did: list[object] = []
        self.now = 0
        fake = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                fake.now += 1
                self.at = fake.now
                fake.did.append("event")

            def elapsed_time(self, end):
                return end.at - self.at

        stream = SimpleNamespace(synchronize=lambda: self.did.append("synchronize"))
        cuda = SimpleNamespace(
            Event=Event, current_stream=lambda: stream, _sleep=lambda cycles: self.did.append("sleep")
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    def clock(self, comm, repeat: int) -> Clock:
        return Clock(comm, repeat, lambda: self.did.append("barrier"))


def test_events_leave_out_the_first_round_and_what_has_no_label(monkeypatch):
    fake = FakeCuda(monkeypatch)
    clock = fake.clock(ALONE, repeat=2)

    def slow_at_first(first=[True]):  # noqa: B006
        if fake.did.count("barrier"):
            fake.now += 100 if first[0] else 2
            first[0] = False
        fake.did.append("a")

    steps = [
        Step("a", slow_at_first),
        Step("", lambda: fake.did.append("gap")),
        Step("b", lambda: fake.did.append("b")),
    ]
    assert clocks.by_events(clock, steps) == {"a": [3e3, 3e3], "b": [1e3, 1e3]}
    series = ["event", "a", "event", "gap", "event", "b", "event"]
    assert fake.did == ["a", "gap", "b"] * 3 + ["synchronize", "sleep", "barrier"] + series * 3 + ["synchronize"]


def test_ranks_that_are_threads_do_not_sleep(monkeypatch):
    fake = FakeCuda(monkeypatch)
    clock = fake.clock(ALONE, repeat=1)
    clock.is_virtual = True
    clock.align(7)
    assert fake.did == ["synchronize", "barrier"]


def test_what_the_host_lets_go_of_is_outside_its_clock(monkeypatch):
    fake = FakeCuda(monkeypatch)

    class Result:
        def __del__(self):
            fake.did.append("let go of the result")

    def read_clock():
        fake.did.append("clock")
        return 0.0

    def call():
        fake.did.append("call")
        return Result()

    monkeypatch.setattr(clocks.time, "perf_counter", read_clock)
    clocks.host_times(fake.clock(ALONE, repeat=1), [Step("a", call, lambda: fake.did.append("let go"))])
    measured = [did for did in fake.did if did != "synchronize"]
    one = ["let go", "clock", "call", "clock", "let go of the result"]
    assert measured == one * (len(measured) // len(one))


def test_a_trace_gives_the_kernels_that_are_asked_for_by_time(tmp_path):
    def event(name, ts, cat="kernel"):
        return {"cat": cat, "name": name, "ts": ts, "dur": 1.5, "args": {"stream": 7}}

    trace = tmp_path / "trace.json"
    events = [event("combine", 20.5), event("spin", 1), {"ph": "M"}, event("dispatch", 3, "cuda_runtime")]
    trace.write_text(json.dumps({"traceEvents": [*events, event("dispatch", 10)]}))
    found = clocks.read_trace(trace, frozenset(["dispatch", "combine"]))
    assert found == [KernelTime("dispatch", 7, 10.0, 1.5), KernelTime("combine", 7, 20.5, 1.5)]


@pytest.mark.parametrize(
    "seen", [["a", "b", "a"], ["a", "b", "b", "a"], ["a", "b"] * 3], ids=["one is lost", "another order", "too many"]
)
def test_kernels_that_do_not_make_up_the_rounds_are_no_rounds(seen):
    assert clocks.split_rounds(kernels(*seen), ["a", "b"], 2) is None


def test_kernels_are_dealt_out_to_rounds():
    a, b, c, d = kernels("a", "b", "a", "b")
    assert clocks.split_rounds([a, b, c, d], ["a", "b"], 2) == [[a, b], [c, d]]


def test_a_lost_kernel_makes_the_profiler_try_again(monkeypatch):
    seen = [kernels("a", "a"), kernels("a", "a", "a")]
    monkeypatch.setattr(clocks, "_profile", lambda *_: [seen.pop(0)])
    rounds = clocks.by_profile(Clock(ALONE, 2), lambda: None, ["a"])
    assert rounds == [[kernel] for kernel in kernels("a", "a", "a")[1:]]
    assert seen == []


def test_kernels_lost_on_another_rank_are_lost_here_too(monkeypatch):
    tries = []
    comm = SimpleNamespace(rank=0, size=2, allgather=lambda value: [value, False])
    monkeypatch.setattr(clocks, "_profile", lambda *_: [tries.append(1) or kernels("a", "a")])
    assert clocks.by_profile(Clock(comm, 1), lambda: None, ["a"]) is None
    assert len(tries) == clocks.TRIES


@pytest.mark.parametrize("rank", [0, 1])
def test_each_virtual_rank_takes_the_kernels_of_one_stream(rank, monkeypatch):
    streams = [kernels("a", "a", stream=stream) for stream in (13, 17)]
    comm = SimpleNamespace(rank=rank, size=2, allgather=lambda value: [value] * 2, bcast=lambda value: streams)
    monkeypatch.setattr(clocks, "_profile", lambda *_: streams if rank == 0 else [])
    clock = Clock(comm, 1)
    clock.is_virtual = True
    assert clocks.by_profile(clock, lambda: None, ["a"]) == [[streams[rank][1]]]


def test_the_second_of_two_series_is_profiled(monkeypatch):
    fake = FakeCuda(monkeypatch)

    class Profile:
        def __init__(self, activities, schedule):
            assert (activities, schedule) == (["GPU"], {"wait": 0, "warmup": 1, "active": 1, "repeat": 1})

        def __enter__(self):
            fake.did.append("profile")

        def __exit__(self, *_):
            fake.did.append("end")

        def step(self):
            fake.did.append("step")

        def export_chrome_trace(self, path):
            fake.did.append("export")
            Path(path).write_text('{"traceEvents": []}')

    activity = SimpleNamespace(CUDA="GPU")
    module = SimpleNamespace(ProfilerActivity=activity, profile=Profile, schedule=lambda **steps: steps)
    monkeypatch.setitem(sys.modules, "torch.profiler", module)
    clock = fake.clock(ALONE, repeat=2)
    assert clocks._profile(clock, lambda: fake.did.append("call"), frozenset(["a"])) == [[]]
    series = ["synchronize", "sleep", "barrier", "call", "call", "call", "synchronize", "step"]
    assert fake.did == ["profile", *series, *series, "end", "export"]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_capture_one_after_the_other(rank, monkeypatch):
    fake = FakeCuda(monkeypatch)

    class Capture:
        def __init__(self, graph, capture_error_mode):
            assert capture_error_mode == "thread_local"

        def __enter__(self):
            fake.did.append("begin")

        def __exit__(self, *_):
            fake.did.append("end")

    cuda = sys.modules["torch"].cuda
    cuda.CUDAGraph, cuda.graph = SimpleNamespace, Capture
    comm = SimpleNamespace(rank=rank, size=3, barrier=lambda: fake.did.append("meet"))
    clocks.capture(fake.clock(comm, repeat=1), lambda: fake.did.append("call"))
    met = ["synchronize", "meet"]
    assert fake.did == met * (rank + 1) + ["begin", "call", "end"] + met * (3 - rank)


def test_a_rank_counts_with_its_median_and_the_average_with_all():
    comm = SimpleNamespace(allgather=lambda value: [value, (5.0, 7.0)])
    assert clocks.over_ranks(comm, [1.0, 2.0, 6.0]) == Spread(3.5, 2.0, 5.0, 5.0)
