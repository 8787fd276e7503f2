"""Who waits at the end of a run: threads that wait at the same line for the same thing are one group."""

from __future__ import annotations

import dis
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..machine.block import WARP_SIZE, NamedBarrier
from ..machine.memory import OFFSET_BITS, Allocation
from ..machine.names import name_of, ranges
from ..machine.source import Site, call_chain, describe_site
from ..machine.warp import Collective
from .expected import TimedOutWait
from .faults import place

if TYPE_CHECKING:
    from ..machine.access import Cell
    from ..machine.stream import Launch
    from ..machine.thread import Thread
    from ..run import Run

Body = tuple[str, ...]


class Wait(NamedTuple):
    """What a thread waits for.

    body: in words; waits_for: the barrier or the like; cells: what it polls, if it polls
    absent: whom a barrier or a collective misses
    strangers: who is left to fill a barrier, though it has another one so far
    lacking: how many of the barrier's threads these are, or are no thread at all
    """

    body: Body
    waits_for: Any = None
    cells: Sequence[Cell] = ()
    absent: Sequence[Thread] = ()
    strangers: Sequence[Thread] = ()
    lacking: int = 0


@dataclass(eq=False)
class Group:
    """Threads of one launch that wait at one place for the same thing.

    Attributes:
        chain: where, the innermost line first
        report: what the wait reports when it times out
        expected: what has to be in a cell for the wait to end, in words
        own_cells: those of the cells that it polls that no other rank can reach
    """

    launch: Launch
    chain: tuple[Site, ...]
    wait: Wait
    threads: list[Thread] = field(default_factory=list)
    report: TimedOutWait | None = None
    expected: dict[tuple[Any, int], str] = field(default_factory=dict)
    own_cells: Sequence[Cell] = ()

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def cell(self) -> Cell | None:
        """The cell that the wait is about: the one that its report names, or the last that is compared.

        A coordinator looks at several of one name: then it is the one that holds what the report has seen.
        """
        cells = self.wait.cells
        if not cells:
            return None
        if self.report is None:  # it may also look at a flag of its own, such as a mask
            cells = [cell for cell in cells if cell not in self.own_cells] or cells
        named = [cell for cell in cells if is_reported(self.report, cell)]
        compared = [cell for cell in cells if (cell[0], cell[1]) in self.expected]
        both = [cell for cell in named if (cell[0], cell[1]) in self.expected]
        seen = [cell for cell in named if self.report is not None and cell[3] == self.report.seen]
        return (seen or both or compared or named or cells)[-1]

    def who(self) -> str:
        return f"{name_of(self.rank)}, kernel `{self.launch.name}`, {who(self.threads)}"


def is_reported(report: TimedOutWait | None, cell: Cell) -> bool:
    """Whether a cell is the one that a wait reports; never in shared memory, where a coordinator also looks."""
    is_shared = isinstance(cell[0], Allocation) and cell[0].number == 0
    return report is not None and not is_shared and report.cell in cell[0].cell(cell[1])


def waiting_groups(world: Run, here: tuple[Thread | None, FrameType | None] | None = None) -> list[Group]:
    """The groups of all launches, but for those that serve others and have nothing to do.

    Args: here: if the run has not ended: the thread that runs now, if one does, and its frame
    """
    groups: dict[tuple[Launch, tuple[Site, ...], Body], Group] = {}
    waits: dict[int, Wait] = {}
    running = {*world.runnable, *world.slow}
    if here is not None and here[0] is not None:
        running.add(here[0])
    for launch in sorted(world.launches, key=lambda launch: launch.rank):
        if launch.is_service and is_idle(launch):
            continue
        for block in launch.blocks:
            for thread in block.threads:
                if not thread.exited:
                    key = id(thread.waits_for)
                    if thread in running and here is None:  # it runs and runs while nothing changes
                        lines = [line for cell in thread.polled.values() for line in _cell(*cell)]
                        body = ("waits in a loop that does not call give_up", *lines) if lines else ("runs",)
                        wait = Wait(body, cells=list(thread.polled.values()))
                    elif thread in running:
                        runs = "runs" if thread.gr_frame is not None else "has not started"
                        wait = Wait(("is here" if here is not None and thread is here[0] else runs,))
                    elif key in waits:
                        wait = waits[key]
                    else:
                        wait = waits[key] = _waits(thread)
                    frame = here[1] if here is not None and thread is here[0] else thread.gr_frame
                    chain = tuple(call_chain(frame))
                    groups.setdefault((launch, chain, wait.body), Group(launch, chain, wait)).threads.append(thread)
    return list(groups.values())


def is_idle(launch: Launch) -> bool:
    """Whether all threads of a launch wait for cells, or for those that do."""
    threads = [thread for block in launch.blocks for thread in block.threads]
    return all(thread.exited or isinstance(thread.waits_for, (list, Collective)) for thread in threads)


