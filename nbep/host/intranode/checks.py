"""Checks of what the user passes to a dispatch or combine inside a node; see host.validate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbep.device.layout.intranode import RingShape, num_nvl_bytes_needed
from nbep.host import handle_contents, validate
from nbep.host.arguments import refuse
from nbep.host.config import ZERO_COPY_CHUNK, Config, Table, deep_ep_bytes, fit_config, table_config
from nbep.host.handles import DispatchHandle
from nbep.host.intranode.direct import DirectMemory
from nbep.host.node import NodeMemory

MAX_RING_THREADS = 768


def direct_of(memory: NodeMemory) -> DirectMemory:
    assert memory.direct is not None
    return memory.direct


def handle(memory: NodeMemory, value: Any) -> DispatchHandle:
    """That of a dispatch inside a node."""
    value = validate.own_handle(memory, value, DispatchHandle, "dispatch", 6)
    if not value.is_as_made:  # else its arrays are those that dispatch made
        num_ranks, array = memory.num_ranks, validate.array
        of_ranks, of_channels, received, src_idx, in_rank, send_head = map(memory.runtime.view, value)
        array("handle.rank_prefix_matrix", of_ranks, "int32", (num_ranks, num_ranks))
        array("handle.channel_prefix_matrix", of_channels, "int32", (num_ranks, "num_channels"))
        array("handle.recv_channel_prefix_matrix", received, "int32", (num_ranks, of_channels.shape[1]))
        array("handle.recv_src_idx", src_idx, "int32", ("num_recv_tokens",))
        array("handle.is_token_in_rank", in_rank, "bool", ("num_tokens", num_ranks))
        validate.output("handle.send_head", send_head, "int32", (in_rank.shape[0], num_ranks))  # by combine
    return value


def contents(memory: NodeMemory, value: DispatchHandle) -> None:
    """Of a handle's arrays, where the host can read them."""
    handle_contents.intranode(DispatchHandle(*map(memory.runtime.contents, value)), memory.rank)


def rings(
    memory: NodeMemory,
    given: Config | None,
    table: Table,
    num_sms: int,
    token_sizes: Sequence[int],
    min_threads: int,
    of_handle: bool,
    zero_copy: bool,
) -> tuple[Config, RingShape]:
    """The config of a call, what is given or else the default, and its rings, for which there is room.

    num_sms: of the default; of_handle: and of the dispatch that made the handle, which the call must have too
    token_sizes: the last arguments of Config.ring_shape; zero_copy: there are no rings
    A program for DeepEP may give a config whose rings would fit there, and do not here: it gets fewer slots.
    """
    num_ranks, num_nvl_bytes = memory.num_ranks, memory.num_nvl_bytes
    config = given
    if given is None:
        config = Config(num_sms, ZERO_COPY_CHUNK) if zero_copy else table_config(table, num_sms, num_ranks)
    if not isinstance(config, Config):
        refuse("config", type(config).__name__, "an nbep.Config or None")
    if config.num_sms < 2 or config.num_sms % 2 != 0:
        refuse("config.num_sms", config.num_sms, "even and at least 2")
    threads = config.num_threads
    if threads is not None and (threads % (32 * num_ranks) != 0 or not min_threads <= threads <= MAX_RING_THREADS):
        allowed = f"a multiple of {32 * num_ranks} (a warp a rank) from {min_threads} to {MAX_RING_THREADS}"
        refuse("config.num_threads", threads, allowed)
    if of_handle and config.num_sms != num_sms:
        refuse("config.num_sms", config.num_sms, f"{num_sms}, as in the dispatch that made the handle")
    shape = config.ring_shape(num_ranks, *token_sizes)
    if zero_copy:
        return config, shape
    if given is None or (memory.is_deep_eps and num_nvl_bytes >= deep_ep_bytes(shape)):
        config = fit_config(config, num_nvl_bytes, num_ranks, *token_sizes)
        shape = config.ring_shape(num_ranks, *token_sizes)
    needed = num_nvl_bytes_needed(shape)
    if needed > num_nvl_bytes:
        raise ValueError(
            f"num_nvl_bytes: got {num_nvl_bytes} at construction; must be at least {needed} for "
            f"{shape.num_channels} channels of {shape.num_slots} slots from {num_ranks} ranks, "
            f"{shape.hidden_bytes} bytes a token"
        )
    return config, shape
