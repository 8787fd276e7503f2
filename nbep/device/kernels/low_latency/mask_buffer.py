"""Mask ranks, take their masks off, and say which are masked.

 cell                     written by  with                            read by               with
 mask                     thread r    atom_exch_acq_rel_sys           any wait (1), thread r  ld_relaxed_gpu
 counts, arrivals, calls  all threads atom_exch_acq_rel_sys (ABSENT)  receivers, notify     see `kernels.parts.arrivals`
 state[next half]         thread 0    st_weak (UNCLEAN)               the next coordinator  see coordinator.py
 out                      thread r    st_weak                         -                     the next kernel

 (1) Who gives up masks, too: see `kernels.parts.arrivals`.

Whoever masks a rank gives up all that it has sent, or may still send: what comes of that is for no call, until
clean_low_latency_buffer. So when masks are taken off no half is next: a call that comes before that reports it, also in
a CUDA graph, which asks no host.

Source: DeepEP csrc/kernels/legacy/internode_ll.cu after v1.2.1, update_mask_buffer, clean_mask_buffer,
query_mask_buffer
"""

import nbep.device.layout.low_latency as layout
import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.low_latency.arguments import Workspace
from nbep.device.kernels.low_latency.clean_low_latency_buffer import empty_rank
from nbep.device.kernels.low_latency.coordinator import NEXT_HALF, UNCLEAN
from nbep.device.kernels.parts.arrivals import empty_cell
from nbep.device.network.seam import Network, own_ptr
from nbep.device.types import I32, I64, Out, Sym


@device_function
def give_up_rank(network, num_rdma_bytes, rank):
    """Give up all that a rank may have sent, in both halves; a whole block."""
    for half in range(layout.NUM_HALVES):
        for cell in range(
            rank + ptx.thread_idx() * network.num_ranks, layout.MAX_EXPERTS, ptx.block_dim() * network.num_ranks
        ):
            counts = layout.count_offset(num_rdma_bytes, network.num_ranks, half, 0, 0)
            empty_cell(own_ptr(network, counts + 4 * cell), True)
    if ptx.thread_idx() == 0:
        empty_rank(network, num_rdma_bytes, rank, True)


@kernel(max_threads=32)
def update_mask_buffer(
    network: Network, work: Workspace, num_rdma_bytes: I64, first_rank: I32, num_ranks: I32, is_masked: I32
):
    """Grid: 1 block. Block: any. The threads take the ranks from first_rank on in turn."""
    for rank in range(first_rank + ptx.thread_idx(), first_rank + num_ranks, ptx.block_dim()):
        ptx.atom_exch_acq_rel_sys_s32(work.mask + 4 * rank, is_masked)
    if is_masked != 0:
        for rank in range(first_rank, first_rank + num_ranks):
            give_up_rank(network, num_rdma_bytes, rank)
    elif ptx.thread_idx() == 0:
        ptx.st_weak_s32(work.state + 4 * NEXT_HALF, UNCLEAN)


@kernel(max_threads=32)
def query_mask_buffer(out: Out, mask: Sym, num_ranks: I32):
    """Grid: 1 block. Block: any."""
    for rank in range(ptx.thread_idx(), num_ranks, ptx.block_dim()):
        ptx.st_weak_s32(out + 4 * rank, ptx.ld_relaxed_gpu_s32(mask + 4 * rank))
