"""Checks of what the user passes to a dispatch or combine between nodes; see host.validate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbep.device.kernels.internode.arguments import MAX_WARPS
from nbep.device.layout.internode import MAX_CHANNELS, num_meta_words
from nbep.host import handle_contents, validate
from nbep.host.arguments import refuse
from nbep.host.config import Config, Rings, Table, fit_rings, nodes_config
from nbep.host.handles import InternodeHandle
from nbep.host.internode.memory import InternodeMemory
from nbep.host.node import NodeMemory


def mode_of(memory: NodeMemory) -> InternodeMemory:
    assert memory.internode is not None
    return memory.internode


def handle(memory: NodeMemory, value: Any) -> InternodeHandle:
    """That of a dispatch between nodes."""
    value = validate.own_handle(memory, value, InternodeHandle, "a dispatch between nodes", 10)
    if not value.is_as_made:  # else its arrays are those that dispatch made
        mode = mode_of(memory)
        num_ranks, num_nodes, num_nvl_ranks = memory.num_ranks, mode.num_rdma_ranks, mode.num_nvl_ranks
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
        size = "num_rdma_recv_tokens", num_nvl_ranks
        validate.output("handle.send_nvl_head", view(value.send_nvl_head), "int32", size)
    return value


def contents(memory: NodeMemory, value: InternodeHandle) -> None:
    """Of a handle's arrays, where the host can read them."""
    handle = InternodeHandle(*map(memory.runtime.contents, value))
    handle_contents.internode(handle, memory.rank, memory.num_nvl_peers)


def rings(
    memory: NodeMemory,
    given: Config | None,
    table: Table,
    num_sms: int,
    rings_of: Callable[[Config], Rings],
    of_handle: bool,
    most_warps: int = MAX_WARPS,
    num_sharing: int = 1,
) -> tuple[Config, Rings]:
    """The config of a call, what is given or else the default, and its rings, for which there is room.

    num_sms: of the default; of_handle: and of the dispatch that made the handle, which the call must have too
    most_warps: that the kernel is made for; num_sharing: nodes that share an NVL ring's slots, see fit_rings
    """
    mode, config = mode_of(memory), given
    num_bytes = memory.num_nvl_bytes, mode.rdma.num_rdma_bytes
    if config is None:
        default = nodes_config(table, num_sms, mode.num_rdma_ranks, mode.num_nvl_ranks)
        config = fit_rings(default, rings_of, *num_bytes, num_sharing)
    if not isinstance(config, Config):
        refuse("config", type(config).__name__, "an nbep.Config or None")
    if config.num_sms < 2 or config.num_sms % 2 != 0 or config.num_channels > MAX_CHANNELS:
        refuse("config.num_sms", config.num_sms, f"even, from 2 to {2 * MAX_CHANNELS}")
    fewest, most = mode.bounds_of_warps(most_warps)
    if config.num_threads is not None and not 32 * fewest <= config.num_threads <= 32 * most:
        refuse("config.num_threads", config.num_threads, f"a multiple of 32 from {32 * fewest} to {32 * most}")
    if of_handle and config.num_sms != num_sms:
        refuse("config.num_sms", config.num_sms, f"{num_sms}, as in the dispatch that made the handle")
    found = rings_of(config)
    if config.num_max_nvl_chunked_send_tokens > found.nvl.num_slots:
        refuse(
            "config.num_max_nvl_chunked_send_tokens",
            config.num_max_nvl_chunked_send_tokens,
            f"at most {found.nvl.num_slots} in combine, a node's share of num_max_nvl_chunked_recv_tokens "
            f"({config.num_max_nvl_chunked_recv_tokens})",
        )
    for name, available, needed, shape in (
        ("num_nvl_bytes", num_bytes[0], found.num_nvl_bytes, found.nvl),
        ("num_rdma_bytes", num_bytes[1], found.num_rdma_bytes, found.rdma),
    ):
        if needed > available:
            raise ValueError(
                f"{name}: got {available} at construction; must be at least {needed} for {shape.num_channels} channels "
                f"of {shape.num_slots} slots from {shape.num_ranks} {'ranks' if name == 'num_nvl_bytes' else 'nodes'}, "
                f"{shape.hidden_bytes} bytes a token"
            )
    mode.rdma.transport.check_message(found.rdma.hidden_bytes)
    return config, found
