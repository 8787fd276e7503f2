"""Copy which ranks are masked.

 cell    written by                          with                        read by     with
 mask    who gives up, update_mask_buffer    see `kernels.parts.arrivals`    thread r    ld_relaxed_gpu
 out     thread r                            st_weak                     -           the next kernel

Source: DeepEP csrc/kernels/legacy/internode_ll.cu after v1.2.1, query_mask_buffer
"""

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.types import I32, Out, Sym


@kernel(max_threads=32)
def query_mask_buffer(out: Out, mask: Sym, num_ranks: I32):
    """Grid: 1 block. Block: any."""
    for rank in range(ptx.thread_idx(), num_ranks, ptx.block_dim()):
        ptx.st_weak_s32(out + 4 * rank, ptx.ld_relaxed_gpu_s32(mask + 4 * rank))
