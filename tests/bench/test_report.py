"""What all benchmarks say and write by: nbep.bench.harness.report."""

import argparse
import json
from pathlib import Path

import pytest

from nbep.bench.harness.report import Push, Report, cell, draw, push_gbps
from nbep.device.terminal import STDOUT

ROW = {"work": "dispatch", "us": 12.345, "gbps": None, "graph": False}
OTHER = {"work": "combine", "us": 1.0, "gbps": 2.0, "graph": True}


@pytest.mark.parametrize(
    ("field", "text"), [("work", "dispatch"), ("us:.1f", "12.3"), ("gbps:.1f", ""), ("graph", "no")]
)
def test_a_cell_is_formatted_as_its_column_says(field, text):
    assert cell(ROW, field) == text


def test_what_is_found_is_written_at_once_and_kept(tmp_path):
    path = tmp_path / "all.json"
    report = Report(argparse.Namespace(json=path), num_ranks=2, push_gbps=push_gbps({8: Push(1.0, 2.0, 3.0)}))
    report.add(rows=[ROW])
    report.add(rows=[OTHER], host=[])
    written = json.loads(path.read_text())
    assert [row["work"] for row in written.pop("rows")] == ["dispatch", "combine"]
    assert written == {"num_ranks": 2, "push_gbps": {"8": {"to_peers": 1, "at_home": 2, "both": 3}}, "host": []}


def test_with_json_alone_the_output_has_one_value(capsys):
    report = Report(argparse.Namespace(json=STDOUT), num_ranks=2)
    report.say("a line")
    report.table([ROW], {"work": "work"})
    report.add(rows=[ROW])
    report.close()
    assert json.loads(capsys.readouterr().out)["num_ranks"] == 2


def test_a_table_has_a_line_for_each_row(capsys):
    report = Report(argparse.Namespace(json=None))
    report.table([ROW, OTHER], {"work": "work", "us": "us:.1f", "graph": "graph"}, "times")
    told = capsys.readouterr().out
    assert "times" in told
    assert [line.split()[1::2] for line in told.splitlines() if "combine" in line] == [["combine", "1.0", "yes"]]


def test_ceilings_are_dashed(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    styles = {}
    monkeypatch.setattr(Axes, "plot", lambda axes, x, y, **style: styles.update({style["label"]: style}))
    monkeypatch.setattr(Axes, "legend", lambda axes, **_: None)
    path: Path = tmp_path / "plot.png"
    draw(path, [("combine", 2, 1.0), ("push", 2, 3.0)], dashed="push", title="2 ranks")
    assert path.stat().st_size > 0
    assert [style.get("linestyle") for style in styles.values()] == [None, "--"]
