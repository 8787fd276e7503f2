"""The benchmark runs and says what it measured."""

import json

from nbep.bench import emulator


def test_bench_prints_a_rate_for_every_case(capsys):
    assert emulator.main(["--seconds", "0.0005", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rates = told["calls_per_second"]
    assert {case[0] for case in emulator.CASES} < set(rates)
    assert all(rate > 0 for rate in rates.values())
    every = told["every_schedule"]
    assert every["calls_per_second"] > every["schedules_per_second"] > 0
    assert emulator.main(["--seconds", "0.0005"]) == 0
    out = capsys.readouterr().out
    assert "thousand calls/s" in out
    assert "Every schedule: " in out
