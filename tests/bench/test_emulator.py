"""The benchmark runs and says what it measured."""

import json

from nbep.bench import emulator


def test_bench_prints_a_rate_for_every_case(capsys):
    assert emulator.main(["--seconds", "0.0005", "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["calls_per_second"]
    assert {case[0] for case in emulator.CASES} < set(rates)
    assert all(rate > 0 for rate in rates.values())
    assert emulator.main(["--seconds", "0.0005"]) == 0
    assert "thousand calls/s" in capsys.readouterr().out
