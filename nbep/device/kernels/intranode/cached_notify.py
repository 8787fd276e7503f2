"""Cached notify: reset the rings; the counts are known, and are not exchanged again. Before a combine also say how far
its receivers may move a head past absent tokens.

 block 0:         ring cells = 0; barrier
 block 1 + c:     (combine) send_head of the tokens of channel c, from the last to the first; warp r looks at rank r

 A token that did not go to rank r has send_head -1. It becomes -h - 1, where h is the ring index of the next token of
 the channel that did go there: when the receiver passes the absent token, all slots below h are done. Behind the last
 such token h is NO_MORE. Present entries keep their index, so running the kernel on its own output changes nothing.

 cell                     written by   with                 read by      with
 start, end, head, tail   the owner    st_weak 0, barrier   (both)       -
 send_head[t, r]          one warp     st_weak              same warp    ld_weak, before it writes
 send_rdma_head and       one warp     st_weak              same warp    ld_weak, before it writes
   send_nvl_head (1)

 (1) Between nodes: see internode/cached_notify.py, whose block uses the same code.

The barrier keeps peers from filling rings that are not reset yet, and compares the ranks' calls: see parts.calls.
DeepEP has one more before the reset; why it is not needed: see notify_dispatch.py. Nor is the prefix matrix put back:
dispatch reads that of the handle.

Source: DeepEP csrc/kernels/intranode.cu, cached_notify_dispatch, cached_notify_combine
"""

import nbep.device.primitives as ptx
from nbep.device.alignment import matrix_cell
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.intranode.notify_dispatch import reset_ring_cells
from nbep.device.kernels.parts.calls import Call, meet_block
from nbep.device.protocols.channels import channel_task_range
from nbep.device.protocols.peers import Bounds, Peers, buffer_of
from nbep.device.types import I32, InOut


@kernel(max_threads=128)
def cached_notify_dispatch(num_ring_cell_words: I32, peers: Peers, bounds: Bounds, call: Call):
    """Grid: 1 block. Block: 128 threads, or any multiple of 32 that is at least num_ranks."""
    reset_ring_cells(buffer_of(peers, peers.rank), num_ring_cell_words)
    meet_block(peers, bounds, call)


NO_MORE = 1 << 25  # larger than any ring index


@device_function
def load_head(send_head, token, begin, rank, num_ranks):
    """A token's index in the ring of a rank; -1 before the first token."""
    return ptx.ld_weak_s32(matrix_cell(send_head, token, rank, num_ranks)) if token >= begin else -1


@device_function
def encode_absent_tokens(send_head, begin, end, rank, num_ranks, lane):
    """Rewrite the entries of one rank for tokens [begin, end), 32 at a time from the end; one warp."""
    next_head = NO_MORE  # of the first present token behind those that are looked at
    token = end - 32 + lane
    head = load_head(send_head, token, begin, rank, num_ranks)
    while token - lane + 32 > begin:
        following = load_head(send_head, token - 32, begin, rank, num_ranks)  # arrives while this group is rewritten
        present = ptx.vote_ballot(ptx.FULL_MASK, head >= 0)
        behind = (present >> (lane + 1)) << (lane + 1)
        head_behind = ptx.shfl_idx_s32(ptx.FULL_MASK, head, ptx.ffs_u32(behind) - 1 if behind != 0 else lane)
        if head < 0 and token >= begin:
            ptx.st_weak_s32(
                matrix_cell(send_head, token, rank, num_ranks), -(head_behind if behind != 0 else next_head) - 1
            )
        if present != 0:
            next_head = ptx.shfl_idx_s32(ptx.FULL_MASK, head, ptx.ffs_u32(present) - 1)
        head = following
        token -= 32


@kernel(max_threads=256)
def cached_notify_combine(
    send_head: InOut,
    num_tokens: I32,
    num_channels: I32,
    num_ring_cell_words: I32,
    peers: Peers,
    bounds: Bounds,
    call: Call,
):
    """Grid: 1 + num_channels blocks. Block: a multiple of 32, at least 32 * num_ranks.

    send_head is [num_tokens, num_ranks].
    """
    if ptx.block_idx() == 0:
        reset_ring_cells(buffer_of(peers, peers.rank), num_ring_cell_words)
        meet_block(peers, bounds, call)
    else:
        rank = ptx.thread_idx() // 32
        if rank < peers.num_ranks:
            begin, end = channel_task_range(num_tokens, num_channels, ptx.block_idx() - 1)
            encode_absent_tokens(send_head, begin, end, rank, peers.num_ranks, ptx.thread_idx() % 32)
