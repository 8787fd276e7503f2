"""`nbep demo` says what it did, saves its picture, and fails when a result is wrong."""

import io
import re

import numpy as np
import pytest
from primitives_of import replace_primitives
from rich.console import Console
from tables import checks_of

from nbep import reference
from nbep.cli import main as nbep_main
from nbep.demo import main
from nbep.demo.checks import Progress
from nbep.demo.layer import PHASES
from nbep.device.kernels.parts import header, sums
from nbep.device.protocols import teams

SMALL = ["--ranks", "2", "--tokens", "5", "--hidden", "16", "--experts", "4"]


def run(capsys, *options: str) -> tuple[int, str]:
    status = main([*SMALL, *options])
    return status, capsys.readouterr().out


def test_demo_passes_its_checks_and_saves_the_picture(capsys, tmp_path):
    out = tmp_path / "rings.png"
    status, output = run(capsys, "--out", str(out))
    assert status == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in output
    checks = checks_of(output)
    assert {"is_token_in_rank", "recv_x", "recv_topk_idx", "combined_x", "MoE layer"} <= set(checks)
    assert set(checks.values()) == {"pass"}
    assert f"All {len(checks)} checks passed" in output
    assert re.search(r"[\d,]+ primitive calls", output)


def test_table_says_who_sent_how_many_tokens_to_whom(capsys):
    _, output = run(capsys, "--no-picture", "--seed", "3")
    rng = np.random.default_rng(3)
    x = [rng.standard_normal((5, 16), np.float32).astype(reference.BF16) for _ in range(2)]
    gate_weight = rng.standard_normal((16, 4), np.float32)
    per_expert = np.zeros(4, int)
    for rank in range(2):
        topk_idx, _ = reference.gate(x[rank], gate_weight, 2)
        layout = reference.get_dispatch_layout(topk_idx, 4, 2)
        first, second = layout.num_tokens_per_rank
        assert re.search(rf"rank {rank} +{first} +{second} +{first + second} +5\b", output)
        per_expert += layout.num_tokens_per_expert
    assert re.search(rf"rank 0 +0 to 1 +{per_expert[0]} +{per_expert[1]}\b", output)
    assert re.search(rf"rank 1 +2 to 3 +{per_expert[2]} +{per_expert[3]}\b", output)


def test_lines_without_a_terminal_tell_the_phases_in_order(capsys):
    _, output = run(capsys, "--no-picture")
    assert "\x1b" not in output
    phases = re.findall(r"^(\w+) done on all ranks", output, re.MULTILINE)
    assert phases == ["layout", "dispatch", "experts", "combine"]


def test_a_terminal_shows_the_phase_of_each_rank():
    stream = io.StringIO()
    progress = Progress(Console(file=stream, force_terminal=True, width=80), 2, PHASES)
    with progress.shown():
        progress.enter(0, "dispatch")
        progress.enter(1, "done")
    output = stream.getvalue()
    assert "rank 0" in output
    assert "rank 1" in output
    assert "\x1b[1;33mdispatch" in output  # under way
    assert "done on all ranks" not in output


@pytest.mark.parametrize("options", [["--fp8", "--hidden", "128"], ["--tokens", "0"], ["--ranks", "4", "--topk", "4"]])
def test_other_settings_pass(capsys, options):
    status, output = run(capsys, "--no-picture", *options)
    assert status == 0
    assert set(checks_of(output).values()) == {"pass"}
    assert ("FP8 scales" in output) == ("--fp8" in options)


def test_no_picture_is_saved_when_none_is_wanted(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "--no-picture")[0] == 0
    assert list(tmp_path.iterdir()) == []
    assert run(capsys)[0] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["nbep_demo_rings.png"]


def test_a_page_of_the_run_is_written_when_it_is_wanted(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, output = run(capsys, "--no-picture", "--html")
    assert status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["nbep_demo.html"]
    assert str(tmp_path / "nbep_demo.html") in output
    assert "ring from rank 1, channel 0" in (tmp_path / "nbep_demo.html").read_text()
    assert run(capsys, "--html", "mine.html")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"nbep_demo.html", "nbep_demo_rings.png", "mine.html"}


def test_a_run_that_stops_leaves_its_page(capsys, tmp_path, monkeypatch):
    replace_primitives(monkeypatch, teams, st_release_sys_s32=lambda address, value: None)
    path = tmp_path / "run.html"
    status, output = run(capsys, "--no-picture", "--html", str(path))
    assert status == 1
    assert str(path) in output
    assert '"barrier[1] of 32 threads"' in path.read_text(), "where the receivers' teams hang"


def test_a_wrong_sum_in_combine_fails_two_checks(capsys, monkeypatch):
    # The kernel forgets the third and fourth pair of a vector.
    right = sums.add_bf16x8
    monkeypatch.setattr(sums, "add_bf16x8", lambda total, v: right(total, (v[0], v[1], 0, 0)))
    status, output = run(capsys, "--no-picture")
    assert status == 1
    failed = {name for name, result in checks_of(output).items() if result == "FAIL"}
    assert failed == {"combined_x", "MoE layer"}
    assert "2 of 16 checks failed: combined_x, MoE layer" in output
    assert re.search(r"combined_x: rank 0: 5 of 5 rows", output)


def test_a_wrong_weight_in_dispatch_fails_its_check(capsys, monkeypatch):
    replace_primitives(monkeypatch, header, ld_na_f32=lambda address: np.float32(0.5))
    status, output = run(capsys, "--no-picture")
    assert status == 1
    assert checks_of(output)["recv_topk_weights"] == "FAIL"
    assert checks_of(output)["recv_x"] == "pass"


def test_a_run_that_stops_is_reported(capsys, monkeypatch):
    # No tail is ever published, so receivers wait for ever.
    replace_primitives(monkeypatch, teams, st_release_sys_s32=lambda address, value: None)
    status, output = run(capsys, "--no-picture")
    assert status == 1
    assert "The run stopped: DeadlockError" in output
    assert "tail[channel 0, src 0]" in output


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--ranks", "3", "2, 4 or 8"),
        ("--tokens", "-1", "0 or more"),
        ("--hidden", "12", "multiple of 8"),
        ("--experts", "5", "multiple of --ranks"),
        ("--experts", "258", "at most 128 a rank"),
        ("--topk", "5", "1 to 4"),
        ("--seed", "-1", "0 or more"),
        ("--out", "no_such_folder/rings.png", "a folder that exists"),
        ("--out", "rings.bmp", ".png"),
        ("--html", "no_such_folder/run.html", "a folder that exists"),
        ("--html", "run.png", "a .html file"),
        ("--tokens", "many", "invalid int value"),
    ],
)
def test_bad_options_are_named(capsys, option, value, allowed):
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, option, value])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert option in message
    assert value in message
    assert allowed in message


def test_fp8_needs_a_hidden_size_that_scales_cover(capsys):
    with pytest.raises(SystemExit):
        main([*SMALL, "--fp8"])
    assert "--hidden: got 16; must be a multiple of 128" in capsys.readouterr().err


def test_the_command_runs_the_demo(capsys):
    assert nbep_main(["demo", *SMALL, "--no-picture"]) == 0
    assert "checks passed" in capsys.readouterr().out


def test_same_seed_same_numbers(capsys):
    def counted(seed: str) -> str:
        _, output = run(capsys, "--no-picture", "--seed", seed)
        return re.search(r"([\d,]+) primitive calls \(.*?a second\), ([\d,]+) switches", output).group(1, 2)

    assert counted("4") == counted("4")
    assert counted("4") != counted("5")
