"""Launches inside a node in a trace, with rings and without, and how all modes call the cells that hold tokens.

Where the kernel's code says what a thread is there for, that code is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any, NamedTuple

from nbep.device.kernels.intranode.cached_notify import NO_MORE
from nbep.device.kernels.intranode.dispatch import DispatchSizes, join_team
from nbep.device.layout.intranode import Header, RingShape, header_bytes, locate_header
from nbep.emulator.machine.carrier import CURRENT
from nbep.lab.trace.events import Cell, Token
from nbep.lab.trace.view import LaunchView, Role, is_described

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


def _as_thread(launch: Any, block: int, thread: int, function: Callable, *args: Any) -> Any:
    """What a function of device code returns that asks for nothing but the numbers of its thread."""
    stand_in = SimpleNamespace(block_dim=launch.block, block_idx=block, thread_idx=thread)
    context = copy_context()
    context.run(CURRENT.set, stand_in)
    return context.run(function, *args)


def role_of(launch: Any, block: int, thread: int) -> str:
    """The role of a thread of a running launch; the kernel's name where all threads do the same."""
    args = {type(arg): arg for arg in launch.args}
    if launch.name == "dispatch" and DispatchSizes in args:
        shape, sizes = args[RingShape], args[DispatchSizes]
        team = _as_thread(launch, block, thread, join_team, shape.num_ranks, sizes.mix_roles)
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
