"""Mask ranks, or take their masks off.

 cell    written by    with                     read by     with
 mask    thread r      atom_exch_acq_rel_sys    any wait    see `protocols.arrivals`

Source: DeepEP csrc/kernels/legacy/internode_ll.cu after v1.2.1, update_mask_buffer, clean_mask_buffer
"""

from nbep.device.jit import kernel
from nbep.device.primitives import atom_exch_acq_rel_sys_s32, thread_idx
from nbep.device.types import I32, Sym


@kernel(max_threads=32)
def update_mask_buffer(mask: Sym, first_rank: I32, num_ranks: I32, is_masked: I32):
    """Grid: 1 block. Block: at least num_ranks threads, a thread for each rank from first_rank on."""
    if thread_idx() < num_ranks:
        atom_exch_acq_rel_sys_s32(mask + 4 * (first_rank + thread_idx()), is_masked)
