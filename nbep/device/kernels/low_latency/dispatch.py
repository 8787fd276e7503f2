"""Low-latency dispatch: every choice of every token goes to its expert's rank as one message, which is packed there.

 rank s: x[t] --sender: cast--> stage --put_nbi_warp--> message[e, s, slot] --receiver--> recv_x[e, i] : rank r
         counter: how many for expert e --amo_add, after the messages--> counts[e, s]

 cell           written by          with                    read by      with
 slots[h, e]    senders             atom_add_relaxed_gpu    -            -
 message        senders             put_nbi_warp            receivers    bulk copy, ld_na, after counts
 counts[e, s]   senders, counters   amo_add                 receivers    ld_acquire_sys
 slots, counts  next coordinator    resets, see coordinator.py
 stage          casters             st_shared_v2, _v4       network      after a proxy fence and bar_sync
 stage of a warp  copy engine       bulk copy               copy engine  bulk copy, after its mbarrier
 recv_*         receivers           bulk copy, weak         -            the next kernel
 recv_*  receivers, no copy engine  st_na                   -            the next kernel
 cumulative_recv_stats  receivers   atom_add_relaxed_gpu    -            the next kernel

Send phase. The blocks take the tokens in turn. A block's casters cast a token in shared memory. Meanwhile its sender
takes a slot for each choice, its place among this rank's messages for that expert; then it puts the token to all of
them, and behind the message adds TAG to the count of each. A counter reads all choices, counts those for some experts,
and adds what makes their counts complete. See `kernels.parts.arrivals`.

Receive phase. A team of warps for each (local expert, source) waits for its count, and for those of the sources before
it: their sum is where its tokens begin in recv_x. So rows are ordered by source, and no grid barrier is needed between
the phases when one launch runs both: a block goes on to receive when it has sent. (DeepEP reserves rows with an atomic
that the send phase has zeroed, behind a barrier of all blocks.)
With deduplicate the roles have versions of their own, in deduplicated_dispatch.py.

Source: DeepEP csrc/kernels/internode_ll.cu, dispatch. Break it: notebooks/07_low_latency_dispatch.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import kernel
from nbep.device.kernels.low_latency.arguments import RECV_PHASE, SEND_PHASE, Call, Context, Workspace
from nbep.device.kernels.low_latency.coordinator import (
    compare_calls,
    end_earlier_calls,
    end_send_phase,
    is_last_block,
    is_notifier,
)
from nbep.device.kernels.low_latency.dispatch_receiver import receive_choices, table_bytes
from nbep.device.kernels.low_latency.dispatch_sender import (
    SENDER,
    cast_messages,
    count_choices,
    send_choices,
    stage_bytes,
)
from nbep.device.layout.low_latency import LowLatencyShape, deduplicates
from nbep.device.network.seam import Network
from nbep.device.protocols.staging import STAGE_STRIDE
from nbep.device.protocols.waits import Bounds
from nbep.device.types import I32, In, InOut, Out


class DispatchOutputs(NamedTuple):
    """T is num_ranks * num_max_tokens. May be absent (0): the scales, both stats, and what deduplicate adds."""

    recv_x: Out  # [num_local_experts, T, payload_bytes]
    recv_x_scales: Out  # [num_local_experts, hidden / 128, T] f32; UE8M0: [num_local_experts, hidden / 512, T] 4 bytes
    recv_src_info: Out  # [num_local_experts, T] s32: the token's index at its source
    recv_layout_range: Out  # [num_local_experts, num_ranks] s64: where its rows begin << 32 | how many there are
    recv_count: Out  # [num_local_experts] s32
    cumulative_recv_stats: InOut  # [num_local_experts] s32
    wait_recv_cost_stats: InOut  # [num_ranks] s64
    # With deduplicate, what combine needs of each message
    num_messages: Out  # [num_ranks] s32
    message_src_idx: Out  # [num_ranks, num_max_tokens] s32
    message_rows: Out  # [num_ranks, num_max_tokens, num_topk] s32: local expert * T + row, or -1
    message_weights: Out  # [num_ranks, num_max_tokens, num_topk] f32


class DispatchInputs(NamedTuple):
    """topk_weights may be absent (0); deduplicate needs them."""

    x: In  # [num_tokens, hidden] bf16
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32


class DispatchSizes(NamedTuple):
    num_tokens: I32
    num_topk: I32
    team_warps: I32  # that receive what one source has for one expert
    num_teams: I32
    inverse_of_team: I32  # of team_warps: see nbep.device.alignment
    message_stride: I32  # as the layout has it: worked out once
    header_offset: I32
    round_scale: I32  # 1: scales are powers of two
    use_ue8m0: I32  # 1: recv_x_scales are exponent bytes, four in a word


def dispatch_smem_bytes(shape: LowLatencyShape, num_threads: int, has_tma: bool) -> int:
    """Dynamic shared memory of a block: two stages of tokens to send, a stage a warp to receive.

    With deduplicate also a histogram of a rank's experts to send, the table to receive.
    """
    sending = 2 * stage_bytes(shape) + (4 * (shape.num_experts // shape.num_ranks) if deduplicates(shape) else 0)
    table = table_bytes(shape) if deduplicates(shape) else 0
    receiving = table + (STAGE_STRIDE * (num_threads // 32) if has_tma else 0)
    return max(sending, receiving)


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
    """Grid: any. Block: a multiple of 32, at least 96. Shared memory: `dispatch_smem_bytes`."""
    warp = ptx.thread_idx() // 32
    ctx = Context(network, work, bounds, call, shape, sizes, warp, ptx.thread_idx() % 32)
    num_warps = ptx.block_dim() // 32
    sends = call.phases & SEND_PHASE != 0
    if sends or is_last_block():
        if warp == num_warps - 1:  # the counter, which in the last block is the coordinator, too
            if is_last_block():
                end_earlier_calls(ctx)
            if sends:
                count_choices(ctx, inputs)
        elif sends:
            if warp == SENDER:
                send_choices(ctx, inputs)
            else:
                cast_messages(ctx, inputs)
        if sends:
            end_send_phase(ctx)
    if call.phases & RECV_PHASE != 0:
        receive_choices(ctx, out)
        if is_last_block() and is_notifier():
            compare_calls(ctx)
