"""Each rank sends a token to the next one, and gets it back. Started by mpiexec or torchrun: see docs/machines.md."""

import os
import socket

import ml_dtypes
import numpy as np

import nbep


def main(group):
    buffer = nbep.ElasticBuffer(group, num_max_tokens_per_rank=1, hidden=64, num_topk=1)
    rank, num_ranks = buffer.rank_idx, buffer.num_ranks
    x = np.full((1, 64), 10 * rank, ml_dtypes.bfloat16)
    topk_idx = np.array([[(rank + 1) % num_ranks]])  # expert e is on rank e
    recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=num_ranks)
    y = recv_x + 1  # the expert's work
    combined_x, _, _ = buffer.combine(y, handle)
    buffer.destroy()
    came, back = int(recv_x[0, 0]), int(combined_x[0, 0])
    print(f"rank {rank} on {socket.gethostname()}: {came} came, {back} came back", flush=True)


if "TORCHELASTIC_RUN_ID" in os.environ:
    import torch.distributed

    torch.distributed.init_process_group("gloo")
    main(torch.distributed.group.WORLD)
else:
    from mpi4py import MPI

    main(MPI.COMM_WORLD)
