"""Low-latency launches in a trace: which call they belong to, what their threads are there for, how cells are called.

 counts      in dispatch [half, local expert, src], in combine [half, expert]
 arrivals    [half, rank], with deduplicate only
 credits     [half, rank]
 message     of dispatch, in the half that a peer puts it in: [half, local expert, src, slot]; with deduplicate without
             the expert
 row         of combine: [half, expert, token]; with deduplicate [half, rank, token]
 slots       [half, expert], with deduplicate also [half, rank]; state, mask: of the rank's workspace too
 recv_x      [local expert, row]

A warp has one role after the other: it counts, sends, receives. So the function that it is in says its role.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.device.kernels.low_latency.arguments import (
    BOTH_PHASES,
    NO_PHASE,
    RECV_PHASE,
    SEND_PHASE,
    Call,
)
from nbep.device.kernels.low_latency.calls import ComparedCall
from nbep.device.kernels.parts.arrivals import LEAST_ABSENT, TAG
from nbep.device.layout.low_latency import (
    BARRIER_SIGNALS,
    CALLS,
    COUNTS_BYTES,
    CREDITS,
    MAX_EXPERTS,
    NUM_HALVES,
    LowLatencyShape,
    header_offset,
    message_stride,
    payload_bytes,
    quarter_bytes,
    row_stride,
)
from nbep.device.layout.names import describe_low_latency_offset, place_of_count, row_of_cell
from nbep.host.low_latency.memory import describe_workspace, slot_at, workspace_at
from nbep.lab.trace.events import Cell, Token
from nbep.lab.trace.view import LaunchView, Role, function_of
from nbep.specimens.views.rings import NO_RINGS, OUTPUTS

BUFFER = "rdma_buffer"
WORKSPACE = "low-latency workspace"
DISPATCH = "low_latency_dispatch"
PHASES = {NO_PHASE: "free", SEND_PHASE: "send", RECV_PHASE: "receive", BOTH_PHASES: "send and receive"}
ROLES = {
    "end_earlier_calls": "coordinator",
    "wait_coordinator": "receiver",
    "count_choices": "counter",
    "count_ranks": "counter",
    "cast_messages": "caster",
    "send_choices": "sender",
    "send_to_ranks": "sender",
    "send_expert_rows": "sender",
    "send_sums": "sender",
    "receive_choices": "receiver",
    "receive_from_ranks": "receiver",
    "receive_rows": "receiver",
}


class Use(NamedTuple):
    """What a half is used for: a kernel's call, counted for each kernel, and its shape."""

    kernel: str
    number: int
    shape: LowLatencyShape


class Halves:
    """Who uses the halves of each rank, as its launches begin."""

    def __init__(self) -> None:
        self._uses: dict[tuple[int, int], Use] = {}
        self._numbers: dict[tuple[int, str], int] = {}

    def begin(self, launch: Any) -> LowLatencyLaunch | None:
        """Take note of a launch; None if it is not of the low-latency mode."""
        calls = [arg for arg in launch.args if isinstance(arg, (Call, ComparedCall))]
        shapes = [arg for arg in launch.args if isinstance(arg, LowLatencyShape)]
        if not calls or not shapes:
            return None
        call, shape = calls[0], shapes[0]
        before = self._of(launch.rank)
        if call.phases & SEND_PHASE:
            key = (launch.rank, launch.name)
            number = self._numbers[key] = self._numbers.get(key, -1) + 1
            self._uses[launch.rank, call.half] = Use(launch.name, number, shape)
        return LowLatencyLaunch(call, shape, before, self._of(launch.rank))

    def _of(self, rank: int) -> dict[int, Use]:
        return {half: use for (owner, half), use in self._uses.items() if owner == rank}