def who(threads: list[Thread]) -> str:
    """Blocks, warps and lanes of some threads of one launch."""
    blocks: dict[int, list[int]] = {}
    for thread in threads:
        blocks.setdefault(thread.block_idx, []).append(thread.thread_idx)
    same: dict[str, list[int]] = {}
    for block, indices in blocks.items():
        same.setdefault(warps_and_lanes(indices), []).append(block)
    return "; ".join(f"block {ranges(numbers)}, {names}" for names, numbers in same.items())


def warps_and_lanes(indices: list[int]) -> str:
    """`warp 0-2; warp 3, lane 0-7` for thread indices of one block."""
    lanes: dict[int, list[int]] = {}
    for index in indices:
        lanes.setdefault(index >> 5, []).append(index & 31)
    same: dict[str, list[int]] = {}
    for warp, numbers in lanes.items():
        same.setdefault("" if len(numbers) == 32 else f", lane {ranges(numbers)}", []).append(warp)
    return "; ".join(f"warp {ranges(numbers)}{names}" for names, numbers in same.items())


def _waits(thread: Thread) -> Wait:
    """What a parked thread waits for."""
    waits_for = thread.waits_for
    if isinstance(waits_for, list):
        return Wait(tuple(line for cell in waits_for for line in _cell(*cell)), waits_for, waits_for)
    if isinstance(waits_for, NamedBarrier):
        return _at_barrier(waits_for, thread)
    if isinstance(waits_for, Collective):
        absent = [t for t in thread.warp_state.lanes if waits_for.missing >> t.lane & 1]
        what = f"waits at {waits_for.name} with mask {waits_for.mask:#010x}"
        return Wait((what, *_missing(absent)), waits_for, absent=absent)
    return Wait((f"waits for {waits_for}",), waits_for)


def _at_barrier(barrier: NamedBarrier, thread: Thread) -> Wait:
    """What misses at a barrier of a thread's block are those who came to it last.

    If no thread ever met there, and it is not for the whole block: all whose warps have no other barrier of their own.
    """
    block = thread.block
    arrived = set(barrier.arrived)
    absent = [t for t in block.threads if t.thread_idx not in arrived and not t.exited]
    members = block.members.get(barrier.number, ())
    elsewhere: dict[int, int] = {}  # thread -> the number of its own barrier
    if len(members) == barrier.expected:
        elsewhere = {t.thread_idx: barrier.number for t in absent if t.thread_idx not in members}
    elif barrier.expected < block.launch.block:
        waiting = [(b.number, b.expected, b.arrived) for b in block.barriers.values()]
        for number, size, met in [(n, len(met), met) for n, met in block.members.items()] + waiting:
            if number != barrier.number and size < block.launch.block:
                warps = {index // WARP_SIZE for index in met}
                elsewhere.update({t.thread_idx: number for t in absent if t.warp in warps})
    own = [t for t in absent if t.thread_idx not in elsewhere]
    lacking = max(0, barrier.expected - len(arrived) - len(own))
    strangers = [t for t in absent if t.thread_idx in elsewhere] if lacking else []
    lines = [f"waits at barrier {barrier.number}: {len(arrived)} of {barrier.expected} threads have arrived"]
    lines += _missing(own)
    if lacking:
        numbers: dict[int, list[int]] = {}
        for t in strangers:
            numbers.setdefault(elsewhere[t.thread_idx], []).append(t.thread_idx)
        meet = "; ".join(f"{warps_and_lanes(them)} so far met at barrier {n} only" for n, them in numbers.items())
        lines.append(f"for {count(lacking, 'more thread')} there is nobody left" + (f": {meet}" if meet else ""))
    return Wait(tuple(lines), barrier, (), own, strangers, lacking)


def _missing(absent: Sequence[Thread]) -> list[str]:
    """A line for each place where some of those are that are missing."""
    places: dict[str, list[int]] = {}
    for thread in absent:
        places.setdefault(place(thread), []).append(thread.thread_idx)
    return [f"missing: {warps_and_lanes(indices)}, which {where}" for where, indices in places.items()]


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _cell(allocation: Allocation, offset: int, kind: str, value: Any) -> list[str]:
    """A polled cell: its name, the value seen, and who stored last."""
    if kind == "phase":  # an mbarrier says it all itself
        return [f"waits for {allocation.cell(offset)}"]
    if allocation.freed:
        return [f"polls {allocation.cell(offset)}, which is freed"]
    address = allocation.number << OFFSET_BITS | offset
    return [
        f"polls {allocation.cell(offset)} at {address:#x}: sees {value} ({kind})",
        f"  {last_writer(allocation, offset)}",
    ]


def last_writer(allocation: Allocation, offset: int) -> str:
    writer = allocation.writers.get(offset)
    if writer is None:
        return "so far only weak stores, or none, have written it"
    block, thread, site = writer
    return f"last written by {block}, {warps_and_lanes([thread])}, at {describe_site(site)}"


# Who stored where, and what the names of cells say.


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
