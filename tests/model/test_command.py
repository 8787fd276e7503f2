"""`python -m research.model` prints each published row with its error, and others; as text, JSON and pictures."""

import json

import pytest

from research.model.__main__ import main
from research.model.predictions import bar
from research.model.published import rows, work_of
from research.model.times import H800_FILE, Links, loads_of, time_of


def run(capsys, *options):
    assert main(options) == 0
    return capsys.readouterr().out


@pytest.mark.thorough
def test_each_row_of_the_table_is_there_with_its_error(capsys):
    found = json.loads(run(capsys, "--json"))["compared"]
    assert [(row["mode"], row["verb"], row["ranks"]) for row in found] == [(r.mode, r.verb, r.ranks) for r in rows()]
    for row in found:
        assert row["error"] == pytest.approx(row["us"] / row["published_us"] - 1)


@pytest.mark.thorough
def test_times_are_predicted_from_16_to_1024_ranks(capsys):
    found = json.loads(run(capsys, "--json"))["predicted"]
    assert {row["ranks"] for row in found} == {16, 32, 64, 128, 256, 512, 1024}
    row = next(row for row in found if (row["mode"], row["verb"], row["ranks"]) == ("low_latency", "combine", 1024))
    assert row["us"] == time_of(loads_of(work_of("low_latency", 1024), "combine"), Links.read()).us


def test_the_text_marks_what_was_fitted_and_what_is_predicted(capsys):
    lines = run(capsys).splitlines()
    dispatch = next(line for line in lines if line.split()[:4] == ["low", "latency", "dispatch", "64"])
    combine = next(line for line in lines if line.split()[:4] == ["low", "latency", "combine", "64"])
    assert "fitted" in dispatch
    assert "predicted" in combine
    assert any(line.startswith("mean error: ") for line in lines)


def test_links_of_ones_own_are_not_compared_with_the_table(capsys, tmp_path):
    path = tmp_path / "slow.toml"
    text = H800_FILE.read_text()
    path.write_text(text.replace('name = "H800', 'name = "half an H800').replace("start_us = ", "start_us = 1e6 # "))
    found = json.loads(run(capsys, "--json", "--links", str(path), "--ranks", "24"))
    assert found["links"]["name"].startswith("half")
    assert found["compared"] == []
    assert {row["ranks"] for row in found["predicted"]} == {24}
    assert all(row["us"] > 1e6 for row in found["predicted"])


@pytest.mark.thorough
def test_pictures_are_written_and_named(capsys, tmp_path):
    out = run(capsys, "--plot", str(tmp_path / "new"))
    for name in ("times", "links", "errors"):
        path = tmp_path / "new" / f"model_{name}.svg"
        assert f"written: {path}" in out
        assert "<svg" in path.read_text()


def test_a_fit_prints_the_parameters_of_the_file(capsys):
    for line in run(capsys, "--fit").splitlines():
        table, name, _, value = line.split()
        after = H800_FILE.read_text().partition(table)[2]
        assert f"{name} = {value} " in after


@pytest.mark.parametrize("options", [["--ranks", "12"], ["--ranks", "8"], ["--ranks", "x"], ["--links", "nowhere"]])
def test_bad_options_are_refused(options, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(options)
    assert exit_info.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_a_bar_points_to_the_side_of_the_error():
    assert bar(0.04) == " " * 16 + "|=="
    assert bar(-0.04) == " " * 14 + "==|"
    assert bar(0.0) == " " * 16 + "|"
