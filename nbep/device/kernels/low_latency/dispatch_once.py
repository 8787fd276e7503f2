"""Low-latency dispatch with deduplicate: a token goes to each rank of its experts once, and is copied to them there.

 rank s: x[t] --sender: cast--> stage --put_nbi_warp--> message[s, j] --receiver--> recv_x[e, i] for each e : rank r
         note: for each choice its local expert, its place among those from s, its weight
         counter: how many for expert e, how many messages --amo_add--> counts[e, s], arrivals[s]

 cell            written by          with                    read by      with
 slots[h, e, r]  putters             atom_add_relaxed_gpu    -            -
 message         putters             put_nbi_warp            receivers    bulk copy, ld_na, after arrivals
 arrivals[s]     putters, counters   amo_add                 receivers    ld_acquire_sys
 counts[e, s]    counter             amo_add                 receivers    ld_relaxed_sys
 stage           casters             st_shared_v2, _v4       copy engine  after a proxy fence and bar_sync
 calls[s]        counter             amo_add                 teller       ld_relaxed_sys, see calls.py
 slots, counts, arrivals  next keeper  resets, see journal.py

The send phase is that of `send_once`, the receive phase that of `expand`. It is a kernel of its own, and not an option
of `dispatch`: few tokens wait for machine code that is fetched anew, the longer the more of it there is. See
docs/attempts.md.
"""

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.kernels.low_latency.arguments import (
    DispatchInputs,
    DispatchOutputs,
    DispatchSizes,
)
from nbep.device.kernels.low_latency.calls import compare_calls, is_teller
from nbep.device.kernels.low_latency.dispatch_sender import PUTTER, cast_messages
from nbep.device.kernels.low_latency.expand import expand_messages
from nbep.device.kernels.low_latency.journal import (
    RECV_PHASE,
    SEND_PHASE,
    Call,
    Workspace,
    end_earlier_calls,
    end_send_phase,
    is_last_block,
)
from nbep.device.kernels.low_latency.send_once import count_ranks, put_messages_once
from nbep.device.layout.low_latency import LowLatencyShape
from nbep.device.network.seam import Network
from nbep.device.protocols.peers import Bounds


@kernel(max_threads=640, max_threads_before_sm90=512)
def low_latency_dispatch_once(
    out: DispatchOutputs,
    inputs: DispatchInputs,
    call: Call,
    network: Network,
    work: Workspace,
    bounds: Bounds,
    shape: LowLatencyShape,
    sizes: DispatchSizes,
):
    """Grid: any. Block: a multiple of 32, at least 96. Shared memory: `arguments.dispatch_smem_bytes`."""
    warp = ptx.thread_idx() // 32
    lane = ptx.thread_idx() % 32
    num_warps = ptx.block_dim() // 32
    sends = call.phases & SEND_PHASE != 0
    if sends or is_last_block():
        if warp == num_warps - 1:  # the counter, which in the last block is the keeper, too
            if is_last_block():
                end_earlier_calls(network, work, call, bounds, shape, lane)
            if sends:
                count_ranks(inputs, network, work, bounds, call, shape, sizes, lane)
        elif sends:
            if warp == PUTTER:
                put_messages_once(inputs, network, work, bounds, call, shape, sizes, lane)
            else:
                cast_messages(inputs, shape, sizes, warp, lane)
        if sends:
            end_send_phase(network, work, bounds, call)
    if call.phases & RECV_PHASE != 0:
        expand_messages(out, network, work, bounds, call, shape, sizes, warp, lane)
        if is_last_block() and is_teller():
            compare_calls(network, work, bounds, call, lane)
