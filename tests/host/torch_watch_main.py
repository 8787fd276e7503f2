"""What test_torch_ranks.py runs, once per rank of torchrun: outputs are used before or behind their event.

NBEP_TARGET=emulator torchrun --standalone --nproc-per-node 2 tests/host/torch_watch_main.py unwaited
"""

import sys

import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode

import nbep.deep_ep as deep_ep


class Inner(TorchDispatchMode):
    """One of the program's own: it begins before nbep's, and ends after it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def main(fault: str) -> None:
    torch.distributed.init_process_group("gloo")
    with Inner():
        buffer = deep_ep.Buffer(torch.distributed.group.WORLD, 1 << 20)
    x, idx = torch.ones(3, 64, dtype=torch.bfloat16), torch.tensor([[0], [1], [2]])
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    received, *_, event = buffer.dispatch(x, config=deep_ep.Config(2, 2, 4), async_finish=True, **layout)
    if fault == "written":
        x.zero_()
    if fault != "unwaited":
        event.current_stream_wait()
    print(f"sum {received.float().sum().item()}", flush=True)
    torch.distributed.barrier()
    buffer.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
