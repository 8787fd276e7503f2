"""Buffer.dispatch with a handle, inside a node: cached_notify_dispatch --> dispatch, or direct_dispatch without rings.

A training step makes such a call for each layer, and the CPU's time for it counts where the GPU's is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.kernels.intranode.direct_dispatch import DirectSizes
from nbep.device.kernels.intranode.dispatch import DispatchOutputs, DispatchSizes, dispatch, dispatch_smem_bytes
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.direct import CELL_WORDS, DirectShape
from nbep.device.layout.intranode import RingShape, num_ring_cell_words
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.calls import dispatch_call
from nbep.host.config import DISPATCH_TABLE, Config, in_node_config
from nbep.host.intranode.direct_dispatch import Half, prepare_halves, received
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.intranode.notify import prepare_reset
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.target.base import LATER, Array, MaybeArray, PreparedLaunch
from nbep.host.target.new_arrays import Make, Wanted
from nbep.host.tokens import Tokens, pair, rows_of

NO_LISTS = (0,) * (len(DispatchOutputs._fields) - 2)  # besides tokens and scales, a handle's dispatch gives nothing


class Plan(NamedTuple):
    """What depends on the handle's sizes, on the sizes and dtypes of the tokens, and on the config."""

    outputs: tuple[Wanted | None, ...]  # recv_x, and its scales if there are some
    make: Make | None  # them; None: they lie in the symmetric memory
    notify: PreparedLaunch
    launch: PreparedLaunch | tuple[Half, ...]  # without rings those of both halves
    shape: RingShape | DirectShape
    call: Call


def dispatch_cached(memory: Node, request: DispatchRequest) -> Any:
    """Dispatch again along the routes of a handle; recv_x, with its scales if x has some."""
    if request.topk_idx is not None or request.topk_weights is not None:
        validate.only_with_counts(request.topk_idx, request.topk_weights)
    x, handle, plans = request.x, request.handle, memory.cached_plans
    is_pair = isinstance(x, tuple)
    given = x if is_pair else (x, None)
    options = request.config, request.zero_copy, is_pair
    key, plan, arguments = plans.find_along(memory, handle, DispatchHandle, given, options)
    if plan is None:
        tokens = Tokens.look_at(memory, request)
        handle = validate.handle(memory, handle, request.previous_event)
        plan = _make_plan(memory, tokens, handle, request)
        plans.keep(key, plan)
        arguments = memory.runtime.arguments(given)
    launch = _launch if plan.make is not None else _launch_without_rings
    return pair(*launch(memory, plan, given, arguments, handle, request))


def _make_plan(memory: Node, tokens: Tokens, handle: DispatchHandle, request: DispatchRequest) -> Plan:
    """Check what does not change, and prepare the launches."""
    runtime, num_ranks, zero_copy = memory.runtime, memory.num_ranks, request.zero_copy
    num_tokens, num_sms = handle.is_token_in_rank.shape[0], 2 * handle.num_channels
    if tokens.num_tokens != num_tokens:
        validate.refuse("x", f"{tokens.num_tokens} tokens", f"{num_tokens} tokens, as in the dispatch of the handle")
    sizes = tokens.ring_sizes(0)
    room = None if zero_copy else memory.num_nvl_bytes
    config = in_node_config(request.config, DISPATCH_TABLE, num_sms, num_ranks, room, sizes, memory.is_deep_eps)
    validate.config(config, num_ranks, 32 * num_ranks)
    validate.handle_config(handle, config)
    strides = tokens.scale_strides
    shape: RingShape | DirectShape
    if zero_copy:
        shape = DirectShape(config.num_channels, *sizes)
        direct_sizes = DirectSizes(num_tokens, LATER, 0, 0, *strides)
        launch: PreparedLaunch | tuple[Half, ...] = prepare_halves(memory, config, shape, direct_sizes)
        num_words, peers = CELL_WORDS, validate.zero_copy(memory).peers
    else:
        shape = config.ring_shape(num_ranks, *sizes)
        validate.buffer_size(shape, memory.num_nvl_bytes)
        chunk = config.num_max_nvl_chunked_send_tokens
        mix_roles = int(block_sizes(runtime).mix_roles if config.mix_roles is None else config.mix_roles)
        ring_sizes = DispatchSizes(num_tokens, LATER, 0, 0, chunk, *strides, mix_roles)
        launch = _prepare(memory, config, shape, ring_sizes)
        num_words, peers = num_ring_cell_words(shape), memory.peers
    call = dispatch_call(memory, tokens, None, config, handle, zero_copy=zero_copy)
    notify = prepare_reset(memory, peers, num_words, call)
    outputs = rows_of(tokens.x, tokens.scales)
    make = None if zero_copy else runtime.prepare_empty(outputs, tokens.x.array)
    return Plan(outputs, make, notify, launch, shape, call)


def _prepare(memory: Node, config: Config, shape: RingShape, sizes: DispatchSizes) -> PreparedLaunch:
    runtime = memory.runtime
    num_threads = config.num_threads or block_sizes(runtime).ring(memory.num_ranks)
    smem_bytes = dispatch_smem_bytes(num_threads, runtime.has_tma)
    last = memory.peers, memory.bounds, shape, sizes
    return runtime.prepare(dispatch, config.num_sms, num_threads, smem_bytes, *last)


def _launch(
    memory: Node, plan: Plan, given: Sequence[Any], arguments: Sequence[Any], handle: DispatchHandle, request: Any
) -> tuple[Array, MaybeArray]:
    """Through rings."""
    of_ranks, of_channels, _, _, in_rank, _ = handle.taken(memory.runtime).arguments
    numbers = handle.taken(memory.runtime).numbers
    made, addresses = memory.allocate(request, given[0], plan.make, numbers)
    memory.compare(plan.call, handle)
    memory.ring_shape = plan.shape  # type: ignore[assignment]
    plan.notify.launch(memory.stream)
    first = *addresses, *NO_LISTS, *arguments, 0, 0, in_rank, of_ranks, of_channels
    launch: Any = plan.launch
    launch.launch(memory.stream, first, (given, handle, made), numbers)
    return made[0], made[1]


def _launch_without_rings(
    memory: Node, plan: Plan, given: Sequence[Any], arguments: Sequence[Any], handle: DispatchHandle, request: Any
) -> tuple[Array, MaybeArray]:
    """The outputs lie in the half of the symmetric memory that is next."""
    direct, taken = validate.zero_copy(memory), handle.taken(memory.runtime)
    halves: Any = plan.launch
    launch, places = halves[direct.next_half]
    num_rows = taken.numbers[0]
    if num_rows > places.num_rows:
        room = f"{direct.num_bytes} at construction, which has room for {places.num_rows} rows"
        validate.refuse("num_zero_copy_bytes", room, f"enough for {num_rows}")
    memory.allocate(request, given[0])
    memory.compare(plan.call, handle)
    lease = direct.begin_dispatch(places, plan.shape)  # type: ignore[arg-type]
    recv_x, recv_x_scales = received(memory, places, plan.outputs, num_rows, given, lease)
    plan.notify.launch(memory.stream)
    of_ranks, of_channels, _, _, _, send_head = taken.arguments
    first = 0, *arguments, 0, 0, send_head, of_ranks, of_channels
    launch.launch(memory.stream, first, (given, handle), taken.numbers)
    return recv_x, recv_x_scales
