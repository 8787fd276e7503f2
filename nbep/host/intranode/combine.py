"""Buffer.combine inside a node: bring tokens back to their source ranks and add them up.

 first call with a handle and such rows:  check all, size, prepare both launches --> a plan, kept by the handle
 each call:                               find the plan, check the arrays, allocate, launch twice

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_combine
"""

from __future__ import annotations

from typing import NamedTuple

from nbep.device.kernels.intranode.cached_notify_combine import cached_notify_combine
from nbep.device.kernels.intranode.combine import CombineSizes, combine_smem_bytes
from nbep.device.kernels.intranode.combine import combine as combine_kernel
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import combine_call
from nbep.host.config import COMBINE_TABLE, Config, in_node_config
from nbep.host.events import EventOverlap
from nbep.host.intranode.direct_combine import DirectCombine, prepare_direct_combine
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.node import Node
from nbep.host.request import CombineRequest
from nbep.host.target.base import Array, MaybeArray, PreparedLaunch
from nbep.host.target.new_arrays import Make
from nbep.host.tokens import CombineGiven, check_combine_inputs

COMBINE = "combine"  # in the key of a plan: a handle keeps those of dispatches, too
MIN_THREADS = 64  # one warp coordinates, the others receive


class RingCombine(NamedTuple):
    """The launches of a combine through rings."""

    notify: PreparedLaunch
    combine: PreparedLaunch
    shape: RingShape


class Plan(NamedTuple):
    """What depends on the handle, on the sizes of rows and weights, and on the config."""

    make: Make  # combined_x, and the weights if there are some
    way: RingCombine | DirectCombine
    call: Call


def combine(memory: Node, request: CombineRequest) -> tuple[Array, MaybeArray, EventOverlap]:
    """See Buffer.combine."""
    memory.check_faults()
    validate.stream_options(request.previous_event, request.async_finish, request.allocate_on_comm_stream)
    runtime, x, handle, topk_weights = memory.runtime, request.x, request.handle, request.topk_weights
    given = request.arrays
    kinds, arguments = runtime.look_at(given)
    key, plan = None, None
    if handle.__class__ is DispatchHandle and handle.owner is memory.identity and len(given) == 4:
        key, plan = handle.plans.find(kinds, (COMBINE, request.config, request.zero_copy))
    if plan is None:
        handle = validate.handle(memory, handle, request.previous_event)
        num_tokens, num_combined_tokens = handle.recv_src_idx.shape[0], handle.send_head.shape[0]
        checked = check_combine_inputs(memory, request, handle, num_tokens, num_combined_tokens)
        plan = _make_plan(memory, handle, checked, request)
        handle.plans.keep(key, plan)
    outputs, of_outputs = memory.allocate(request, x, plan.make)
    memory.compare(plan.call, handle)
    way = plan.way
    if isinstance(way, DirectCombine):
        validate.zero_copy(memory).begin_combine(way.places, way.shape)
    else:
        memory.ring_shape = way.shape
    way.notify.launch(memory.stream)
    if topk_weights is None:
        of_outputs.append(0)
    way.combine.launch(memory.stream, (*of_outputs, *arguments), (given, outputs, handle))
    return outputs[0], None if topk_weights is None else outputs[1], memory.finish(request.async_finish)


def _make_plan(memory: Node, handle: DispatchHandle, given: CombineGiven, request: CombineRequest) -> Plan:
    """Check what does not change, and prepare the launches."""
    runtime, num_ranks, hidden, num_topk = memory.runtime, memory.num_ranks, given.hidden, given.num_topk
    num_combined_tokens = handle.send_head.shape[0]
    token_sizes = (given.hidden_bytes, num_topk, 0, 0)
    num_sms, zero_copy = 2 * handle.channel_prefix_matrix.shape[1], request.zero_copy
    room = None if zero_copy else memory.num_nvl_bytes
    config = in_node_config(request.config, COMBINE_TABLE, num_sms, num_ranks, room, token_sizes)
    validate.config(config, num_ranks, MIN_THREADS)
    validate.handle_config(handle, config)
    call = combine_call(memory, hidden, num_topk, config, handle, zero_copy=zero_copy)
    way: RingCombine | DirectCombine
    if zero_copy:
        way = prepare_direct_combine(memory, handle, given, config, call)
    else:
        shape = config.ring_shape(num_ranks, *token_sizes)
        validate.buffer_size(shape, memory.num_nvl_bytes)
        way = _prepare(memory, handle, config, shape, call)
    outputs: tuple[tuple[tuple[int, int], str], ...] = (((num_combined_tokens, hidden), "bfloat16"),)
    if num_topk > 0:
        outputs += (((num_combined_tokens, num_topk), "float32"),)
    return Plan(runtime.prepare_empty(outputs, request.x), way, call)


def _prepare(memory: Node, handle: DispatchHandle, config: Config, shape: RingShape, call: Call) -> RingCombine:
    runtime, num_ranks, num_combined_tokens = memory.runtime, memory.num_ranks, handle.send_head.shape[0]
    num_threads = config.num_threads or max(MIN_THREADS, block_sizes(runtime).ring(num_ranks))
    notify = runtime.prepare(
        memory.kernel(cached_notify_combine),
        1 + shape.num_channels,
        max(block_sizes(runtime).notify, 32 * num_ranks),
        0,
        handle.send_head,
        num_combined_tokens,
        shape.num_channels,
        num_ring_cell_words(shape),
        memory.peers,
        memory.bounds,
        call,
    )
    combine = runtime.prepare(
        combine_kernel,
        config.num_sms,
        num_threads,
        combine_smem_bytes(num_threads),
        (handle.rank_prefix_matrix, handle.recv_channel_prefix_matrix, handle.send_head),
        memory.peers,
        memory.bounds,
        shape,
        CombineSizes(num_combined_tokens, config.num_max_nvl_chunked_send_tokens),
    )
    return RingCombine(notify, combine, shape)
