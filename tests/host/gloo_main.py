"""What test_torch_group.py runs, once per rank: a communicator over gloo, on CPUs."""

import pytest
import torch.distributed

import nbep
from nbep.host.comm import TorchComm, is_torch_group


def main() -> None:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    assert is_torch_group(group)
    comm = TorchComm(group)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    assert (comm.rank, comm.size) == (rank, size)
    assert comm.allgather({"rank": rank}) == [{"rank": peer} for peer in range(size)]
    comm.barrier()
    with pytest.raises(
        RuntimeError, match="group: got a process group of torch, but 2 of 2 ranks would run on the emu"
    ):
        nbep.Buffer(group, num_nvl_bytes=256)
    print(f"rank {rank} is done")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
