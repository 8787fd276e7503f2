"""The example that trains: ranks that have a share of the experts each, against one process that has all."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import GPU_EACH, need_gpus, run_python

PROGRAM = Path(__file__).parent / "train_moe_main.py"
CHECKS = (
    "gradients_are_those_without_communication",
    "losses_and_gradients_are_those_of_the_model_in_one_process",
    "the_parameters_of_all_ranks_make_a_whole_model",
)


def train_and_decode(num_ranks: int, folder: Path, **environment: str | None) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks)
    output = run_python(*launcher, PROGRAM, folder, **environment)
    for rank in range(num_ranks):
        assert all(f"rank {rank}: {check}" in output for check in CHECKS), output
        wanted = rf"rank {rank}: \d+ -> \d+; [4-8] of 8 reversed, the same tokens as without expert parallelism"
        assert re.search(wanted, output), output
    assert f"1 steps on {num_ranks} ranks: largest difference of the losses " in output
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "model.pt").exists()


@pytest.mark.thorough
@pytest.mark.emulator_only("the same with GPUs is below")
@pytest.mark.skipif(find_spec("torch") is None, reason="no torch here")
def test_ranks_train_and_decode_as_one_process_does(tmp_path):
    train_and_decode(2, tmp_path, NBEP_TARGET="emulator")


@pytest.mark.cuda
@pytest.mark.parametrize("num_gpus", [2, 4])
def test_ranks_with_a_gpu_each_train_and_decode_as_one_process_does(num_gpus, tmp_path):
    need_gpus(num_gpus)
    train_and_decode(num_gpus, tmp_path, NBEP_TARGET="cuda", **GPU_EACH)
