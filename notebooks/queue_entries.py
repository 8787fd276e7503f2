"""An entry of a send queue as text: its 64 bytes, with names.

See nbep/device/network/ibgda/entry.py for what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from nbep.device.network.ibgda.entry import (
    ATOMIC,
    ATOMIC_RESULT,
    CQ_UPDATE,
    DATA,
    ENTRY_BYTES,
    INLINE,
    MASKED_FETCH_ADD,
    OPMOD_32_BITS,
    OPMOD_64_BITS,
    RDMA_WRITE,
    REMOTE_ADDRESS,
    SEGMENT_BYTES,
)
from nbep.lab.trace.table import Text, align

OPCODES = {RDMA_WRITE: "RDMA write", MASKED_FETCH_ADD: "masked fetch-and-add"}
OPMODS = {OPMOD_32_BITS: "32 bits", OPMOD_64_BITS: "64 bits"}


class Field(NamedTuple):
    """Some bytes of an entry. meaning: what the number says, in words, where it is not the number itself."""

    segment: str
    name: str
    offset: int
    data: bytes
    meaning: str = ""

    @property
    def value(self) -> int:
        return int.from_bytes(self.data, "big")


def entry_fields(raw: bytes) -> list[Field]:
    """The fields of an entry, in order; bytes that no field has are left out.

    Raises: ValueError if there are not 64 bytes
    """
    if len(raw) != ENTRY_BYTES:
        raise ValueError(f"raw: got {len(raw)} bytes; must be {ENTRY_BYTES}")
    fields = list(_control(raw))
    opmod, opcode, num_segments = fields[0].value, fields[2].value, fields[4].value
    if opcode == RDMA_WRITE:
        fields += _remote_address(raw)
        if int.from_bytes(raw[DATA : DATA + 4], "big") & INLINE:
            fields += _inline_data(raw)
        else:
            for segment in range(DATA, min(SEGMENT_BYTES * num_segments, ENTRY_BYTES), SEGMENT_BYTES):
                fields += _data(raw, segment, "data")
    elif opcode == MASKED_FETCH_ADD:
        size = 8 if opmod == OPMOD_64_BITS else 4
        fields += _remote_address(raw)
        fields.append(_field(raw, "atomic", "what to add", ATOMIC, size))
        fields.append(_field(raw, "atomic", "boundary", ATOMIC + size, size))
        fields += _data(raw, ATOMIC_RESULT, "old value")
    return fields


def entry_table(raw: bytes) -> Text:
    """One line for each field of an entry: where, which bytes, and what they say."""
    rows: list[tuple[object, ...]] = [("segment", "byte", "bytes", "field", "says")]
    last = ""
    for field in entry_fields(raw):
        meaning = field.meaning or (f"{field.value:#x}" if field.name in ("address", "key") else field.value)
        segment = "" if field.segment == last and field.name != "num_bytes" else field.segment
        rows.append((segment, f"+{field.offset}", field.data.hex(" "), field.name, meaning))
        last = field.segment
    return align(rows, "<><<<")


def _field(raw: bytes, segment: str, name: str, offset: int, size: int, meaning: str = "") -> Field:
    return Field(segment, name, offset, raw[offset : offset + size], meaning)


def _control(raw: bytes) -> Iterator[Field]:
    opmod, opcode, flags = raw[0], raw[3], int.from_bytes(raw[8:12], "big")
    yield _field(raw, "control", "opmod", 0, 1, OPMODS.get(opmod, ""))
    yield _field(raw, "control", "index", 1, 2)
    yield _field(raw, "control", "opcode", 3, 1, OPCODES.get(opcode, f"no opcode of these: {opcode:#x}"))
    yield _field(raw, "control", "queue pair", 4, 3)
    yield _field(raw, "control", "segments", 7, 1)
    yield _field(raw, "control", "flags", 8, 4, "write a completion" if flags == CQ_UPDATE else f"{flags:#x}")
    yield _field(raw, "control", "immediate", 12, 4)


def _remote_address(raw: bytes) -> Iterator[Field]:
    yield _field(raw, "remote address", "address", REMOTE_ADDRESS, 8)
    yield _field(raw, "remote address", "key", REMOTE_ADDRESS + 8, 4)


def _data(raw: bytes, offset: int, segment: str) -> Iterator[Field]:
    yield _field(raw, segment, "num_bytes", offset, 4)
    yield _field(raw, segment, "key", offset + 4, 4)
    yield _field(raw, segment, "address", offset + 8, 8)


def _inline_data(raw: bytes) -> Iterator[Field]:
    num_bytes = int.from_bytes(raw[DATA : DATA + 4], "big") & (INLINE - 1)
    yield _field(raw, "data in the entry", "num_bytes", DATA, 4, str(num_bytes))
    yield _field(raw, "data in the entry", "the bytes", DATA + 4, min(num_bytes, ENTRY_BYTES - DATA - 4), " ")
