"""Two ranks send tokens to the experts they were routed to, double them there, and get them back.

python docs/examples/first_program.py                                            both ranks in this process
NBEP_TARGET=emulator mpiexec -n 2 python docs/examples/first_program.py --mpi    one process each
"""

import sys

import ml_dtypes
import numpy as np

import nbep

NUM_EXPERTS, HIDDEN = 4, 64
CONFIG = nbep.Config(2, 2, 4)  # SMs, tokens of a chunk, slots of a ring: few, for the emulator


def main(comm):
    # Token t of rank r is a row of 10 r + t. It goes to two experts that follow each other.
    tokens = 10 * comm.rank + np.arange(4)
    x = np.repeat(tokens[:, None], HIDDEN, axis=1).astype(ml_dtypes.bfloat16)
    topk_idx = np.stack([tokens % NUM_EXPERTS, (tokens + 1) % NUM_EXPERTS], axis=1)
    topk_weights = np.full(topk_idx.shape, 0.5, np.float32)

    buffer = nbep.Buffer(comm, CONFIG.get_nvl_buffer_size_hint(2 * HIDDEN, comm.size))  # bytes of a token, ranks
    layout = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, _ = layout
    recv_x, _, recv_topk_weights, num_recv_tokens_per_expert_list, handle, _ = buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=num_tokens_per_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=num_tokens_per_expert,
        config=CONFIG,
    )

    # Both experts of this rank double what they get. You apply the weights: combine only adds up.
    weights = recv_topk_weights.sum(axis=1, keepdims=True)
    y = (2 * weights * recv_x.astype(np.float32)).astype(ml_dtypes.bfloat16)

    combined_x, _, _ = buffer.combine(y, handle, config=CONFIG)
    buffer.destroy()

    assert (combined_x == 2 * x).all()
    received = [int(token) for token in recv_x[:, 0]]
    for rank, line in enumerate(comm.allgather(f"received {received}, per expert {num_recv_tokens_per_expert_list}")):
        if comm.rank == 0:
            print(f"rank {rank}: {line}")


if __name__ == "__main__":
    if "--mpi" in sys.argv:
        from mpi4py import MPI

        main(MPI.COMM_WORLD)
    else:
        nbep.spawn(main, num_ranks=2, target="emulator")
