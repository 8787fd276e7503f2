"""The benchmarks for GPUs: what they say where they cannot run, and what they compute."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from nbep.bench.harness.clocks import Clock, mean_us
from nbep.cli import module_of

GPU_BENCHMARKS = ["elastic", "internode", "intranode", "launch", "low-latency", "network", "soak"]


def main_of(name: str):
    return import_module(module_of("bench", name)).main


@pytest.mark.parametrize("name", GPU_BENCHMARKS)
def test_without_a_gpu_one_line_says_so(name, monkeypatch, capsys):
    monkeypatch.setattr("nbep.host.target.cuda.driver.unusable_reason", lambda: "no driver\nwas found")
    assert main_of(name)([]) == 2
    assert capsys.readouterr().err == f"nbep bench {name} needs a GPU: no driver\n"


@pytest.mark.parametrize("name", ["elastic", "internode", "intranode", "low-latency", "soak"])
def test_without_torch_one_line_says_so(name, monkeypatch, capsys):
    monkeypatch.setattr("nbep.host.target.cuda.driver.unusable_reason", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main_of(name)([]) == 2
    assert capsys.readouterr().err == f"nbep bench {name} needs torch: pip install torch\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["elastic", "--repeat", "0"],
        ["intranode", "--repeat", "0"],
        ["intranode", "--ranks", "3"],
        ["launch", "--repeat", "0"],
        ["low-latency", "--repeat", "0"],
        ["low-latency", "--ranks", "257"],
        ["low-latency", "--tokens", "8,0"],
        ["low-latency", "--works", "dispatch,nothing"],
        ["low-latency", "--deduplicate", "maybe"],
        ["soak", "--rounds", "0"],
    ],
    ids=" ".join,
)
def test_numbers_that_measure_nothing_are_refused(argv, capsys):
    name, *options = argv
    with pytest.raises(SystemExit) as exit_info:
        main_of(name)(options)
    assert exit_info.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize("repeat", [1, 4])
def test_the_first_call_is_not_timed_however_few_there_are(repeat, monkeypatch):
    """The n-th call takes n ms, so the mean tells which ones count."""
    made = []

    class Event:
        def __init__(self, enable_timing):
            made.append(self)
            self.number = len(made)

        def record(self):
            pass

        def elapsed_time(self, end):
            return end.number / 2

    stream = SimpleNamespace(synchronize=lambda: None)
    torch = SimpleNamespace(cuda=SimpleNamespace(Event=Event, current_stream=lambda: stream))
    monkeypatch.setitem(sys.modules, "torch", torch)
    comm = SimpleNamespace(size=1, barrier=lambda: None, allgather=lambda value: [value])
    calls = []
    us = mean_us(Clock(comm, repeat, sleeps=False), lambda: calls.append(1))
    assert us == pytest.approx(1e3 * sum(range(2, repeat + 2)) / repeat)
    assert len(calls) == 3 + 1 + repeat
