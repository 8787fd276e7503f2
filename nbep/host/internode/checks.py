"""Checks of what the user passes to a dispatch or combine between nodes; see host.validate."""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.internode.arguments import MAX_WARPS
from nbep.device.layout.internode import MAX_CHANNELS, num_meta_words
from nbep.host import handle_contents, validate
from nbep.host.arguments import refuse
from nbep.host.config import Config
from nbep.host.events import EventOverlap
from nbep.host.internode.handle import InternodeHandle
from nbep.host.internode.memory import InternodeMemory
from nbep.host.node import Node
from nbep.host.request import DispatchRequest
from nbep.host.tokens import Tokens


def mode_of(memory: Node) -> InternodeMemory:
    assert memory.internode is not None
    return memory.internode


def node_counts(memory: Node, request: DispatchRequest, may_read: bool) -> None:
    """num_tokens_per_rdma_rank, given the other counts."""
    num_nodes, num_tokens_per_rdma_rank = mode_of(memory).num_rdma_ranks, request.num_tokens_per_rdma_rank
    if num_tokens_per_rdma_rank is None:
        refuse("num_tokens_per_rdma_rank", "None", "given between nodes; get_dispatch_layout returns it")
    view = memory.runtime.view(num_tokens_per_rdma_rank)
    validate.array("num_tokens_per_rdma_rank", view, "int32", (num_nodes,))
    if may_read:
        contents = memory.runtime.contents
        in_node = contents(request.is_token_in_rank).reshape(-1, num_nodes, memory.num_nvl_peers).any(axis=2)
        counted = in_node.sum(axis=0)
        if (counted != contents(num_tokens_per_rdma_rank)).any():
            allowed = f"{counted.tolist()}, as is_token_in_rank says"
            refuse("num_tokens_per_rdma_rank", num_tokens_per_rdma_rank.tolist(), allowed)


def cached(memory: Node, tokens: Tokens, request: DispatchRequest) -> InternodeHandle:
    """The handle of a dispatch along its routes."""
    found = handle(memory, request.handle, request.previous_event)
    validate.only_with_counts(request.topk_idx, request.topk_weights)
    num_tokens = found.is_token_in_rank.shape[0]
    if tokens.num_tokens != num_tokens:
        refuse("x", f"{tokens.num_tokens} tokens", f"{num_tokens} tokens, as in the dispatch of the handle")
    return found


def handle(memory: Node, value: Any, previous_event: EventOverlap | None) -> InternodeHandle:
    """That of a dispatch between nodes."""
    value = validate.own_handle(memory, value, InternodeHandle, "a dispatch between nodes", 10)
    if not value.is_as_made:  # else its arrays are those that dispatch made
        _arrays(memory, value)
    if validate.may_read(memory, previous_event):
        contents = InternodeHandle(*map(memory.runtime.contents, value))
        handle_contents.internode(contents, memory.rank, memory.num_nvl_peers)
    return value


def _arrays(memory: Node, value: InternodeHandle) -> None:
    mode = mode_of(memory)
    num_ranks, num_nodes, num_places = memory.num_ranks, mode.num_rdma_ranks, mode.num_nvl_ranks
    view = memory.runtime.view
    validate.array("handle.is_token_in_rank", view(value.is_token_in_rank), "bool", ("num_tokens", num_ranks))
    num_tokens = value.is_token_in_rank.shape[0]
    matrix = view(value.rdma_channel_prefix_matrix)
    validate.array("handle.rdma_channel_prefix_matrix", matrix, "int32", (num_nodes, "num_channels"))
    num_channels = value.num_channels
    shapes: dict[str, tuple[int | str, ...]] = {
        "gbl_channel_prefix_matrix": (num_ranks, num_channels),
        "recv_rdma_channel_prefix_matrix": (num_nodes, num_channels),
        "recv_rdma_rank_prefix_sum": (num_nodes,),
        "recv_gbl_channel_prefix_matrix": (num_ranks, num_channels),
        "recv_gbl_rank_prefix_sum": (num_ranks,),
        "recv_src_meta": ("num_recv_tokens", num_meta_words(num_nodes)),
    }
    for name, shape in shapes.items():
        validate.array(f"handle.{name}", view(getattr(value, name)), "int32", shape)
    # Combine writes them.
    validate.output("handle.send_rdma_head", view(value.send_rdma_head), "int32", (num_tokens, num_nodes))
    size = "num_rdma_recv_tokens", num_places
    validate.output("handle.send_nvl_head", view(value.send_nvl_head), "int32", size)


def config(memory: Node, value: object, most_warps: int = MAX_WARPS) -> None:
    """A Config whose blocks have warps for all roles; most_warps: that the kernel is made for."""
    if not isinstance(value, Config):
        refuse("config", type(value).__name__, "an nbep.Config or None")
    if value.num_sms < 2 or value.num_sms % 2 != 0 or value.num_channels > MAX_CHANNELS:
        refuse("config.num_sms", value.num_sms, f"even, from 2 to {2 * MAX_CHANNELS}")
    fewest, most = mode_of(memory).bounds_of_warps(most_warps)
    if value.num_threads is not None and not 32 * fewest <= value.num_threads <= 32 * most:
        refuse("config.num_threads", value.num_threads, f"a multiple of 32 from {32 * fewest} to {32 * most}")


def handle_config(found: InternodeHandle, value: Config) -> None:
    if value.num_channels != found.num_channels:
        allowed = f"{2 * found.num_channels}, as in the dispatch that made the handle"
        refuse("config.num_sms", value.num_sms, allowed)
