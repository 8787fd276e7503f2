"""Low-latency combine with deduplicate: a rank adds up what its experts have made of a token, and sends the sum.

 rank r: x[e, i] for each e of the token --sender: weighted sum--> stage --put_nbi_warp--> row[r, t]
         --amo_add, after the rows--> arrivals[r] --receiver: sum over ranks--> combined_x[t] : rank s

 cell          written by        with                      read by      with
 row           senders           put_nbi_warp              receivers    ld_na, after arrivals and syncthreads
 arrivals[r]   senders           amo_add                   receivers    ld_acquire_sys
 stage         lanes             st_shared_v4              engine       after a proxy fence and syncwarp
 sum table     receivers         st_shared                 receivers    ld_shared, after syncthreads
 calls[r]      who announces     amo_add                   teller       ld_relaxed_sys, see calls.py
 arrivals      next keeper       resets, see journal.py

The send phase is that of `sum_first`. The receive phase is that of `combine`: it adds up the rows of ranks, in the
order of each one's first choice. It is a kernel of its own for the reason of `dispatch_once`.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.kernels.low_latency.arguments import CombineInputs, CombineOutputs, CombineSizes
from nbep.device.kernels.low_latency.calls import compare_calls, is_teller
from nbep.device.kernels.low_latency.combine_receiver import sum_rows
from nbep.device.kernels.low_latency.journal import (
    RECV_PHASE,
    SEND_PHASE,
    Call,
    Workspace,
    end_earlier_calls,
    end_send_phase,
    is_keeper,
    is_last_block,
)
from nbep.device.kernels.low_latency.sum_first import send_sums
from nbep.device.layout.low_latency import LowLatencyShape
from nbep.device.network.seam import Network
from nbep.device.protocols.peers import Bounds


@kernel(max_threads=512, max_threads_before_sm90=384)
def low_latency_combine_once(
    out: CombineOutputs,
    inputs: CombineInputs,
    call: Call,
    network: Network,
    work: Workspace,
    bounds: Bounds,
    shape: LowLatencyShape,
    sizes: CombineSizes,
):
    """Grid: any. Block: a multiple of 32, at least 64. Shared memory: `arguments.combine_smem_bytes`."""
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    sends = call.phases & SEND_PHASE != 0
    if sends or is_last_block():
        if is_last_block() and is_keeper():
            end_earlier_calls(network, work, call, bounds, shape, lane)
        if sends:
            send_sums(inputs, network, work, bounds, call, shape, warp, lane)
            end_send_phase(network, work, bounds, call)
    if call.phases & RECV_PHASE != 0:
        sum_rows(out, inputs, network, work, bounds, call, shape, sizes, warp, lane)
        if is_last_block() and is_teller():
            compare_calls(network, work, bounds, call, lane)
