"""What a trace is made of: launches, and events at cells that have names."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from nbep.device.layout.intranode import Notes, RingShape

# As the layouts name cells: `tail[channel 0, src 1]`, `x[channel 0, src 1, slot 2] + 16`; of the RDMA buffer between
# nodes `tail[channel 0, node 1]`, `recv x[channel 0, node 1, slot 2] + 0`, `count message recv[0, node 1] word 0`.
_CELL = re.compile(
    r"(?:recv )?((?:send )?\w+)(?:\[(?:channel (\d+), (src|node) (\d+)(?:, slot (\d+))?|[^]]*)\])?(?: \+ (\d+))?"
)
_DIRECT = re.compile(r"\w+\[(row|slot) (\d+)[],]")  # without rings: `recv_x[row 3, half 0] + 0`, `x[slot 2] + 0`
_MESSAGE = re.compile(r"(count message) recv\[(\d+), node (\d+)\] word (\d+)")
OUTPUTS = ("recv_x", "combined_x")  # what kernels write tokens to; a row is a cell
TOKENS = ("x", "message", "count message", "row", *OUTPUTS)  # their first bytes are recorded
KEPT = tuple(f"send {name}" for name in (*Notes._fields, "x", "padding"))  # in a rank's own buffer, for its NIC
DIRECT_NOTES = ("recv_src_idx", "recv_topk_idx", "recv_topk_weights", "recv_x_scales")  # without rings
PAYLOAD = (*Notes._fields, "padding", *DIRECT_NOTES, *TOKENS, *KEPT)


class Cell(NamedTuple):
    """A place in memory. channel, src, node, slot and row are -1 where they mean nothing."""

    owner: int  # the rank whose memory it is
    text: str  # "tail[channel 0, src 1]"
    name: str  # "tail"
    channel: int = -1
    src: int = -1
    slot: int = -1
    byte: int = 0  # within the slot or row
    row: int = -1  # of an output
    node: int = -1  # of a cell in the RDMA buffer, in the mode between nodes
    is_in_tags: bool = False  # a count or an arrival of the low-latency mode: see kernels.parts.arrivals

    @classmethod
    def parse(cls, owner: int, text: str) -> Cell:
        """The cell that the layout describes as `text`."""
        match = _CELL.match(text)
        if match is None:
            return cls(owner, text, text)
        message = _MESSAGE.match(text)
        if message is not None:
            name, place, node, word = message.groups()
            return cls(owner, text, name, slot=int(place), byte=4 * int(word), node=int(node))
        name, channel, kind, src, slot, byte = match.groups()
        direct = _DIRECT.match(text)
        row = -1
        if direct is not None:
            row, slot = (int(direct[2]), None) if direct[1] == "row" else (-1, direct[2])
        return cls(
            owner,
            text.removeprefix("recv "),
            name,
            int(channel) if channel else -1,
            int(src) if kind == "src" else -1,
            int(slot) if slot else -1,
            int(byte) if byte else 0,
            row=row,
            node=int(src) if kind == "node" else -1,
        )


class Launch(NamedTuple):
    """One kernel on one rank. Steps are primitive calls of all threads since the run began."""

    rank: int
    kernel: str
    call: int  # 0 for the rank's first launch of this kernel; ranks launch together, so calls pair up (1)
    begin: int
    end: int | None  # None: it has not ended
    grid: int
    block: int
    shape: RingShape | None  # of the rings that it was given; between nodes of the NVL rings
    half: int = -1  # in low-latency mode: of the buffer
    phases: str = ""  # in low-latency mode: "send", "receive", "send and receive", or "free" behind a receive

    rdma_shape: RingShape | None = None  # between nodes: of the RDMA rings
    num_nvl_ranks: int = 0  # between nodes: ranks of a node

    # (1) With a hook, the launches of both phases have the number of their call.


class Token(NamedTuple):
    """A token: its rank and its index there, and the ranks that it goes to: inside a node that of the slot alone."""

    rank: int
    index: int  # type: ignore[assignment]  # hides the method of tuples, which nobody calls
    goals: tuple[int, ...]


class Line(NamedTuple):
    """A line of a kernel's source."""

    file: str
    number: int
    function: str
    begin: int  # the line where the function begins


class Event(NamedTuple):
    """Something that one thread did.

    what   "store"   wrote `value` to the cell
           "fill"    wrote the first bytes of a token's row to slot `value` of a ring, to slot or token `value` of a
                     half, or to row `value` of an output
           "atomic"  changed the cell to `value`
           "see"     a polling load got a `value` that this thread had not seen in the cell before, or that was stored
                     there anew
           "wait"    parked on the cell from `step` to `until`, having seen `value`; until is None if nothing ended it
           "hang"    has come to a barrier or a collective that nothing completes: see `Recorder.hangs`
    """

    step: int
    what: str
    rank: int
    kernel: str
    call: int
    block: int
    thread: int
    role: str  # what the thread is there for: "sender", "receiver", "copier", "coordinator", "counter", "caster",
    # between nodes one of `trace.internode.ROLES`, or its kernel's name
    cell: Cell
    value: Any
    order: str
    until: int | None = None
    team: int = -1  # between nodes: which place or node a forwarder, a deliverer or an NVL receiver serves
    token: Token | None = None  # of a "fill" of a slot in dispatch, where the bytes that it writes name the token
    first: bytes = b""  # of a "fill" by a bulk copy: the first bytes of the row
    at: tuple[Line, ...] = ()  # where the thread was, and who called that, innermost first
