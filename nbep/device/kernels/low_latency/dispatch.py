"""Low-latency dispatch: every choice of every token goes to its expert's rank as one message, which is packed there.

 rank s: x[t] --sender: cast--> stage --put_nbi_warp--> message[e, s, slot] --receiver--> recv_x[e, i] : rank r
         counter: how many for expert e --amo_add, after the messages--> counts[e, s]

 cell           written by          with                    read by      with
 slots[h, e]    senders             atom_add_relaxed_gpu    -            -
 message        senders             put_nbi_warp            receivers    bulk copy, ld_na, after counts
 counts[e, s]   senders, counters   amo_add                 receivers    ld_acquire_sys
 stage          casters             st_shared_v2, _v4       copy engine  after a proxy fence and bar_sync
 slots, counts  next coordinator    resets, see coordinator.py

Send phase. The blocks take the tokens in turn. A block's casters cast a token in shared memory. Meanwhile its sender
takes a slot for each choice, its place among this rank's messages for that expert; then it puts the token to all of
them, and behind the message adds TAG to the count of each. A counter reads all choices, counts those for some experts,
and adds what makes their counts complete: then a count is -n - 1, and 0 means "nothing yet". See `protocols.arrivals`.

Receive phase. A team of warps for each (local expert, source) waits for its count, and for those of the sources before
it: their sum is where its tokens begin in recv_x. So rows are ordered by source, and no grid barrier is needed between
the phases when one launch runs both: a block goes on to receive when it has sent. (DeepEP reserves rows with an atomic
that the send phase has zeroed, behind a barrier of all blocks.)

With deduplicate, for a DeduplicatedShape, `deduplicated_dispatch` has the versions of the roles. They are named here.

Source: DeepEP csrc/kernels/internode_ll.cu, dispatch. Break it: notebooks/07_low_latency_dispatch.ipynb
"""

import nbep.device.primitives as ptx
from nbep.device.jit import by_type, kernel
from nbep.device.kernels.low_latency.arguments import (
    RECV_PHASE,
    SEND_PHASE,
    Call,
    Context,
    DispatchInputs,
    DispatchOutputs,
    DispatchSizes,
    Workspace,
)
from nbep.device.kernels.low_latency.coordinator import (
    compare_calls,
    end_earlier_calls,
    end_send_phase,
    is_last_block,
    is_notifier,
)
from nbep.device.kernels.low_latency.dispatch_receiver import receive_choices
from nbep.device.kernels.low_latency.dispatch_sender import SENDER, cast_messages, count_choices, send_choices
from nbep.device.layout.low_latency import LowLatencyShape
from nbep.device.network.seam import Network
from nbep.device.protocols.peers import Bounds


@by_type("shape")
def count_tokens(ctx, inputs):
    """Counter: count what goes to ranks, for some of them or of their experts, and tell them. One warp."""


@by_type("shape")
def send_tokens(ctx, inputs):
    """Sender: put all tokens of this block, one after the other, and tell their ranks. One warp."""


@by_type("shape")
def receive_tokens(ctx, out):
    """Receivers: pack what has arrived, expert by expert. All warps of all blocks."""


count_tokens.versions[LowLatencyShape] = count_choices
send_tokens.versions[LowLatencyShape] = send_choices
receive_tokens.versions[LowLatencyShape] = receive_choices


@kernel(max_threads=640, max_threads_before_sm90=512)
def low_latency_dispatch(
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
    ctx = Context(network, work, bounds, call, shape, sizes, warp, ptx.thread_idx() % 32)
    num_warps = ptx.block_dim() // 32
    sends = call.phases & SEND_PHASE != 0
    if sends or is_last_block():
        if warp == num_warps - 1:  # the counter, which in the last block is the coordinator, too
            if is_last_block():
                end_earlier_calls(ctx)
            if sends:
                count_tokens(ctx, inputs)
        elif sends:
            if warp == SENDER:
                send_tokens(ctx, inputs)
            else:
                cast_messages(ctx, inputs)
        if sends:
            end_send_phase(ctx)
    if call.phases & RECV_PHASE != 0:
        receive_tokens(ctx, out)
        if is_last_block() and is_notifier():
            compare_calls(ctx)