class LowLatencyLaunch(LaunchView):
    """One launch: its call, and who used the halves before it and uses them now."""

    def __init__(self, call: Call | ComparedCall, shape: LowLatencyShape, before: dict[int, Use], now: dict[int, Use]):
        self.notes = NO_RINGS
        self.half = call.half
        self.phases = PHASES[call.phases]
        self.number = now[call.half].number if call.half in now else 0
        self._num_rdma_bytes = call.num_rdma_bytes
        self._share_bytes = call.share_bytes
        self._shape = shape
        self._before = before
        self._now = now

    def role(self, thread: Any) -> Role:
        return Role(role_of_low_latency(thread, thread.block.launch.name))

    def has_cells(self, allocation: Any) -> bool:
        return allocation.name in (WORKSPACE, *OUTPUTS) or super().has_cells(allocation)

    def cell(self, allocation: Any, offset: int, thread: Any, is_weak: bool) -> Cell | None:
        """Weak stores are the coordinator's, which ends the call before."""
        if allocation.name in (BUFFER, WORKSPACE):
            return self.cell_of_half(allocation, offset, is_weak)
        if allocation.name in OUTPUTS:
            return self.output_cell(allocation, offset)
        return super().cell(allocation, offset, thread, is_weak)

    def output_cell(self, allocation: Any, offset: int) -> Cell:
        """A row of recv_x or combined_x."""
        shape = self._shape
        if allocation.name == "recv_x":
            row, byte = divmod(offset, payload_bytes(shape))
            expert, row = divmod(row, shape.num_ranks * shape.num_max_tokens)
            text = f"recv_x[local expert {expert}, row {row}]"
        else:
            row, byte = divmod(offset, 2 * shape.hidden)
            text = f"{allocation.name}[row {row}]"
        return Cell(allocation.rank, text, allocation.name, byte=byte, row=row)

    def cell_of_half(self, allocation: Any, offset: int, is_coordinator: bool) -> Cell | None:
        """A cell of the buffer or the workspace; None if no call of this shape uses it.

        is_coordinator: whether the access ends the call before
        """
        uses = self._before if is_coordinator else self._now
        if allocation.name == WORKSPACE:
            return _workspace_cell(allocation.rank, offset, self._shape.num_ranks, uses)
        if offset < self._num_rdma_bytes:
            return self._payload_cell(allocation.rank, offset)
        cell, num_ranks = offset - self._num_rdma_bytes, self._shape.num_ranks
        if cell < COUNTS_BYTES:
            half, expert, rank = place_of_count(num_ranks, cell)
            return _count_cell(allocation.rank, half, expert, rank, uses.get(half))
        row, rank = row_of_cell(num_ranks, cell)
        if row < CALLS:
            use = uses.get(row)
            if use is None or use.shape.deduplicate == 0 or rank >= use.shape.num_ranks:
                return None
            return Cell(allocation.rank, f"arrivals[half {row}, rank {rank}]", "arrivals", src=rank, words=in_tags)
        text = describe_low_latency_offset(num_ranks, self._num_rdma_bytes, offset)
        if CREDITS <= row < BARRIER_SIGNALS:
            return Cell(allocation.rank, text, "credits", src=rank)
        return Cell.parse(allocation.rank, text)

    def token(self, cell: Cell, data: bytes) -> Token | None:
        """Which token a message of dispatch brings, if it is written in one piece: its note says it."""
        note = header_offset(self._shape)
        if cell.name != "message" or cell.byte != 0 or len(data) < note + 4:
            return None
        return Token(cell.src, int.from_bytes(data[note : note + 4], "little"), (cell.owner,))

    def _payload_cell(self, owner: int, offset: int) -> Cell | None:
        """A message or a row in the recv part of a half; send parts are private."""
        half, byte = divmod(offset, quarter_bytes(self._num_rdma_bytes))
        use = self._now.get(half)
        if half >= NUM_HALVES or use is None:
            return None
        shape = use.shape
        stride = message_stride(shape) if use.kernel == DISPATCH else row_stride(shape)
        src, byte = divmod(byte, self._share_bytes)
        place, byte = divmod(byte, stride)
        expert, index = divmod(place, shape.num_max_tokens)
        if use.kernel == DISPATCH:
            where = f"src {src}" if shape.deduplicate != 0 else f"local expert {expert}, src {src}"
            return Cell(
                owner, f"message[half {half}, {where}, slot {index}]", "message", src=src, slot=index, byte=byte
            )
        expert += src * (shape.num_experts // shape.num_ranks)
        where = f"rank {src}" if shape.deduplicate != 0 else f"expert {expert}"
        return Cell(owner, f"row[half {half}, {where}, token {index}]", "row", slot=index, byte=byte)


def _count_cell(owner: int, half: int, expert: int, rank: int, use: Use | None) -> Cell | None:
    if use is None:
        return None
    if use.kernel == DISPATCH:
        text = f"counts[half {half}, local expert {expert}, src {rank}]"
        return Cell(owner, text, "counts", src=rank, words=in_tags)
    expert += rank * use.shape.num_local_experts
    return Cell(owner, f"counts[half {half}, expert {expert}]", "counts", words=in_tags)


def _workspace_cell(owner: int, offset: int, num_ranks: int, uses: dict[int, Use]) -> Cell | None:
    if offset >= workspace_at(0, num_ranks)[0].barriers:
        text = describe_workspace(num_ranks, offset)
        return Cell(owner, text, text.partition("[")[0])
    name, half, unit = slot_at(num_ranks, offset)
    if unit < MAX_EXPERTS:
        return Cell(owner, f"{name}[half {half}, expert {unit}]", name)
    use, rank = uses.get(half), unit - MAX_EXPERTS
    if use is None or use.shape.deduplicate == 0 or rank >= use.shape.num_ranks:
        return None
    return Cell(owner, f"{name}[half {half}, rank {rank}]", name)


def role_of_low_latency(thread: Any, otherwise: str) -> str:
    """What a thread is there for: the outermost function that it is in whose name says so.

    A copy may outlive its thread only if it is a receiver's: what is put to a peer is waited for.
    """
    if thread.exited:
        return "receiver"
    frame = function_of(thread, ROLES)
    return otherwise if frame is None else ROLES[frame.f_code.co_name]


def in_tags(value: int) -> str:
    """A count or an arrival as its kernels see it: -3 is complete; -3 - 2 TAG lacks the tags of two messages."""
    if value > LEAST_ABSENT:
        return "ABSENT"
    tags = -(-value // TAG)
    messages = value - tags * TAG
    if tags == 0:
        return str(messages)
    tags_text = "TAG" if abs(tags) == 1 else f"{abs(tags)} TAG"
    if messages == 0:
        return tags_text
    return f"{messages} {'+' if tags > 0 else '-'} {tags_text}"
