"""How many SMs a call uses and how large its chunks and rings are; default tables and DeepEP's size hints.

Source: DeepEP csrc/config.hpp; deep_ep/buffer.py, get_dispatch_config and get_combine_config
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from nbep.device.layout.internode import num_meta_words, num_nvl_bytes_needed_between_nodes, num_rdma_bytes_needed
from nbep.device.layout.intranode import (
    ALIGNMENT_BYTES,
    MAX_NVL_PEERS,
    MAX_TOPK,
    RingShape,
    align_up,
    num_nvl_bytes_needed,
)
from nbep.host.arguments import flags, integer, refuse
from nbep.host.target.memory import HandleType

# What the size hints reserve for each token in a ring.
HINT_TOPK = 128
HINT_SCALES = 128
SOURCE_META_BYTES = 8  # internode: the source's RDMA rank and a mask of NVLink ranks, s32 each
INT4_BYTES = 16


class Sizes(NamedTuple):
    """What the memory of a buffer is made for, the same on all ranks; see Buffer."""

    num_nvl_bytes: int
    handle_type: HandleType = "ipc"
    num_rdma_bytes: int = 0
    num_zero_copy_bytes: int = 0
    low_latency_mode: bool = False
    enable_shrink: bool = False
    check_calls: bool = False
    low_latency_num_sms: int = 0


class Rings(NamedTuple):
    """Shapes of the rings of one call between nodes, at both levels.

    Dispatch has an NVL ring for each rank of the node; combine one for each rank of the group, each with as many slots
    as a node's share of num_max_nvl_chunked_recv_tokens (see layout.internode).

    Source: DeepEP csrc/kernels/internode.cu, get_nvl_clean_meta; combine (num_max_nvl_chunked_recv_tokens_per_rdma)
    """

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


@dataclass(frozen=True)
class Config:
    """Performance settings of one dispatch or combine. All ranks must use the same num_sms and ring slots.

    Args:
        num_sms: blocks of the launch: two for each channel, one sends and one receives
        num_max_nvl_chunked_send_tokens: tokens that a sender pushes before it moves the tail of a ring
        num_max_nvl_chunked_recv_tokens: slots of a ring
        num_max_rdma_chunked_send_tokens: the same between nodes
        num_max_rdma_chunked_recv_tokens: the same between nodes; rounded up to a multiple of the send size
        num_threads: threads of a block, a multiple of 32; None: what suits the target
        mix_roles: dispatch: False: even blocks send and odd ones receive, as DeepEP's; True: all do both; None: what
            suits the target

    Raises:
        ValueError: if a setting is no integer or out of range
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256
    num_threads: int | None = field(default=None, kw_only=True)
    mix_roles: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, minimum in (
            ("num_sms", 0),
            ("num_max_nvl_chunked_send_tokens", 1),
            ("num_max_nvl_chunked_recv_tokens", 1),
            ("num_max_rdma_chunked_send_tokens", 1),
            ("num_max_rdma_chunked_recv_tokens", 1),
        ):
            object.__setattr__(self, name, integer(name, getattr(self, name), minimum))
        if self.num_max_nvl_chunked_send_tokens >= self.num_max_nvl_chunked_recv_tokens:
            allowed = f"less than num_max_nvl_chunked_recv_tokens ({self.num_max_nvl_chunked_recv_tokens})"
            refuse("num_max_nvl_chunked_send_tokens", self.num_max_nvl_chunked_send_tokens, allowed)
        send_tokens = self.num_max_rdma_chunked_send_tokens
        recv_tokens = align_up(self.num_max_rdma_chunked_recv_tokens, send_tokens)
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", recv_tokens)
        # The RDMA receiver moves its head late, so a sender needs room for two chunks.
        if send_tokens > recv_tokens // 2:
            allowed = f"at most half of num_max_rdma_chunked_recv_tokens ({recv_tokens})"
            refuse("num_max_rdma_chunked_send_tokens", send_tokens, allowed)
        if self.mix_roles is not None:
            flags(mix_roles=self.mix_roles)
        if self.num_threads is not None:
            num_threads = integer("num_threads", self.num_threads)
            if num_threads <= 0 or num_threads % 32 != 0:
                refuse("num_threads", num_threads, "a positive multiple of 32, or None")
            object.__setattr__(self, "num_threads", num_threads)

    @property
    def num_channels(self) -> int:
        return self.num_sms // 2

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, *, num_nvl_peers: int | None = None) -> int:
        """num_nvl_bytes that serve any dispatch and combine of this config: DeepEP's number, or ours if larger.

        Above 4 GiB, only on GPUs.

        Args:
            hidden_bytes: bytes of one token's row, in dispatch or in combine, whichever has more
            num_ranks: ranks in the group
            num_nvl_peers: ranks of a node. None: 8, or all if they are fewer

        Raises:
            ValueError: if num_ranks is above 8 and no multiple of 8, or num_nvl_peers does not divide it; if there
                are several nodes while num_sms is odd
        """
        hidden_bytes, num_rdma_ranks, num_nvl_ranks = _hint_arguments(self, hidden_bytes, num_ranks, num_nvl_peers)
        num_rings = self.num_channels * num_nvl_ranks
        num_slots = num_rings * self.num_max_nvl_chunked_recv_tokens
        token_bytes = hidden_bytes + SOURCE_META_BYTES + HINT_TOPK * (8 + 4) + HINT_SCALES * 4
        num_bytes = num_rings * (2 * num_rdma_ranks + 3) * 4 + num_slots * token_bytes
        if num_rdma_ranks > 1:
            needed = max(
                rings.num_nvl_bytes for rings in self._largest_rings(hidden_bytes, num_rdma_ranks, num_nvl_ranks)
            )
        else:
            needed = num_nvl_bytes_needed(self.ring_shape(num_nvl_ranks, hidden_bytes, MAX_TOPK, HINT_SCALES, 1))
        return align_up(max(num_bytes, needed), ALIGNMENT_BYTES)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, *, num_nvl_peers: int | None = None) -> int:
        """num_rdma_bytes that serve any dispatch and combine of this config; 0 inside a node.

        Args, Raises: as get_nvl_buffer_size_hint
        """
        hidden_bytes, num_rdma_ranks, num_nvl_ranks = _hint_arguments(self, hidden_bytes, num_ranks, num_nvl_peers)
        if num_rdma_ranks == 1:
            return 0
        num_rings = self.num_channels * num_rdma_ranks
        num_slots = num_rings * self.num_max_rdma_chunked_recv_tokens
        token_bytes = hidden_bytes + SOURCE_META_BYTES + HINT_TOPK * (8 + 4) + HINT_SCALES * 4 + INT4_BYTES
        num_bytes = 2 * (num_rings * (2 * num_nvl_ranks + 2) * 4 + num_slots * token_bytes)
        needed = max(rings.num_rdma_bytes for rings in self._largest_rings(hidden_bytes, num_rdma_ranks, num_nvl_ranks))
        return align_up(max(num_bytes, needed), ALIGNMENT_BYTES)

    def _largest_rings(self, hidden_bytes: int, num_rdma_ranks: int, num_nvl_ranks: int) -> tuple[Rings, Rings]:
        """Of a dispatch and of a combine between nodes with all that a token can take along."""
        nodes = num_rdma_ranks, num_nvl_ranks
        return (
            dispatch_rings(self, *nodes, hidden_bytes, MAX_TOPK, HINT_SCALES),
            combine_rings(self, *nodes, hidden_bytes, MAX_TOPK),
        )

    def ring_shape(
        self, num_ranks: int, hidden_bytes: int, num_topk: int, num_scales: int, num_src_idx: int
    ) -> RingShape:
        """The rings that this config asks for inside a node, for tokens with rows and notes of these sizes."""
        num_slots = self.num_max_nvl_chunked_recv_tokens
        return RingShape(num_ranks, self.num_channels, num_slots, hidden_bytes, num_topk, num_scales, num_src_idx)


