"""Number tokens: which index each token has among those of its channel that go to a rank; -1 if it does not go there.

 block c, warp r: is_token_in_rank[t, r] of the tokens of channel c --> send_head[t, r]

 cell              written by   with       read by             with
 send_head[t, r]   warp r       st_weak    (direct_dispatch)   -

Dispatch through rings numbers its tokens while it sends them. A direct sender needs the row of any token at once, and a
cached dispatch finds the numbers in its handle.

Source: DeepEP csrc/kernels/intranode.cu, dispatch ("send_head")
"""

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.protocols.channels import channel_task_range
from nbep.device.types import I32, In, Out


@device_function
def number_channel(send_head, is_token_in_rank, tokens, rank, num_ranks, lane):
    """Number the tokens of a range for one rank, 32 at a time; one warp."""
    begin, end = tokens
    number = 0
    token = begin + lane
    while token - lane < end:
        goes_there = token < end and ptx.ld_nc_u8(is_token_in_rank + token * num_ranks + rank) != 0
        chosen = ptx.vote_ballot(ptx.FULL_MASK, goes_there)
        if token < end:
            before = ptx.popc_u32(chosen & ((1 << lane) - 1))
            ptx.st_weak_s32(matrix_cell(send_head, token, rank, num_ranks), number + before if goes_there else -1)
        number += ptx.popc_u32(chosen)
        token += 32


@kernel(max_threads=256)
def number_tokens(send_head: Out, is_token_in_rank: In, num_tokens: I32, num_channels: I32, num_ranks: I32):
    """Grid: num_channels blocks. Block: a multiple of 32.

    send_head is [num_tokens, num_ranks] s32, is_token_in_rank [num_tokens, num_ranks] u8.
    """
    tokens = channel_task_range(num_tokens, num_channels, ptx.block_idx())
    for rank in range(ptx.thread_idx() // 32, num_ranks, ptx.block_dim() // 32):
        number_channel(send_head, is_token_in_rank, tokens, rank, num_ranks, ptx.thread_idx() % 32)
