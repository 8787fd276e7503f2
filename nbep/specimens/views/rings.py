"""Launches inside a node and between nodes in a trace, with rings and without, and how all modes call the cells that
hold tokens. Where the kernel's code says what a thread is there for, that code is asked.
"""

from __future__ import annotations

import re
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, NamedTuple

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
from nbep.device.kernels.intranode.cached_notify import NO_MORE
from nbep.device.kernels.intranode.dispatch import DispatchSizes, join_team
from nbep.device.layout.internode import (
    bits_shift,
    bits_word,
    cells_bytes,
    num_nvl_bytes_needed_between_nodes,
    num_rdma_bytes_needed,
    rings_offset,
)
from nbep.device.layout.intranode import RINGS, Header, RingShape, header_bytes, locate_header
from nbep.device.layout.names import describe_nvl_offset, describe_rdma_offset
from nbep.device.protocols.peers import Peers
from nbep.emulator.machine.carrier import CURRENT
from nbep.lab.trace.events import Cell, Token
from nbep.lab.trace.view import LaunchView, Role, function_of, is_described

# Of the RDMA buffer between nodes: `recv x[channel 0, node 1, slot 2] + 0`, `count message recv[0, node 1] word 0`.
_MESSAGE = re.compile(r"(count message) recv\[(\d+), node (\d+)\] word (\d+)")
OUTPUTS = ("recv_x", "combined_x")  # what kernels write tokens to; a row is a cell
TOKENS = ("x", "message", "count message", "row", *OUTPUTS)  # their first bytes are recorded
KEPT = tuple(f"send {name}" for name in (*Header._fields, "x", "padding"))  # in a rank's own buffer, for its NIC
DIRECT_HEADER = ("recv_src_idx", "recv_topk_idx", "recv_topk_weights", "recv_x_scales")  # without rings
PAYLOAD = (*Header._fields, "padding", *DIRECT_HEADER, *TOKENS, *KEPT)
WITHOUT_RINGS = ("direct_dispatch", "direct_combine")


def head_in_words(value: int) -> str | None:
    """Where nothing more can come, a head of combine is past every tail."""
    return "past the last" if value >= NO_MORE else None


def parse(rank: int, text: str) -> Cell | None:
    """The cell that a layout describes so."""
    message = _MESSAGE.match(text)
    if message is not None:
        name, place, node, word = message.groups()
        return Cell(rank, text, name, slot=int(place), byte=4 * int(word), node=int(node))
    if text.startswith("send "):
        cell = Cell.parse(rank, text.removeprefix("send "))
        return cell._replace(text=text, name=f"send {cell.name}")
    cell = Cell.parse(rank, text.removeprefix("recv "))
    return cell._replace(words=head_in_words) if cell.name == "head" else cell


class RingNotes(NamedTuple):
    """The rings that a launch was given. Between nodes shape is that of the NVL rings.

    rdma_shape, num_nvl_ranks: between nodes: of the RDMA rings; ranks of a node
    """

    shape: RingShape | None
    rdma_shape: RingShape | None = None
    num_nvl_ranks: int = 0


NO_RINGS = RingNotes(None)


class RingLaunch(LaunchView):
    """A launch inside a node."""

    def __init__(self, launch: Any):
        self.launch = launch
        self.shape: RingShape | None = next((arg for arg in launch.args if isinstance(arg, RingShape)), None)
        self.header_bytes = 0 if self.shape is None else header_bytes(self.shape)
        self.notes = RingNotes(self.shape)
        self._roles: dict[tuple[int, int], str] = {}

    @classmethod
    def of(cls, launch: Any) -> RingLaunch | None:
        """None if the launch is of other kernels."""
        has_rings = any(isinstance(arg, RingShape) for arg in launch.args)
        return cls(launch) if has_rings or launch.name in WITHOUT_RINGS else None

    def role(self, thread: Any) -> Role:
        place = thread.block_idx, thread.thread_idx
        if place not in self._roles:
            self._roles[place] = role_of(self.launch, *place)
        return Role(self._roles[place])

    def has_cells(self, allocation: Any) -> bool:
        return self._has_rows(allocation) or super().has_cells(allocation)

    def _has_rows(self, allocation: Any) -> bool:
        """Whether it is an output that a kernel with rings writes."""
        return self.shape is not None and self.shape.hidden_bytes > 0 and allocation.name in OUTPUTS

    def cell(self, allocation: Any, offset: int, thread: Any, is_weak: bool) -> Cell | None:
        if self.shape is None or is_described(allocation) or not self._has_rows(allocation):
            return super().cell(allocation, offset, thread, is_weak)
        row, byte = divmod(offset, self.shape.hidden_bytes)
        return Cell(allocation.rank, f"{allocation.name}[row {row}]", allocation.name, byte=byte, row=row)

    def token(self, cell: Cell, data: bytes) -> Token | None:
        if self.launch.name != "dispatch" or self.shape is None or self.shape.num_src_idx == 0:
            return None
        index = locate_header(self.header_bytes, self.shape).src_idx
        return Token(cell.src, int.from_bytes(data[index : index + 4], "little"), (cell.owner,))


def role_of(launch: Any, block: int, thread: int) -> str:
    """The role of a thread of a running launch; the kernel's name where all threads do the same."""
    args = {type(arg): arg for arg in launch.args}
    if launch.name == "dispatch" and DispatchSizes in args:
        shape, sizes = args[RingShape], args[DispatchSizes]
        context = copy_context()  # in which device code runs that asks for nothing but the numbers of its thread
        context.run(CURRENT.set, SimpleNamespace(block_dim=launch.block, block_idx=block, thread_idx=thread))
        team = context.run(join_team, shape.num_ranks, sizes.mix_roles)
        if team.peer == launch.rank:
            return "copier"
        return "sender" if team.sends else "receiver"
    if launch.name == "combine":
        if block % 2 == 0:
            return "sender"
        return "coordinator" if thread < 32 else "receiver"
    if launch.name == "direct_dispatch":
        return "sender"
    if launch.name == "direct_combine":
        return "receiver"
    return launch.name


# The mode between nodes
#
# NVL buffer     tail, head, x[channel, src]           as inside a node; src: see layout.internode
# RDMA buffer    tail, head[channel, node], x[channel, node, slot], arrived[node], count message[place, node]
# shared memory  board[channel, which warp or team, which node, local rank or its sums]
#
# Each role has a function, in which its threads are from the beginning to the end. So that function says the role, and
# its arguments say which peer a team serves.


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
            name, arguments = frame.f_code.co_name, frame.f_locals
            team = arguments["group"].node if "group" in arguments else -1
            if name in ("forward_tokens", "deliver_tokens", "receive_tokens"):
                team = arguments["team"].peer
            self._named[place] = Role(roles[name], team)
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
