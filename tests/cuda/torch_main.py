"""Round trips of the ranks of a torch process group, one GPU each, compared with the reference.

    torchrun --nproc-per-node 8 tests/cuda/torch_main.py

The exit code is 0 if every rank got everything right.
"""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parents[2], Path(__file__).parents[1] / "support")]
os.environ["NBEP_TARGET"] = "cuda"
os.environ["NBEP_TEST_TARGET"] = "cuda"
os.environ["NBEP_TIMEOUT_MS"] = os.environ.get("NBEP_TIMEOUT_MS", "30000")

import torch
import torch.distributed
from rounds import rounds, wrong_rounds


def main() -> int:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    group = torch.distributed.group.WORLD
    wrong = wrong_rounds(group, group.rank(), group.size())
    everyone = [0] * group.size()
    torch.distributed.all_gather_object(everyone, wrong)
    if group.rank() == 0:
        print(f"{len(rounds(group.size()))} rounds on {group.size()} GPUs: {sum(everyone)} wrong", flush=True)
    torch.distributed.destroy_process_group()
    return 1 if sum(everyone) else 0


if __name__ == "__main__":
    sys.exit(main())
