"""Who stored where, and what the names of cells say."""

from __future__ import annotations

import dis
import re
from typing import TYPE_CHECKING

from ..machine.memory import Allocation
from ..machine.source import Site

if TYPE_CHECKING:
    from ..machine.access import Cell

_NEAR_BYTES = 256


def near(allocation: Allocation, offset: int, rank: int | None) -> list[int]:
    """Where stores went next to a cell, those to cells of its name first; only those of a rank, if one is given."""
    stem = stem_of(allocation, offset)
    found = [
        at
        for at, writer in allocation.writers.items()
        if at != offset and abs(at - offset) <= _NEAR_BYTES and rank in (None, rank_of(writer[0]))
    ]
    return sorted(found, key=lambda at: (stem_of(allocation, at) != stem, abs(at - offset), at))


def stem_of(allocation: Allocation, offset: int) -> str:
    """The name of a cell without its index: `tail` of `tail[channel 0, src 1]`, of `tail 3` and of `tail + 4`."""
    name = "" if allocation.describe is None else allocation.describe(offset)
    return re.split(r"[\[\d+(]", name)[0].strip()


def index_of(cell: Cell) -> tuple[int, str] | None:
    """Whose memory a cell is in, and its index: `[channel 0, src 1]`. A ring's head and its tail have the same."""
    if not isinstance(cell[0], Allocation) or cell[0].freed or cell[0].number == 0:
        return None
    found = re.search(r"\[.*?\]", cell[0].cell(cell[1]))
    return (cell[0].rank, found[0]) if found else None


def named_source(allocation: Allocation, offset: int) -> int | None:
    """The rank that the name of a cell says it is for, as `count[src 1]` does, if that is so for cells next to it.

    Shared memory is its own block's alone, whatever the names say.
    """
    said = _source_in(allocation, offset) if allocation.number else None
    if said is None:
        return None
    others = [at for at in near(allocation, offset, None) if stem_of(allocation, at) == stem_of(allocation, offset)]
    stored = [(_source_in(allocation, at), rank_of(allocation.writers[at][0])) for at in others]
    return said if stored and all(name == rank for name, rank in stored) else None


def _source_in(allocation: Allocation, offset: int) -> int | None:
    found = None if allocation.describe is None else re.search(r"\b(?:src|rank) (\d+)", allocation.describe(offset))
    return int(found[1]) if found else None


def kernel_of(block_name: str) -> str:
    """The name of a block's kernel, from its own name."""
    return block_name.partition("`")[2].partition("`")[0]


def rank_of(block_name: str) -> int:
    """The rank of a block, from its name: that of a NIC counts for its rank."""
    found = re.search(r"rank (\d+)", block_name)
    return int(found[1]) if found else -1


def is_atomic(site: Site | None) -> bool:
    """Whether the call at a site is of an atomic, which several threads may make on one cell."""
    if site is None:
        return False
    code, at = site  # of the call, or of the caches behind it
    before = [i for i in dis.get_instructions(code) if i.offset <= at and i.positions is not None]
    start = _start(before[-1])
    loads = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF", "LOAD_FAST")
    names = [str(i.argval) for i in before if i.opname in loads and _start(i) == start]
    return bool(names) and bool(re.match(r"atom|red_|amo", names[-1]))


def _start(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    """Line and column where the expression of an instruction begins."""
    positions = instruction.positions
    return (None, None) if positions is None else (positions.lineno, positions.col_offset)