def _hint_arguments(
    config: Config, hidden_bytes: int, num_ranks: int, num_nvl_peers: int | None
) -> tuple[int, int, int]:
    """hidden_bytes, nodes, and ranks of a node."""
    hidden_bytes, num_ranks = integer("hidden_bytes", hidden_bytes, 0), integer("num_ranks", num_ranks, 1)
    if num_nvl_peers is None:
        size = min(num_ranks, MAX_NVL_PEERS)
        if num_ranks % size != 0:
            refuse("num_ranks", num_ranks, f"at most {MAX_NVL_PEERS}, or a multiple of it, without num_nvl_peers")
    else:
        size = integer("num_nvl_peers", num_nvl_peers, 1)
        if size > MAX_NVL_PEERS or num_ranks % size != 0:
            refuse("num_nvl_peers", size, f"1 to {MAX_NVL_PEERS}, and divide num_ranks ({num_ranks})")
    num_nodes = num_ranks // size
    if num_nodes > 1 and config.num_sms % 2 != 0:
        refuse("num_sms", config.num_sms, "even between nodes")
    return hidden_bytes, num_nodes, size


def dispatch_rings(
    config: Config, num_rdma_ranks: int, num_nvl_ranks: int, hidden_bytes: int, num_topk: int, num_scales: int
) -> Rings:
    """Of a dispatch."""
    meta = num_meta_words(num_rdma_ranks)
    slot = hidden_bytes, num_topk, num_scales, meta
    nvl = RingShape(num_nvl_ranks, config.num_channels, config.num_max_nvl_chunked_recv_tokens, *slot)
    rdma = RingShape(num_rdma_ranks, config.num_channels, config.num_max_rdma_chunked_recv_tokens, *slot)
    return Rings(nvl, rdma, num_rdma_ranks, num_nvl_ranks)


