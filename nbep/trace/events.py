"""What a trace is made of: launches, and events at cells that have names."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from nbep.device.layout.intranode import Notes, RingShape

# As layout.intranode.describe_offset names cells: `tail[channel 0, src 1]`, `x[channel 0, src 1, slot 2] + 16`.
_CELL = re.compile(r"(\w+)(?:\[(?:channel (\d+), src (\d+)(?:, slot (\d+))?|[^]]*)\])?(?: \+ (\d+))?")
OUTPUTS = ("recv_x", "combined_x")  # what kernels write tokens to; a row is a cell
TOKENS = ("x", "message", "row", *OUTPUTS)  # their first bytes are recorded
PAYLOAD = (*Notes._fields, *TOKENS)


class Cell(NamedTuple):
    """A place in memory. channel, src, slot and row are -1 where they mean nothing."""

    owner: int  # the rank whose memory it is
    text: str  # "tail[channel 0, src 1]"
    name: str  # "tail"
    channel: int = -1
    src: int = -1
    slot: int = -1
    byte: int = 0  # within the slot or row
    row: int = -1  # of an output
    is_in_tags: bool = False  # a count or an arrival of the low-latency mode: see protocols.arrivals

    @classmethod
    def parse(cls, owner: int, text: str) -> Cell:
        """The cell that the layout describes as `text`."""
        match = _CELL.match(text)
        if match is None:
            return cls(owner, text, text)
        name, channel, src, slot, byte = match.groups()
        return cls(
            owner,
            text,
            name,
            int(channel) if channel else -1,
            int(src) if src else -1,
            int(slot) if slot else -1,
            int(byte) if byte else 0,
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
    shape: RingShape | None  # of the rings that it was given
    half: int = -1  # in low-latency mode: of the buffer
    phases: str = ""  # in low-latency mode: "send", "receive" or "send and receive"

    # (1) With a hook, the launches of both phases have the number of their call.


class Event(NamedTuple):
    """Something that one thread did.

    what   "store"   wrote `value` to the cell
           "fill"    wrote the first bytes of a token's row to slot `value` of a ring, to slot or token `value` of a
                     half, or to row `value` of an output
           "atomic"  changed the cell to `value`
           "see"     a polling load got a `value` that this thread had not seen in the cell before
           "wait"    parked on the cell from `step` to `until`, having seen `value`; until is None if nothing ended it
    """

    step: int
    what: str
    rank: int
    kernel: str
    call: int
    block: int
    thread: int
    role: str  # what the thread is there for: "sender", "receiver", "copier", "coordinator", "putter", "counter",
    # "keeper" (ends the calls before) or its kernel's name
    cell: Cell
    value: Any
    order: str
    until: int | None = None
