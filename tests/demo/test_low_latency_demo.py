"""`nbep demo --low-latency` runs two micro-batches with hooks, checks both, and fails when a result is wrong."""

import re

import numpy as np
import pytest
from primitives_of import replace_primitives
from tables import checks_of

from nbep import reference
from nbep.demo import main
from nbep.demo.decode import apply_own_experts, batches_of
from nbep.device.kernels.low_latency import combine_receiver, dispatch_receiver
from nbep.device.network import direct
from nbep.specimens.workloads.cases import make_case

SMALL = ["--low-latency", "--ranks", "2", "--tokens", "5", "--hidden", "128", "--experts", "4"]


def run(capsys, *options: str) -> tuple[int, str]:
    status = main([*SMALL, *options])
    return status, capsys.readouterr().out


def test_both_batches_pass_their_checks_and_the_picture_is_saved(capsys, tmp_path):
    out = tmp_path / "halves.png"
    status, output = run(capsys, "--out", str(out))
    assert status == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert str(out) in output
    checks = checks_of(output)
    for batch in "ab":
        assert {f"recv_x, batch {batch}", f"combined_x, batch {batch}", f"MoE layer, batch {batch}"} <= set(checks)
    assert set(checks.values()) == {"pass"}
    assert f"All {len(checks)} checks passed" in output
    # Two ranks, two batches, dispatch and combine, two phases.
    assert "16 launches, a send and a receive phase for each call" in output


def test_the_table_counts_messages_and_with_deduplicate_tokens(capsys):
    rng = np.random.default_rng(7)
    x = [rng.standard_normal((5, 128), np.float32).astype(reference.BF16) for _ in range(2)]
    gate_weight = rng.standard_normal((128, 4), np.float32)
    for options in ([], ["--deduplicate"]):
        _, output = run(capsys, "--no-picture", *options)
        for rank in range(2):
            topk_idx, _ = reference.gate(x[rank], gate_weight, 2)
            ranks = [choices // 2 for choices in topk_idx]
            if options:
                ranks = [np.unique(dsts) for dsts in ranks]
            first, second = (sum(int((dsts == dst).sum()) for dsts in ranks) for dst in range(2))
            assert re.search(rf"rank {rank} +{first} +{second} +{first + second} +5\b", output), options


@pytest.mark.parametrize(
    "options",
    [
        ["--fp8"],
        ["--tokens", "0"],
        ["--tokens", "1"],
        ["--ranks", "3", "--experts", "6", "--topk", "3", "--deduplicate"],
    ],
)
def test_other_settings_pass(capsys, options):
    status, output = run(capsys, "--no-picture", *options)
    assert status == 0
    assert set(checks_of(output).values()) == {"pass"}
    assert ("recv_x_scales, batch a" in output) == ("--fp8" in options)


def test_phases_are_printed_in_order(capsys):
    _, output = run(capsys, "--no-picture")
    assert re.findall(r"^(\w+) done on all ranks", output, re.MULTILINE) == ["dispatch", "experts", "combine"]


def test_a_wrong_sum_in_combine_fails_two_checks_of_each_batch(capsys, monkeypatch):
    # The kernel forgets the third and fourth pair of a vector.
    right = combine_receiver.add_weighted_bf16x8
    monkeypatch.setattr(
        combine_receiver, "add_weighted_bf16x8", lambda total, v, weight: right(total, (v[0], v[1], 0, 0), weight)
    )
    status, output = run(capsys, "--no-picture")
    assert status == 1
    failed = {name for name, result in checks_of(output).items() if result == "FAIL"}
    assert failed == {f"{name}, batch {batch}" for name in ("combined_x", "MoE layer") for batch in "ab"}


def test_a_wrong_scale_fails_the_check_of_dispatch(capsys, monkeypatch):
    replace_primitives(monkeypatch, dispatch_receiver, ld_na_f32=lambda address: np.float32(0.5))
    status, output = run(capsys, "--no-picture", "--fp8")
    assert status == 1
    assert checks_of(output)["recv_x_scales, batch a"] == "FAIL"
    assert checks_of(output)["recv_x, batch a"] == "pass"
    assert checks_of(output)["combined_x, batch a"] == "pass", "sums start from the rows as they came"


def test_a_run_that_stops_is_reported(capsys, monkeypatch):
    # No count is ever sent, so receivers wait for ever.
    replace_primitives(monkeypatch, direct, atom_add_release_sys_s32=lambda address, value: None)
    status, output = run(capsys, "--no-picture")
    assert status == 1
    assert "The run stopped: DeadlockError" in output
    assert "counts[half 0" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--low-latency", "--ranks", "257"], "--ranks: got 257; must be 2 to 256 with --low-latency"),
        (["--low-latency", "--hidden", "64"], "--hidden: got 64; must be a multiple of 128 with --low-latency"),
        (["--deduplicate"], "--deduplicate: got it; must be left out without --low-latency"),
    ],
)
def test_bad_options_are_named(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(options)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_batches_hold_all_tokens():
    case = make_case(num_tokens=[5, 4])
    first, second = batches_of(case)
    assert (first.num_tokens, second.num_tokens) == ([3, 2], [2, 2])
    for name in ("x", "topk_idx", "topk_weights"):
        for rank, whole in enumerate(getattr(case, name)):
            parts = [getattr(batch, name)[rank] for batch in (first, second)]
            assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_experts_leave_rows_alone_that_no_token_fills():
    recv_x = np.ones((2, 3, 4), reference.BF16)
    weight = np.stack([np.eye(4, dtype=np.float32), 2 * np.eye(4, dtype=np.float32)])
    received = reference.LowLatencyDispatched(recv_x, None, np.array([1, 2]), np.zeros((2, 3)), np.zeros((2, 1)))
    output = apply_own_experts(received, weight)
    assert output[:, :, 0].tolist() == [[1, 0, 0], [2, 2, 0]]
