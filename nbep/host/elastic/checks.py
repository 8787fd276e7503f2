"""Checks of what an `ElasticBuffer` is passed, all before anything is launched or allocated.

Every failure is a ValueError that says which argument it is, what came and what is allowed.
"""

from __future__ import annotations

from typing import Any

from nbep.device.layout.intranode import MAX_TOPK
from nbep.host import handle_contents, validate
from nbep.host.arguments import integer, refuse, switches
from nbep.host.elastic.handle import FORM, EPHandle
from nbep.host.elastic.request import ElasticCombineRequest, ElasticDispatchRequest
from nbep.host.events import handle_of
from nbep.host.node import Node
from nbep.host.target.views import NO_ARRAY
from nbep.host.tokens import A_PAIR, Tokens, check_rows


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


def cpu_may_wait(memory: Node, request: ElasticDispatchRequest) -> None:
    """Raises: ValueError where the CPU cannot wait for counts"""
    if request.do_cpu_sync and memory.runtime.is_capturing:
        refuse("do_cpu_sync", True, "False in a CUDA graph, or a handle given: the CPU cannot wait there")


def owned(memory: Node, handle: Any) -> EPHandle:
    """A handle of this buffer."""
    if not isinstance(handle, EPHandle):
        refuse("handle", type(handle).__name__, "the EPHandle that dispatch returned")
    if handle.owner is not None and handle.owner is not memory.identity:
        refuse("handle", "the handle of another buffer", f"one that this buffer made on rank {memory.rank}")
    for name, value, made in zip(FORM, handle.form, handle.made_form or handle.form, strict=True):
        if value != made:
            refuse(f"handle.{name}", value, f"{made}, as dispatch made it")
    view, num_ranks = memory.runtime.view, memory.num_ranks
    num_experts = validate.num_experts(num_ranks, handle.num_experts, "handle.num_experts")
    topk_idx = view(handle.topk_idx)
    validate.array("handle.topk_idx", topk_idx, "int64", ("num_tokens", "num_topk"))
    has_own = handle.token_metadata_at_forward is not None
    name = "token_metadata_at_forward" if has_own else "psum_num_recv_tokens_per_scaleup_rank"
    validate.array(f"handle.{name}", view(handle.psum_of_ranks), "int32", (num_ranks,))
    for name in ("psum_num_recv_tokens_per_expert", "num_unaligned_recv_tokens_per_expert"):
        validate.array(f"handle.{name}", view(getattr(handle, name)), "int32", (num_experts // num_ranks,))
    metadata = view(handle.recv_src_metadata)
    validate.array("handle.recv_src_metadata", metadata, "int32", ("num_recv_tokens", 2 + topk_idx.shape[1]))
    validate.array("handle.dst_buffer_slot_idx", view(handle.dst_buffer_slot_idx), "int32", topk_idx.shape)
    return handle


def tokens(memory: Node, request: ElasticDispatchRequest) -> Tokens:
    """What travels, and where to. request: with the handle's topk_idx if there is a handle"""
    runtime, num_ranks, is_pair = memory.runtime, memory.num_ranks, isinstance(request.x, tuple)
    topk_idx, topk_weights = runtime.view(request.topk_idx), runtime.view(request.topk_weights)
    if is_pair and len(request.x) != 2:
        refuse("x", f"a tuple of {len(request.x)}", A_PAIR)
    x, scales = map(runtime.view, request.x) if is_pair else (runtime.view(request.x), NO_ARRAY)
    check_rows(x, scales, is_pair)
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
        stats = runtime.view(request.stats)
        name = "cumulative_local_expert_recv_stats"
        validate.output(name, stats, "int32", (num_experts // num_ranks,))
        validate.apart({name: stats}, {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights})
    if validate.may_read(memory, request.previous_event):
        validate.expert_indices(runtime.contents(request.topk_idx), num_experts)
    return Tokens.of(x, scales, topk_idx, topk_weights, num_experts)


def rows(memory: Node, request: ElasticCombineRequest) -> int:
    """Rows, weights and biases fit each other and the handle. Returns the hidden size."""
    handle, view = request.handle, memory.runtime.view
    x, topk_weights, *of_biases = map(view, request.arrays)
    if len(of_biases) != 2:
        raise ValueError(f"bias: got a tuple of {len(of_biases)}; must be an array, a tuple of two, or None")
    integer("num_sms", request.num_sms, 1)
    num_tokens, num_topk = handle.topk_idx.shape
    validate.array("x", x, "bfloat16", ("num_rows", "hidden"))
    num_rows, hidden = x.shape
    validate.hidden_size("x", hidden, 8)
    validate.row_alignment("x", x)
    num_received = handle.recv_src_metadata.shape[0]
    if not handle.do_expand and num_rows > num_received:
        refuse("x", f"{num_rows} rows", f"at most {num_received}, as dispatch returned")
    if request.topk_weights is not None:
        shape = (num_rows,) if handle.do_expand else (num_rows, num_topk)
        validate.array("topk_weights", topk_weights, "float32", shape)
    for name, bias in (("bias_0", of_biases[0]), ("bias_1", of_biases[1])):
        if bias.array is not None:
            validate.array(name, bias, "bfloat16", (num_tokens, hidden))
            validate.row_alignment(name, bias)
    if num_topk > MAX_TOPK:
        refuse("handle.topk_idx", f"{num_topk} choices a token", f"at most {MAX_TOPK}")
    return hidden


def contents_of_handle(
    memory: Node, request: ElasticDispatchRequest | ElasticCombineRequest, reduces: bool = True
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
