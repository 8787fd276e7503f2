"""What an `ElasticBuffer` is passed, and the checks of it, all before anything is launched or allocated.

A call is one object: what the caller passed, with the defaults of the buffer filled in.

Every failure is a ValueError that says which argument it is, what came and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.device.layout.intranode import MAX_TOPK
from nbep.host import handle_contents, validate
from nbep.host.arguments import integer, refuse, switches
from nbep.host.elastic.handle import FORM, EPHandle
from nbep.host.events import handle_of
from nbep.host.node import NodeMemory
from nbep.host.normal_checks import Tokens, check_rows
from nbep.host.target.arrays import View
from nbep.host.target.base import Array, MaybeArray

STATS = "cumulative_local_expert_recv_stats"


class ElasticDispatchRequest(NamedTuple):
    """See ElasticBuffer.dispatch."""

    x: Any
    topk_idx: MaybeArray
    topk_weights: MaybeArray
    stats: MaybeArray
    handle: EPHandle | None
    previous_event: Any
    previous_event_before_epilogue: Any
    async_finish: bool
    allocate_on_comm_stream: bool
    num_experts: Any
    num_max_tokens_per_rank: Any
    expert_alignment: Any
    num_sms: int
    do_handle_copy: bool
    do_cpu_sync: bool
    do_expand: bool
    do_zero_padding: bool
    use_tma_aligned_col_major_sf: bool


FIRST_OPTION = ElasticDispatchRequest._fields.index("async_finish")  # from here on a plan depends on it


class ElasticCombineRequest(NamedTuple):
    """See ElasticBuffer.combine."""

    x: Array
    handle: EPHandle
    topk_weights: MaybeArray
    bias: Any
    num_sms: int
    previous_event: Any
    previous_event_before_epilogue: Any
    async_finish: bool
    allocate_on_comm_stream: bool


def options(request: ElasticDispatchRequest | ElasticCombineRequest) -> None:
    """Switches and events."""
    handle_of(request.previous_event)
    handle_of(request.previous_event_before_epilogue)
    switches(
        async_with_compute_stream=request.async_finish,
        allocate_on_comm_stream=request.allocate_on_comm_stream,
    )
    if isinstance(request, ElasticDispatchRequest):
        switches(
            do_handle_copy=request.do_handle_copy,
            do_cpu_sync=request.do_cpu_sync,
            do_expand=request.do_expand,
            do_zero_padding=request.do_zero_padding,
            use_tma_aligned_col_major_sf=request.use_tma_aligned_col_major_sf,
        )
        if request.do_zero_padding and not request.do_expand:
            refuse("do_zero_padding", True, "False without do_expand: nothing is padded")
        if request.do_cpu_sync and request.handle is not None:
            refuse("do_cpu_sync", True, "False or None with a handle, which knows the counts")


def owned(memory: NodeMemory, handle: EPHandle, views: Sequence[View]) -> None:
    """A handle of this buffer. views: of its arrays"""
    if handle.owner is not None and handle.owner is not memory.identity:
        refuse("handle", "the handle of another buffer", f"one that this buffer made on rank {memory.rank}")
    for name, value, made in zip(FORM, handle.form, handle.made_form or handle.form, strict=True):
        # Who has added up the rows of each token may say so: LightLLM does.
        if value != made and not (name == "do_expand" and made):
            refuse(f"handle.{name}", value, f"{made}, as dispatch made it")
    num_ranks = memory.num_ranks
    num_experts = validate.num_experts(num_ranks, handle.num_experts, "handle.num_experts")
    topk_idx, of_ranks, ends, counted, metadata, slots = views
    validate.array("handle.topk_idx", topk_idx, "int64", ("num_tokens", "num_topk"))
    has_own = handle.token_metadata_at_forward is not None
    name = "token_metadata_at_forward" if has_own else "psum_num_recv_tokens_per_scaleup_rank"
    validate.array(f"handle.{name}", of_ranks, "int32", (num_ranks,))
    of_experts = (num_experts // num_ranks,)
    validate.array("handle.psum_num_recv_tokens_per_expert", ends, "int32", of_experts)
    validate.array("handle.num_unaligned_recv_tokens_per_expert", counted, "int32", of_experts)
    validate.array("handle.recv_src_metadata", metadata, "int32", ("num_recv_tokens", 2 + topk_idx.shape[1]))
    validate.array("handle.dst_buffer_slot_idx", slots, "int32", topk_idx.shape)


def tokens(memory: NodeMemory, request: ElasticDispatchRequest, views: Sequence[View]) -> Tokens:
    """What travels, and where to. views: of x, its scales, topk_idx (of the handle if there is one), weights, stats"""
    num_ranks, (x, scales, topk_idx, topk_weights, stats) = memory.num_ranks, views
    check_rows(x, scales, isinstance(request.x, tuple))
    num_tokens = x.shape[0]
    if request.num_experts is None:
        refuse("num_experts", None, f"given unless there is a handle: a multiple of {num_ranks}")
    num_experts = validate.num_experts(num_ranks, request.num_experts)
    most = integer("num_max_tokens_per_rank", request.num_max_tokens_per_rank, 0)
    if most == 0:
        refuse("num_max_tokens_per_rank", 0, "positive here or at construction, and the same on all ranks")
    if num_tokens > most:
        refuse("x", f"{num_tokens} tokens", f"at most num_max_tokens_per_rank={most}")
    integer("expert_alignment", request.expert_alignment, 1)
    integer("num_sms", request.num_sms, 1)
    validate.array("topk_idx", topk_idx, "int64", (num_tokens, "num_topk"))
    validate.topk_size("topk_idx", topk_idx.shape[1])
    if request.topk_weights is not None:
        validate.array("topk_weights", topk_weights, "float32", topk_idx.shape)
    if request.stats is not None:
        validate.output(STATS, stats, "int32", (num_experts // num_ranks,))
        _apart(views)
    return Tokens.of(x, scales, topk_idx, topk_weights, num_experts)


def _apart(views: Sequence[View]) -> None:
    """What a dispatch adds to lies in memory of its own."""
    x, _, topk_idx, topk_weights, stats = views[:5]
    validate.apart({STATS: stats}, {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights})


def each_dispatch(memory: NodeMemory, request: ElasticDispatchRequest, views: Sequence[View]) -> None:
    """What is checked in each call: whether the CPU can wait, and what `contents_of_handle` says; where the host reads
    arrays, also what is in them and where they lie. views: see Plans.find
    """
    if request.do_cpu_sync and memory.runtime.is_capturing:
        refuse("do_cpu_sync", True, "False in a CUDA graph, or a handle given: the CPU cannot wait there")
    if views and request.stats is not None:
        _apart(views)
    if request.handle is not None:
        contents_of_handle(memory, request)
    if validate.may_read(memory, request.previous_event):
        validate.expert_indices(memory.runtime.contents(request.topk_idx), request.num_experts)


def rows(request: ElasticCombineRequest, views: Sequence[View]) -> int:
    """Rows, weights and biases fit each other and the handle. Returns the hidden size. views: of them"""
    handle, (x, topk_weights, *of_biases) = request.handle, views
    integer("num_sms", request.num_sms, 1)
    num_tokens, num_topk = handle.topk_idx.shape
    validate.array("x", x, "bfloat16", ("num_rows", "hidden"), aligned=True)
    num_rows, hidden = x.shape
    validate.hidden_size("x", hidden, 8)
    num_received = handle.recv_src_metadata.shape[0]
    if not handle.do_expand and num_rows > num_received:
        refuse("x", f"{num_rows} rows", f"at most {num_received}, as dispatch returned")
    if request.topk_weights is not None:
        shape = (num_rows,) if handle.do_expand else (num_rows, num_topk)
        validate.array("topk_weights", topk_weights, "float32", shape)
    for name, bias in (("bias_0", of_biases[0]), ("bias_1", of_biases[1])):
        if bias.array is not None:
            validate.array(name, bias, "bfloat16", (num_tokens, hidden), aligned=True)
    if num_topk > MAX_TOPK:
        refuse("handle.topk_idx", f"{num_topk} choices a token", f"at most {MAX_TOPK}")
    return hidden


def contents_of_handle(
    memory: NodeMemory, request: ElasticDispatchRequest | ElasticCombineRequest, reduces: bool = True
) -> None:
    """A handle still says what dispatch has written there, but that expanded rows may be others where each choice's is
    not looked up.

    Each call is checked: a handle may be rewritten between two of them. reduces: see combine.combine
    """
    handle, why = request.handle, ""
    assert handle is not None
    if isinstance(request, ElasticDispatchRequest):
        why = "with do_expand" if request.do_expand else ""
    elif not reduces or request.topk_weights is not None:
        why = "with topk_weights" if reduces else "without allow_multiple_reduction"
    if handle.do_expand and why and handle.is_rewritten:
        allowed = f"as dispatch made it {why}: the row of each choice is looked up there"
        refuse("handle.recv_src_metadata", "a rewritten one", allowed)
    if validate.may_read(memory, request.previous_event):
        used = handle_contents.elastic(handle, memory.runtime.contents, handle.do_expand and not why)
        if isinstance(request, ElasticCombineRequest) and request.x.shape[0] < used:
            refuse("x", f"{request.x.shape[0]} rows", f"at least {used}, those that the handle names")
