"""Buffer.dispatch with a handle, inside a node: what does not change from call to call is prepared once.

 first call with a handle and such tokens:  check all, size, prepare both launches --> a plan, kept by the handle
 each call:                                 find the plan, check the arrays, allocate, launch twice

A training step makes such a call for each layer, and the CPU's time for it counts where the GPU's is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.intranode.direct_dispatch import (
    DirectSizes,
    direct_dispatch,
    direct_dispatch_smem_bytes,
)
from nbep.device.kernels.intranode.dispatch import DispatchOutputs, DispatchSizes, dispatch, dispatch_smem_bytes
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.direct import CELL_WORDS, DirectShape, HalfPlaces
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import dispatch_call
from nbep.host.config import DISPATCH_TABLE, Config, in_node_config
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import prepare_reset
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import Array, MaybeArray, PreparedLaunch
from nbep.host.target.new_arrays import Make
from nbep.host.tokens import Tokens, pair

NO_LISTS = (0,) * (len(DispatchOutputs._fields) - 2)  # besides tokens and scales, a handle's dispatch gives nothing


class Way(NamedTuple):
    """How the tokens of one half of the calls go; through rings all go alike."""

    launch: PreparedLaunch
    places: HalfPlaces | None  # None: through rings


class Plan(NamedTuple):
    """What depends on the handle, on the sizes and dtypes of the tokens, and on the config."""

    outputs: tuple[tuple[tuple[int, int], str], ...]  # recv_x, and its scales if there are some
    make: Make | None  # them; None: they lie in the symmetric memory
    notify: PreparedLaunch
    ways: tuple[Way, ...]
    shape: RingShape | DirectShape
    call: Call


def dispatch_cached(memory: Node, request: DispatchRequest) -> Any:
    """Dispatch again along the routes of a handle; recv_x, with its scales if x has some."""
    if request.topk_idx is not None or request.topk_weights is not None:
        validate.only_with_counts(request.topk_idx, request.topk_weights)
    runtime, x, handle = memory.runtime, request.x, request.handle
    is_pair = isinstance(x, tuple)
    arrays = x if is_pair else (x, None)
    kinds, arguments = runtime.look_at(arrays)
    key, plan = None, None
    if handle.__class__ is DispatchHandle and handle.owner is memory.identity and len(arrays) == 2:
        key, plan = handle.plans.find(kinds, (request.config, request.zero_copy, is_pair))
    if plan is None:
        tokens = Tokens.look_at(memory, request)
        handle = validate.handle(memory, handle, request.previous_event)
        plan = _make_plan(memory, tokens, handle, request)
        handle.plans.keep(key, plan)
    return pair(*_launch(memory, plan, arguments, handle, request))


def _make_plan(memory: Node, tokens: Tokens, handle: DispatchHandle, request: DispatchRequest) -> Plan:
    """Check what does not change, and prepare the launches."""
    runtime, num_ranks, zero_copy = memory.runtime, memory.num_ranks, request.zero_copy
    num_tokens, num_sms = handle.is_token_in_rank.shape[0], 2 * handle.channel_prefix_matrix.shape[1]
    if tokens.num_tokens != num_tokens:
        validate.refuse("x", f"{tokens.num_tokens} tokens", f"{num_tokens} tokens, as in the dispatch of the handle")
    sizes = tokens.ring_sizes(0)
    room = None if zero_copy else memory.num_nvl_bytes
    config = in_node_config(request.config, DISPATCH_TABLE, num_sms, num_ranks, room, sizes)
    validate.config(config, num_ranks, 32 * num_ranks)
    validate.handle_config(handle, config)
    num_recv_tokens = handle.recv_src_idx.shape[0]
    strides = tokens.scale_strides
    shape: RingShape | DirectShape
    if zero_copy:
        shape = DirectShape(config.num_channels, *sizes)
        ways = _direct_ways(memory, config, shape, handle, DirectSizes(num_tokens, num_recv_tokens, 0, 0, *strides))
        num_words, peers = CELL_WORDS, validate.zero_copy(memory).peers
    else:
        shape = config.ring_shape(num_ranks, *sizes)
        validate.buffer_size(shape, memory.num_nvl_bytes)
        chunk = config.num_max_nvl_chunked_send_tokens
        mix_roles = int(block_sizes(runtime).mix_roles if config.mix_roles is None else config.mix_roles)
        ring_sizes = DispatchSizes(num_tokens, num_recv_tokens, 0, 0, chunk, *strides, mix_roles)
        ways = _ring_ways(memory, config, shape, handle, ring_sizes)
        num_words, peers = num_ring_cell_words(shape), memory.peers
    call = dispatch_call(memory, tokens, None, config, handle, zero_copy=zero_copy)
    notify = prepare_reset(memory, peers, num_words, call)
    outputs: tuple[tuple[tuple[int, int], str], ...] = (((num_recv_tokens, tokens.hidden), tokens.x.dtype_name),)
    if tokens.scales.is_array:
        outputs += (((num_recv_tokens, tokens.num_scales), tokens.scales.dtype_name),)
    make = None if zero_copy else runtime.prepare_empty(outputs, tokens.x.array)
    return Plan(outputs, make, notify, ways, shape, call)


def _ring_ways(
    memory: Node,
    config: Config,
    shape: RingShape,
    handle: DispatchHandle,
    sizes: DispatchSizes,
) -> tuple[Way, ...]:
    runtime = memory.runtime
    num_threads = config.num_threads or block_sizes(runtime).ring(memory.num_ranks)
    launch = runtime.prepare(
        dispatch,
        config.num_sms,
        num_threads,
        dispatch_smem_bytes(num_threads, runtime.has_tma),
        (handle.is_token_in_rank, handle.rank_prefix_matrix, handle.channel_prefix_matrix),
        memory.peers,
        memory.bounds,
        shape,
        sizes,
    )
    return (Way(launch, None),)


def _direct_ways(
    memory: Node, config: Config, shape: DirectShape, handle: DispatchHandle, sizes: DirectSizes
) -> tuple[Way, ...]:
    num_recv_tokens = handle.recv_src_idx.shape[0]
    runtime, direct = memory.runtime, validate.zero_copy(memory)
    num_threads = config.num_threads or block_sizes(runtime).ring(memory.num_ranks)
    ways = []
    for places in direct.place_halves(shape):
        if num_recv_tokens > places.num_rows:
            room = f"{direct.num_bytes} at construction, which has room for {places.num_rows} rows"
            validate.refuse("num_zero_copy_bytes", room, f"enough for {num_recv_tokens}")
        launch = runtime.prepare(
            direct_dispatch,
            config.num_sms,
            num_threads,
            direct_dispatch_smem_bytes(num_threads, runtime.has_tma),
            (handle.send_head, handle.rank_prefix_matrix, handle.channel_prefix_matrix),
            direct.peers,
            memory.bounds,
            places,
            shape,
            sizes,
        )
        ways.append(Way(launch, places))
    return tuple(ways)


def _launch(
    memory: Node, plan: Plan, arguments: Sequence[Any], handle: DispatchHandle, request: DispatchRequest
) -> tuple[Array, MaybeArray]:
    direct = memory.direct
    x, scales = request.x if isinstance(request.x, tuple) else (request.x, None)
    way = plan.ways[direct.next_half if direct is not None and len(plan.ways) > 1 else 0]
    if way.places is not None and direct is not None:
        memory.allocate(request, x)
        memory.compare(plan.call, handle)
        lease = direct.begin_dispatch(way.places, plan.shape)  # type: ignore[arg-type]
        size, dtype = plan.outputs[0]
        recv_x = direct.array(way.places.x, way.places.num_rows, size, dtype, x, lease)
        recv_x_scales: MaybeArray = None
        if scales is not None:
            size, dtype = plan.outputs[1]
            recv_x_scales = direct.array(way.places.scales, way.places.num_rows, size, dtype, scales, lease)
        plan.notify.launch(memory.stream)
        way.launch.launch(memory.stream, (0, *arguments, 0, 0), (x, scales, handle, recv_x, recv_x_scales))
        return recv_x, recv_x_scales
    (recv_x, *rest), (rows, *scale_rows) = memory.allocate(request, x, plan.make)
    recv_x_scales = rest[0] if rest else None
    memory.compare(plan.call, handle)
    memory.ring_shape = plan.shape  # type: ignore[assignment]
    stream = memory.stream
    plan.notify.launch(stream)
    outputs = rows, scale_rows[0] if rest else 0, *NO_LISTS
    way.launch.launch(stream, (*outputs, *arguments, 0, 0), (x, scales, handle, recv_x, recv_x_scales))
    return recv_x, recv_x_scales