def combine_rings(config: Config, num_rdma_ranks: int, num_nvl_ranks: int, hidden_bytes: int, num_topk: int) -> Rings:
    """Of a combine."""
    slot = hidden_bytes, num_topk, 0, 0
    num_slots = max(1, config.num_max_nvl_chunked_recv_tokens // num_rdma_ranks)
    nvl = RingShape(num_rdma_ranks * num_nvl_ranks, config.num_channels, num_slots, *slot)
    rdma = RingShape(num_rdma_ranks, config.num_channels, config.num_max_rdma_chunked_recv_tokens, *slot)
    return Rings(nvl, rdma, num_rdma_ranks, num_nvl_ranks)


class Table(NamedTuple):
    """Default settings, by num_ranks.

    in_node      tokens of a chunk with up to 16 SMs, up to 20, and more; rings have IN_NODE_SLOTS slots
    over_nodes   NVLink send and receive tokens, RDMA send and receive tokens
    two_of_two   NVLink and RDMA send tokens with 2 nodes of 2; slots as with 2 nodes of 8
    """

    in_node: dict[int, tuple[int, int, int]]
    over_nodes: dict[int, tuple[int, int, int, int]]
    two_of_two: tuple[int, int]


# Inside a node: from runs of `nbep bench intranode`, see records/measured.md. Between nodes: DeepEP's, but for 2 nodes
# of 2, which are from runs of `nbep bench internode`: there a ring has many warps, and so a chunk takes many tokens.
IN_NODE_SLOTS = 256
DISPATCH_TABLE = Table(
    in_node={2: (48, 48, 48), 4: (32, 24, 12), 8: (48, 12, 6)},
    over_nodes={
        16: (36, 288, 20, 128),
        24: (8, 288, 32, 128),
        32: (32, 288, 32, 128),
        48: (32, 288, 8, 128),
        64: (20, 288, 28, 128),
        96: (20, 480, 12, 128),
        128: (20, 560, 32, 128),
        144: (32, 720, 12, 128),
        160: (28, 720, 12, 128),
    },
    two_of_two=(64, 8),
)
COMBINE_TABLE = Table(
    in_node={2: (12, 12, 12), 4: (24, 12, 12), 8: (18, 6, 3)},
    over_nodes={
        16: (4, 288, 12, 128),
        24: (1, 288, 8, 128),
        32: (1, 288, 8, 128),
        48: (1, 288, 8, 128),
        64: (1, 288, 20, 128),
        96: (1, 480, 8, 128),
        128: (1, 560, 12, 128),
        144: (2, 720, 8, 128),
        160: (2, 720, 8, 128),
    },
    two_of_two=(32, 8),
)


def table_config(table: Table, num_sms: int, num_ranks: int) -> Config:
    """The recommended config for a rank count.

    Raises:
        ValueError: if the table has no entry for it
    """
    num_ranks = integer("num_ranks", num_ranks, 1)
    if num_ranks in table.in_node:
        few, some, many = table.in_node[num_ranks]
        return Config(num_sms, few if num_sms <= 16 else some if num_sms <= 20 else many, IN_NODE_SLOTS, 6, 128)
    if num_ranks in table.over_nodes:
        return Config(num_sms, *table.over_nodes[num_ranks])
    known = ", ".join(map(str, (*table.in_node, *table.over_nodes)))
    raise ValueError(f"num_ranks: got {num_ranks}; must be one of {known}")


ZERO_COPY_CHUNK = 8  # rows that combine with zero_copy pushes before it says so


def nodes_config(table: Table, num_sms: int, num_nodes: int, num_nvl_ranks: int) -> Config:
    """The config for so many nodes: that of the table's next larger number, or of its largest."""
    known = sorted(table.over_nodes)
    num_ranks = next((ranks for ranks in known if ranks >= MAX_NVL_PEERS * num_nodes), known[-1])
    nvl_chunk, nvl_slots, rdma_chunk, rdma_slots = table.over_nodes[num_ranks]
    if num_nodes == num_nvl_ranks == 2:
        nvl_chunk, rdma_chunk = table.two_of_two
    return Config(num_sms, nvl_chunk, nvl_slots, rdma_chunk, rdma_slots)


def deep_ep_bytes(shape: RingShape) -> int:
    """What DeepEP's rings of this shape take. Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch"""
    num_rings = shape.num_channels * shape.num_ranks
    slot = shape.hidden_bytes + 4 + 12 * shape.num_topk + 4 * shape.num_scales
    return 4 * shape.num_ranks**2 + num_rings * (4 * 4 + shape.num_slots * slot)


def most_that_fit(fewest: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to most that fits, if all below one that fits do too; the fewest are not asked."""
    if fits(most):
        return most
    while most - fewest > 1:
        middle = (fewest + most) // 2
        fewest, most = (middle, most) if fits(middle) else (fewest, middle)
    return fewest


def fit_config(config: Config, num_nvl_bytes: int, num_ranks: int, *token_sizes: int) -> Config:
    """The config with as many ring slots as the buffer holds, if it holds fewer. For default configs only.

    token_sizes: as the last arguments of `Config.ring_shape`

    Every rank comes to the same answer, because num_nvl_bytes and the size of a token are the same on all.
    A chunk for which a ring is too small becomes half a ring. If not even two slots fit, the rings have two: the caller
    finds the buffer too small, and says how many bytes are enough.
    """

    def fits(num_slots: int) -> bool:
        shape = config.ring_shape(num_ranks, *token_sizes)
        return num_nvl_bytes_needed(shape._replace(num_slots=num_slots)) <= num_nvl_bytes

    slots = most_that_fit(2, config.num_max_nvl_chunked_recv_tokens, fits)
    if slots == config.num_max_nvl_chunked_recv_tokens:
        return config
    chunk = config.num_max_nvl_chunked_send_tokens
    return replace(
        config,
        num_max_nvl_chunked_send_tokens=chunk if chunk < slots else slots // 2,
        num_max_nvl_chunked_recv_tokens=slots,
    )


def fit_rings(
    config: Config, rings_of: Callable[[Config], Rings], num_nvl_bytes: int, num_rdma_bytes: int, num_nodes: int
) -> Config:
    """The config with as many ring slots as the buffers hold, if they hold fewer. For default configs only.

    num_nodes: which share an NVL ring's slots in combine; 1 in dispatch. A chunk for which a ring is too small becomes
    smaller too. If not even the fewest slots fit, the caller finds the buffer too small.
    """

    def with_nvl(slots: int) -> Config:
        chunk = min(config.num_max_nvl_chunked_send_tokens, max(1, slots // (2 * num_nodes)))
        return replace(
            config, num_max_nvl_chunked_recv_tokens=max(slots, chunk + 1), num_max_nvl_chunked_send_tokens=chunk
        )

    def with_rdma(slots: int) -> Config:
        chunk = max(1, min(config.num_max_rdma_chunked_send_tokens, slots // 2))
        slots = slots // chunk * chunk  # the config rounds up
        return replace(config, num_max_rdma_chunked_recv_tokens=slots, num_max_rdma_chunked_send_tokens=chunk)

    nvl = config.num_max_nvl_chunked_recv_tokens
    slots = most_that_fit(max(2, num_nodes), nvl, lambda n: rings_of(with_nvl(n)).num_nvl_bytes <= num_nvl_bytes)
    config = config if slots == nvl else with_nvl(slots)
    rdma = config.num_max_rdma_chunked_recv_tokens
    slots = most_that_fit(2, rdma, lambda n: rings_of(with_rdma(n)).num_rdma_bytes <= num_rdma_bytes)
    return config if slots == rdma else with_rdma(slots)
