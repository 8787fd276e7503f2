"""Buffer.dispatch inside a node: send each token once to every rank that owns one of its experts.

 counts given:   notify_dispatch --counters--> CPU sizes the outputs --> dispatch
 handle given:   cached_notify_dispatch -----------------------------> dispatch
 num_worst_tokens: as the first, but the CPU does not wait for the counters

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbep.device.kernels.intranode.dispatch import DispatchOutputs, DispatchSizes, dispatch_smem_bytes
from nbep.device.kernels.intranode.dispatch import dispatch as dispatch_kernel
from nbep.device.kernels.intranode.notify_dispatch import NotifySizes
from nbep.device.layout.intranode import num_ring_cell_words
from nbep.host.block_sizes import block_sizes
from nbep.host.config import DISPATCH_TABLE
from nbep.host.handles import DispatchHandle, DispatchTuple, Taken
from nbep.host.intranode import checks, direct_dispatch
from nbep.host.intranode.notify import prepare_counts, prepare_reset
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import Dispatched, DispatchRequest, Tokens, dispatch_call, pair
from nbep.host.plans import Plan
from nbep.host.target.base import LATER
from nbep.host.target.new_arrays import ROWS, Wanted

NO_LISTS = (0,) * (len(DispatchOutputs._fields) - 2)  # besides tokens and scales, a handle's dispatch gives nothing


def make_plan(
    memory: NodeMemory, request: DispatchRequest, tokens: Tokens, handle: DispatchHandle | None
) -> Plan | direct_dispatch.DirectPlan:
    """Choose the rings and prepare the launches, for arrays that are checked."""
    runtime, num_ranks, num_tokens, zero_copy = memory.runtime, memory.num_ranks, tokens.num_tokens, request.zero_copy
    num_experts, num_worst_tokens, num_sms = tokens.num_experts, request.num_worst_tokens, request.num_sms
    if handle is not None:
        num_worst_tokens, num_sms = 0, 2 * handle.num_channels
    of_handle = handle is not None
    # A handle knows where the tokens were: their places do not travel.
    sizes = tokens.hidden_bytes, tokens.num_topk, tokens.num_scales, int(not of_handle)
    of_call = request.config, DISPATCH_TABLE, num_sms, sizes, 32 * num_ranks, of_handle, zero_copy
    config, shape = checks.rings(memory, *of_call)
    call = dispatch_call(memory, tokens, config, handle, zero_copy=zero_copy)
    num_channels, blocks = config.num_channels, block_sizes(runtime)
    num_threads = config.num_threads or blocks.ring(num_ranks)
    if zero_copy:
        return direct_dispatch.make_plan(memory, request, tokens, num_channels, num_threads, call, sizes)
    launch = runtime.prepare(
        dispatch_kernel,
        config.num_sms,
        num_threads,
        dispatch_smem_bytes(num_threads, runtime.has_tma),
        memory.peers,
        memory.bounds,
        shape,
        DispatchSizes(
            num_tokens,
            LATER,
            num_worst_tokens,
            num_experts // num_ranks,
            config.num_max_nvl_chunked_send_tokens,
            *tokens.scale_strides,
            int(blocks.mix_roles if config.mix_roles is None else config.mix_roles),
        ),
    )
    num_cell_words = num_ring_cell_words(shape)
    if handle is not None:
        notify = prepare_reset(memory, memory.peers, num_cell_words, call)
        return Plan(runtime.prepare_empty(tokens.received, tokens.x.array), launch, notify, shape, call)
    counts = NotifySizes(num_tokens, num_experts, num_channels, num_cell_words, request.expert_alignment)
    of_channels = (num_ranks, num_channels), "int32"
    routes: tuple[Wanted, ...] = ((num_ranks, num_ranks), "int32"), of_channels
    outputs: tuple[Wanted | None, ...] = (
        *tokens.received,
        ((ROWS,), "int32"),
        *tokens.received_topk,
        of_channels,
        ((num_tokens, num_ranks), "int32"),
    )
    waits = num_worst_tokens == 0
    return Plan(
        runtime.prepare_empty(routes if waits else routes + outputs, tokens.x.array),
        launch,
        prepare_counts(memory, memory.peers, counts, call),
        shape,
        call,
        runtime.prepare_empty(outputs, tokens.x.array) if waits else None,
        memory.counters.addresses(waits)[:2],
        (num_tokens, num_channels),
        num_experts // num_ranks,
    )


def launch(
    memory: NodeMemory, plan: Any, arguments: Sequence[Any], request: DispatchRequest, handle: DispatchHandle | None
) -> Dispatched:
    """Exchange the counts and wait for the totals, unless num_worst_tokens or a handle says them; then dispatch."""
    if request.zero_copy:
        return direct_dispatch.launch_without_rings(memory, plan, arguments, request, handle)
    known = None if handle is None else handle.taken(memory.runtime)
    numbers: Any = (request.num_worst_tokens,) if known is None else known.numbers
    made, addresses = memory.allocate(request, plan.make, numbers)
    memory.compare(plan.call, handle)
    memory.ring_shape = plan.shape
    per_expert: list[int] = []
    if known is None:
        *tokens, in_rank, per_rank, experts = arguments
        of_ranks, of_channels, *outputs = addresses
        of_notify = of_ranks, of_channels, *plan.counters, per_rank, experts, in_rank
        if plan.make_counted is not None:
            memory.counters.reset()
        plan.notify.launch(memory.stream, of_notify, (made, request))
        if plan.make_counted is not None:
            num_recv_tokens, per_expert, _ = memory.await_counts(plan.num_local_experts)
            numbers = (num_recv_tokens,)
            more, outputs = memory.allocate(request, plan.make_counted, numbers)
            made = made + more
    else:  # a training step makes such a call for each layer: the CPU's time counts where the GPU's is short
        of_ranks, of_channels, _, _, in_rank, _ = known.arguments
        plan.notify.launch(memory.stream)
        outputs, tokens = [*addresses, *NO_LISTS], [*arguments, 0, 0]
    first = *outputs, *tokens, in_rank, of_ranks, of_channels
    plan.launch.launch(memory.stream, first, (request, made), numbers)
    if handle is not None:
        return pair(*made), None, None, None, None, memory.finish(request.async_finish)
    recv = DispatchOutputs(*made[2:])
    _, _, src_idx, _, _, recv_channels, send_head = outputs
    taken = Taken((of_ranks, of_channels, recv_channels, src_idx, in_rank, send_head), plan.sizes, numbers)
    routes = *made[:2], recv.recv_channel_prefix_matrix, recv.recv_src_idx, request.is_token_in_rank, recv.send_head
    kind = DispatchTuple if memory.is_deep_eps else DispatchHandle
    handle = kind.made(routes, memory.identity, memory.num_dispatches, taken)
    event = memory.finish(request.async_finish)
    return pair(recv.recv_x, recv.recv_x_scales), recv.recv_topk_idx, recv.recv_topk_weights, per_expert, handle, event
