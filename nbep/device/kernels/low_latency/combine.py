"""Low-latency combine: what experts have made of tokens goes back, and is added up with the tokens' weights.

 rank r: x[e, i] --sender--> stage --put_nbi_warp--> row[e, t] --receiver: sum over experts--> combined_x[t] : rank s
         --amo_add, after the rows--> counts[e]

 cell          written by     with                      read by      with
 row           senders        put_nbi_warp              receivers    ld_na, after counts and syncthreads
 counts[e]     a sender       amo_add                   receivers    ld_acquire_sys
 arrivals[r]   (deduplicated_combine)  amo_add          receivers    ld_acquire_sys
 stage         copy engine    bulk copy                 network      after the stage's mbarrier
   LogFMT      lanes          st_shared_v2, _v4         network      after a proxy fence and syncwarp
 sum table     receivers      st_shared                 receivers    ld_shared, after syncthreads
 combined_x    receivers      st_na                     -            the next kernel
 counts, arrivals  next coordinator  resets, see coordinator.py

Send phase. A group of warps for each (local expert, source) sends its rows, whose places the handle knows: a row lands
where the source keeps the rows of this expert for this token. When all are there, one thread says so.

Receive phase. The blocks take the tokens in turn. One warp waits for the experts of a token and lists where their rows
are; then all warps add them up, some columns each, in float32 and in the order of the choices: w[0] * x[0], then
+ w[1] * x[1], each product and each sum rounded. No barrier of the grid is needed between the phases.

With deduplicate, for a DeduplicatedShape, `deduplicated_combine` sends. The receive phase then adds up rows of ranks.

Source: DeepEP csrc/kernels/internode_ll.cu, combine. Break it: notebooks/08_low_latency_combine.ipynb
"""

from typing import NamedTuple

import nbep.device.primitives as ptx
from nbep.device.jit import device_function, kernel
from nbep.device.kernels.low_latency.arguments import RECV_PHASE, SEND_PHASE, Call, Context, Workspace
from nbep.device.kernels.low_latency.combine_receiver import receive_rows, sum_table_bytes
from nbep.device.kernels.low_latency.combine_sender import send_expert_rows
from nbep.device.kernels.low_latency.coordinator import (
    compare_calls,
    end_earlier_calls,
    end_send_phase,
    is_last_block,
    is_notifier,
)
from nbep.device.layout.low_latency import LowLatencyShape
from nbep.device.network.seam import Network
from nbep.device.protocols.staging import STAGE_STRIDE
from nbep.device.protocols.waits import Bounds
from nbep.device.types import I32, In, InOut, Out


class CombineOutputs(NamedTuple):
    """wait_recv_cost_stats may be absent (0)."""

    combined_x: Out  # [num_tokens, hidden] bf16
    wait_recv_cost_stats: InOut  # [num_ranks] s64


class CombineInputs(NamedTuple):
    """topk_idx and topk_weights are of this rank's tokens; what follows is of its experts' rows, from the handle."""

    x: In  # [num_local_experts, T, hidden] bf16
    topk_idx: In  # [num_tokens, num_topk] s64
    topk_weights: In  # [num_tokens, num_topk] f32
    recv_src_info: In
    recv_layout_range: In
    num_messages: In
    message_src_idx: In
    message_rows: In
    message_weights: In


class CombineSizes(NamedTuple):
    num_tokens: I32
    num_topk: I32
    num_groups: I32  # most groups of warps of a block that send: see groups_here of combine_sender.py


def combine_smem_bytes(shape: LowLatencyShape, num_threads: int) -> int:
    """Dynamic shared memory of a combine block: the table, and a stage a warp."""
    return sum_table_bytes(shape) + STAGE_STRIDE * (num_threads // 32)


@device_function
def is_coordinator():
    """Whether this is the coordinator's warp, in the last block."""
    return ptx.thread_idx() // 32 == ptx.block_dim() // 32 - 1


@kernel(max_threads=512, max_threads_before_sm90=384)
def low_latency_combine(
    out: CombineOutputs,
    inputs: CombineInputs,
    call: Call,
    network: Network,
    work: Workspace,
    bounds: Bounds,
    shape: LowLatencyShape,
    sizes: CombineSizes,
):
    """Grid: any. Block: a multiple of 32, at least 64. Shared memory: `combine_smem_bytes`."""
    ctx = Context(network, work, bounds, call, shape, sizes, ptx.thread_idx() // 32, ptx.thread_idx() % 32)
    sends = call.phases & SEND_PHASE != 0
    if sends or is_last_block():
        if is_last_block() and is_coordinator():
            end_earlier_calls(ctx)
        if sends:
            send_expert_rows(ctx, inputs)
            end_send_phase(ctx)
    if call.phases & RECV_PHASE != 0:
        receive_rows(ctx, out, inputs)
        if is_last_block() and is_notifier():
            compare_calls(ctx)
