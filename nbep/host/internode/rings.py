"""The rings of one call between nodes, at both levels, and whether a buffer has room for them.

Dispatch has an NVL ring for each rank of the node; combine one for each rank of the group, each with as many slots as a
node's share of num_max_nvl_chunked_recv_tokens (see layout.internode).

Source: DeepEP csrc/kernels/internode.cu, get_nvl_clean_meta; combine (num_max_nvl_chunked_recv_tokens_per_rdma)
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from nbep.device.layout.internode import num_meta_words, num_nvl_bytes_needed_between_nodes, num_rdma_bytes_needed
from nbep.device.layout.intranode import RingShape
from nbep.host.arguments import refuse


class Rings(NamedTuple):
    """Shapes of the rings at both levels."""

    nvl: RingShape
    rdma: RingShape
    num_rdma_ranks: int
    num_nvl_ranks: int

    @property
    def num_nvl_bytes(self) -> int:
        return num_nvl_bytes_needed_between_nodes(self.nvl, self.num_rdma_ranks, self.num_nvl_ranks)

    @property
    def num_rdma_bytes(self) -> int:
        return num_rdma_bytes_needed(self.rdma)


class RingSlots(Protocol):
    """What a Config says of rings."""

    @property
    def num_channels(self) -> int: ...
    @property
    def num_max_nvl_chunked_send_tokens(self) -> int: ...
    @property
    def num_max_nvl_chunked_recv_tokens(self) -> int: ...
    @property
    def num_max_rdma_chunked_recv_tokens(self) -> int: ...


def dispatch_rings(
    config: RingSlots, num_rdma_ranks: int, num_nvl_ranks: int, hidden_bytes: int, num_topk: int, num_scales: int
) -> Rings:
    """Of a dispatch."""
    meta = num_meta_words(num_rdma_ranks)
    slot = hidden_bytes, num_topk, num_scales, meta
    nvl = RingShape(num_nvl_ranks, config.num_channels, config.num_max_nvl_chunked_recv_tokens, *slot)
    rdma = RingShape(num_rdma_ranks, config.num_channels, config.num_max_rdma_chunked_recv_tokens, *slot)
    return Rings(nvl, rdma, num_rdma_ranks, num_nvl_ranks)


def combine_rings(
    config: RingSlots, num_rdma_ranks: int, num_nvl_ranks: int, hidden_bytes: int, num_topk: int
) -> Rings:
    """Of a combine."""
    slot = hidden_bytes, num_topk, 0, 0
    num_slots = max(1, config.num_max_nvl_chunked_recv_tokens // num_rdma_ranks)
    nvl = RingShape(num_rdma_ranks * num_nvl_ranks, config.num_channels, num_slots, *slot)
    rdma = RingShape(num_rdma_ranks, config.num_channels, config.num_max_rdma_chunked_recv_tokens, *slot)
    return Rings(nvl, rdma, num_rdma_ranks, num_nvl_ranks)


def check_rings(config: RingSlots, rings: Rings, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
    """Raises: ValueError if an NVL ring, which nodes share in combine, has no room for a chunk, or a buffer none"""
    if config.num_max_nvl_chunked_send_tokens > rings.nvl.num_slots:
        refuse(
            "config.num_max_nvl_chunked_send_tokens",
            config.num_max_nvl_chunked_send_tokens,
            f"at most {rings.nvl.num_slots} in combine, a node's share of num_max_nvl_chunked_recv_tokens "
            f"({config.num_max_nvl_chunked_recv_tokens})",
        )
    for name, given, needed, shape in (
        ("num_nvl_bytes", num_nvl_bytes, rings.num_nvl_bytes, rings.nvl),
        ("num_rdma_bytes", num_rdma_bytes, rings.num_rdma_bytes, rings.rdma),
    ):
        if needed > given:
            raise ValueError(
                f"{name}: got {given} at construction; must be at least {needed} for {shape.num_channels} channels of "
                f"{shape.num_slots} slots from {shape.num_ranks} {'ranks' if name == 'num_nvl_bytes' else 'nodes'}, "
                f"{shape.hidden_bytes} bytes a token"
            )
