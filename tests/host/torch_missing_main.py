"""What test_torch_group.py runs, once per rank: rank 1 comes too late to make a buffer, and to destroy the next one."""

import torch.distributed

import nbep


def late(group: torch.distributed.ProcessGroup, call) -> None:
    """Rank 1 comes to the call when rank 0 has given up."""
    rank = group.rank()
    if rank == 1:
        torch.distributed.barrier()
    try:
        call()
    except nbep.PeerTimeout as error:
        print(f"{error} ({error.rank}, {error.peer}, {error.role})", flush=True)
    if rank == 0:
        torch.distributed.barrier()


def main() -> None:
    torch.distributed.init_process_group("gloo")
    group = torch.distributed.group.WORLD
    late(group, lambda: nbep.Buffer(group, 1 << 16))
    buffer = nbep.Buffer(group, 1 << 16)
    late(group, buffer.destroy)
    print(f"rank {group.rank()} is done", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
