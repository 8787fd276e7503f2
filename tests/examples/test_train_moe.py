"""The example that trains, on the emulator in processes of a gloo group."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import run_python

PROGRAM = Path(__file__).parent / "train_moe_main.py"

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(find_spec("torch") is None, reason="no torch here"),
    pytest.mark.emulator_only("on GPUs torchrun starts train_moe_main.py"),
]


def test_ranks_train_and_decode_as_one_process_does(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    output = run_python(*launcher, PROGRAM, tmp_path, NBEP_TARGET="emulator")
    checks = (
        "gradients_are_those_without_communication",
        "losses_and_gradients_are_those_of_the_model_in_one_process",
        "the_parameters_of_all_ranks_make_a_whole_model",
    )
    for rank in range(2):
        assert all(f"rank {rank}: {check}" in output for check in checks), output
        assert re.search(rf"rank {rank}: \d+ -> \d+; [4-8] of 8 reversed, the same tokens as without", output), output
    assert "1 steps on 2 ranks: largest difference of the losses " in output
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "model.pt").exists()
