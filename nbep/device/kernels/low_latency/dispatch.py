"""Low-latency dispatch: every choice of every token goes to its expert's rank as one message, which is packed there.

 rank s: x[t] --sender: cast--> stage --put_nbi_warp--> message[e, s, slot] --receiver--> recv_x[e, i] : rank r
         counter: how many for expert e --amo_add, after the messages--> counts[e, s]

 cell               written by         with                       read by             with
 slots[e]           senders            atom_add_relaxed_gpu       who finishes e      ld_relaxed_gpu, after finished
 finished[e]        senders, counters  atom_add_acq_rel_gpu       who finishes e      the same
 message            senders            put_nbi_warp               receivers           bulk copy, ld_na, after counts (1)
 counts[e, s]       who finishes e     amo_add (-n - 1)           receivers           ld_acquire_sys
 stage              senders            st_shared_v2               copy engine         after a proxy fence and bar_sync
 recv_stats         receivers          atom_add_relaxed_gpu       -                   (a later kernel)

 (1) A bulk copy reads through the async proxy, so a proxy fence stands between the acquire and the copy.

Send phase. The blocks take the tokens in turn. All warps of a block but the last are senders: together they cast a
token in shared memory, then each sends one of its choices. A slot counter of each expert says which place among this
rank's messages it gets. The last warp is a counter: it reads all choices and counts those for some experts. An expert
is finished when it is counted and all its messages are sent: the counter adds COUNTED - n, each sender adds 1, and who
makes it COUNTED tells the peer the number. It travels as -n - 1, so that 0 means "not here yet". Before they add, they
all wait for the credit of the peer.

Receive phase. A group of warps for each (local expert, source) waits for its count, and for those of the sources before
it: their sum is where its tokens begin in recv_x. So rows are ordered by source, and no grid barrier is needed between
the phases when one launch runs both: a block goes on to receive when it has sent. (DeepEP reserves rows with an atomic
that the send phase has zeroed, behind a barrier of all blocks.)

With deduplicate `send_once` and `expand` stand in for both phases.

Source: DeepEP csrc/kernels/internode_ll.cu, dispatch. Break it: notebooks/07_low_latency_dispatch.ipynb
"""

from nbep.device.jit import kernel
from nbep.device.kernels.low_latency.arguments import (
    DispatchInputs,
    DispatchOutputs,
    DispatchSizes,
)
from nbep.device.kernels.low_latency.dispatch_receiver import receive_messages
from nbep.device.kernels.low_latency.dispatch_sender import count_choices, send_messages
from nbep.device.kernels.low_latency.expand import expand_messages
from nbep.device.kernels.low_latency.journal import (
    RECV_PHASE,
    SEND_PHASE,
    Call,
    Workspace,
    end_earlier_calls,
    is_keeper,
)
from nbep.device.kernels.low_latency.send_once import count_ranks, send_messages_once
from nbep.device.layout.low_latency import LowLatencyShape
from nbep.device.network import Network
from nbep.device.primitives import block_dim, syncthreads, thread_idx
from nbep.device.protocols.peers import Bounds


@kernel(max_threads=768)
def low_latency_dispatch(
    out: DispatchOutputs,
    inputs: DispatchInputs,
    network: Network,
    work: Workspace,
    bounds: Bounds,
    call: Call,
    shape: LowLatencyShape,
    sizes: DispatchSizes,
):
    """Grid: any. Block: a multiple of 32, at least 64. Shared memory: `arguments.dispatch_smem_bytes`."""
    warp = thread_idx() // 32
    lane = thread_idx() % 32
    num_warps = block_dim() // 32
    if is_keeper():
        end_earlier_calls(network, work, call, bounds, shape.num_experts, lane)
    if call.phases & SEND_PHASE != 0:
        if warp < num_warps - 1:
            if shape.deduplicate != 0:
                send_messages_once(inputs, network, work, bounds, call, shape, sizes, warp, lane)
            else:
                send_messages(inputs, network, work, bounds, call, shape, sizes, warp, lane)
        elif shape.deduplicate != 0:
            count_ranks(inputs, network, work, bounds, call, shape, sizes, lane)
        else:
            count_choices(inputs, network, work, bounds, call, shape, sizes, lane)
        syncthreads()
    if call.phases & RECV_PHASE != 0:
        if shape.deduplicate != 0:
            expand_messages(out, network, work, bounds, call, shape, sizes, warp, lane)
        else:
            receive_messages(out, network, work, bounds, call, shape, sizes, warp, lane)
