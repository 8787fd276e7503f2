"""`nbep bench host` where nothing is launched; what it measures on GPUs needs some."""

import json

import bench_host as host
import pytest
from bench_host import PAIR

pytestmark = pytest.mark.emulator_only("its GPU is none")


def test_every_verb_is_measured_through_both_fronts_without_a_gpu(tmp_path, capsys):
    pytest.importorskip("torch")
    path = tmp_path / "host.json"
    assert host.main(["--no-launch", "--series", "1", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert not found["launches"]
    assert "nothing is launched" in " ".join(capsys.readouterr().out.split())
    verbs: dict[str, list[str]] = {}
    for row in found["rows"]:
        verbs.setdefault(row["verb"], []).append(row["front"])
        assert row["events"] is row["events_default"] is None
        assert all(row[name + suffix] > 0 for name in ("in_a_row", "cold") for suffix in ("", "_default"))
    of_elastic = {verb: verbs.pop(verb) for verb in list(verbs) if verb.startswith("elastic")}
    assert all(fronts == list(host.FRONTS) for fronts in verbs.values())
    assert len(of_elastic) == 3
    assert all(fronts == ["nbep.ElasticBuffer", "nbep.deep_ep.ElasticBuffer"] for fronts in of_elastic.values())
    assert {PAIR, "layout", "cached dispatch", "combine, zero copy", "combine between nodes"} <= set(verbs)


def test_what_is_missing_is_said_in_one_line(monkeypatch, capsys):
    pytest.importorskip("torch")
    assert host.main(["--no-launch", "--beside", "deep_ep"]) == 2
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    assert host.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "nbep bench host --beside deep_ep needs 2 GPUs",
        "nbep bench host needs torch: pip install torch",
    ]
