"""The benchmark runs and says what it measured."""

import json
from functools import partial

import bench_emulator as emulator
import pytest
from bench_emulator import launched, ring


def test_bench_prints_a_rate_for_every_case(capsys, monkeypatch, tmp_path):
    small = partial(launched, function=ring, number=1)
    monkeypatch.setattr(emulator, "WORKLOADS", dict.fromkeys(emulator.WORKLOADS, small))
    monkeypatch.setitem(emulator.PROGRAMS, "ring of 6 rows", small)
    few = ["--seconds", "0.0005", "--repeats", "1"]
    assert emulator.main([*few, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rates = told["calls_per_second"]
    assert {case[0] for case in emulator.CASES} < set(rates)
    assert all(rate > 0 for rate in rates.values())
    every = told["every_schedule"]
    assert every["calls_per_second"] > every["schedules_per_second"] > 0
    assert all(min(run["sc"], run["delayed"], run["checked"]) > 0 for run in told["cpu_seconds"])
    assert [run["name"] for run in told["cpu_seconds"]] == list(emulator.WORKLOADS)
    assert {run["name"]: run["runs"] for run in told["all_schedules"]} == {
        "ring of 6 rows": 1,
        "two barriers": 3,
        "low-latency token": 4,
    }
    assert emulator.main([*few, "--json", str(tmp_path / "all.json")]) == 0
    assert json.loads((tmp_path / "all.json").read_text()).keys() == told.keys()
    out = capsys.readouterr().out
    assert "thousand calls/s" in out
    assert "Every schedule: " in out
    assert "call inside a node" in out
    assert "low-latency token" in out


@pytest.mark.thorough
def test_engines_are_compared_at_each_size(capsys, monkeypatch):
    """It compiles two kernels if the cache has not got them."""
    pytest.importorskip("numba")
    monkeypatch.setattr(emulator, "SIZES", ((1, 128), (2, 256)))
    assert emulator.main(["--engines", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["engines"]
    sizes = [(size, model) for size in ("1 x 128", "2 x 256") for model in ("sc", "checked")]
    assert [(row["name"], row["model"]) for row in rows] == sizes
    assert rows[0]["calls"] == rows[1]["calls"] < rows[2]["calls"]
    assert all(row["ratio"] == row["python"] / row["compiled"] for row in rows)
