"""Launches of the mode between nodes in a trace: what their threads are there for, and how their cells are called.

 NVL buffer     tail, head, x[channel, src]           as inside a node; src: see layout.internode
 RDMA buffer    tail, head[channel, node], x[channel, node, slot], arrived[node], count message[place, node]
 shared memory  board[channel, which warp or team, which node, local rank or its sums]

Each role has a function, in which its threads are from the beginning to the end. So that function says the role, and
its arguments say which peer a team serves.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

from nbep.device.kernels.internode.arguments import (
    BOARD,
    BOARD_ROW,
    MOST_WARPS,
    SUMS_WORD,
)
from nbep.device.kernels.internode.cached_notify import CachedSizes
from nbep.device.kernels.internode.combine import InternodeCombineSizes
from nbep.device.kernels.internode.dispatch import InternodeDispatchSizes
from nbep.device.kernels.internode.notify_dispatch import InternodeNotifySizes
from nbep.device.layout.internode import (
    bits_shift,
    bits_word,
    cells_bytes,
    num_nvl_bytes_needed_between_nodes,
    num_rdma_bytes_needed,
    rings_offset,
)
from nbep.device.layout.intranode import RINGS, RingShape, header_bytes, locate_header
from nbep.device.layout.names import describe_nvl_offset, describe_rdma_offset
from nbep.device.protocols.peers import Peers
from nbep.lab.trace.events import Cell, Token
from nbep.lab.trace.view import Role, function_of
from nbep.specimens.views.intranode import RingLaunch, RingNotes, parse

DISPATCH = "internode_dispatch"
COMBINE = "internode_combine"
RDMA_BUFFER, NVL_BUFFER = "rdma_buffer", "nvl_buffer"
SIZES = (InternodeNotifySizes, CachedSizes, InternodeDispatchSizes, InternodeCombineSizes)
ROLES = {
    DISPATCH: {
        "send_tokens": "RDMA sender",
        "coordinate_senders": "sender coordinator",
        "forward_tokens": "forwarder",
        "deliver_tokens": "deliverer",
        "coordinate_forwarders": "forwarder coordinator",
        "receive_tokens": "NVL receiver",
    },
    COMBINE: {
        "send_rows": "NVL sender",
        "publish_nvl_heads": "NVL coordinator",
        "forward_sums": "forwarder",
        "coordinate_sums": "RDMA coordinator",
        "receive_sums": "RDMA receiver",
        "coordinate_receivers": "receiver coordinator",
    },
}


class InternodeLaunch(RingLaunch):
    """One launch of the mode between nodes."""

    def __init__(self, launch: Any, peers: Peers, cells: int):
        super().__init__(launch)
        self.kernel = launch.name
        self.num_nvl_ranks = int(peers.num_ranks)
        self.num_rdma_ranks = launch.world.num_ranks // self.num_nvl_ranks
        shapes = [arg for arg in launch.args if isinstance(arg, RingShape)]
        self.nvl: RingShape | None = shapes[0] if len(shapes) == 2 else None
        self.rdma: RingShape | None = shapes[1] if len(shapes) == 2 else None
        self.notes = RingNotes(self.shape, self.rdma, self.num_nvl_ranks)
        self._cells = cells
        self._named: dict[tuple[int, int], Role] = {}

    @classmethod
    def of(cls, launch: Any) -> InternodeLaunch | None:
        """None if the launch is of another mode."""
        sizes = next((arg for arg in launch.args if isinstance(arg, SIZES)), None)
        if sizes is None:
            return None
        return cls(launch, next(arg for arg in launch.args if isinstance(arg, Peers)), int(sizes.cells))

    def role(self, thread: Any) -> Role:
        """What a thread is there for; the kernel's name as long as it has not begun with it.

        team: the local rank, in combine the node, that a forwarder, a deliverer or an NVL receiver serves
        """
        place = (thread.block_idx, thread.thread_idx)
        if place not in self._named:
            roles = ROLES.get(self.kernel, {})
            frame = function_of(thread, roles)
            if frame is None:
                return Role(self.kernel)
            self._named[place] = Role(roles[frame.f_code.co_name], _team_of(frame))
        return self._named[place]

    def cell(self, allocation: Any, offset: int, thread: Any, is_weak: bool) -> Cell | None:
        found = self._own_cell(allocation, offset, thread.block_idx)
        return super().cell(allocation, offset, thread, is_weak) if found is None else found

    def _own_cell(self, allocation: Any, offset: int, block: int) -> Cell | None:
        """A cell of the buffers or of a block's board; None if it is nothing that this launch has names for."""
        if allocation.number == 0:
            return self._board_cell(allocation, offset - BOARD, block)
        if allocation.name == RDMA_BUFFER:
            in_slots = self.rdma is not None and offset < num_rdma_bytes_needed(self.rdma)
            num_cells_bytes = cells_bytes(self.num_rdma_ranks, self.num_rdma_ranks * self.num_nvl_ranks)
            if in_slots or 0 <= offset - self._cells < num_cells_bytes:
                text = describe_rdma_offset(self.rdma, self.num_rdma_ranks, self._cells, offset)
                return parse(allocation.rank, text)
        if allocation.name == NVL_BUFFER and self.nvl is not None:
            nodes = self.num_rdma_ranks, self.num_nvl_ranks
            begin, end = rings_offset(*nodes) + RINGS, num_nvl_bytes_needed_between_nodes(self.nvl, *nodes)
            if begin <= offset < end:
                return parse(allocation.rank, describe_nvl_offset(self.nvl, *nodes, offset))
        return None

    def token(self, cell: Cell, data: bytes) -> Token | None:
        """Which token a slot of dispatch is filled with, header and all: its source meta says it."""
        if self.kernel != DISPATCH or self.rdma is None or cell.name != "x":
            return None
        meta = locate_header(header_bytes(self.rdma), self.rdma).src_idx

        def word(i: int) -> int:
            return int.from_bytes(data[meta + 4 * i : meta + 4 * i + 4], "little")

        nvl_rank = cell.owner % self.num_nvl_ranks if cell.node >= 0 else cell.src
        destinations = tuple(
            node * self.num_nvl_ranks + k
            for node in range(self.num_rdma_ranks)
            for k in range(self.num_nvl_ranks)
            if word(bits_word(node)) >> (bits_shift(node) + k) & 1
        )
        return Token(word(1) * self.num_nvl_ranks + nvl_rank, word(0), destinations)

    def _board_cell(self, allocation: Any, offset: int, block: int) -> Cell | None:
        if self.kernel not in ROLES or not 0 <= offset < MOST_WARPS * BOARD_ROW:
            return None
        row, column = divmod(offset, BOARD_ROW)
        column //= 4
        if self.kernel == DISPATCH:
            where = f"{'sender' if block % 2 else 'team'} {row}, node {column}"
        elif block % 2:
            where = f"receiver {row}, node {column}"
        else:
            where = f"forwarder {row}, {'sums' if column == SUMS_WORD else f'local rank {column}'}"
        return Cell(allocation.rank, f"board[channel {block // 2}, {where}]", "board", channel=block // 2, slot=-1)


def _team_of(frame: FrameType) -> int:
    arguments = frame.f_locals
    if frame.f_code.co_name in ("forward_tokens", "deliver_tokens", "receive_tokens"):
        return arguments["team"].peer
    return arguments["group"].node if "group" in arguments else -1
