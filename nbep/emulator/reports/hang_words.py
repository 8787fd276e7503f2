"""The first paragraph about a deadlock: the wait that holds up the others, for whom, and why that does not come."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ..machine.kinds import range_of, wrap
from ..machine.memory import Allocation, Writer
from ..machine.names import NIC_NUMBERS, name_of, ranges
from ..machine.source import caller_site, describe_site
from .hang_cause import Awaited, Waits, of_rank
from .waiting import Group, is_idle, is_reported, kernel_of, near, rank_of, stem_of, warps_and_lanes, who

if TYPE_CHECKING:
    from ..machine.access import Cell

_MOST_NEAR = 2
_MOST_CELLS = 2  # besides the one that a wait is about
_LONGEST = 120  # characters of a list of threads
_MOST_HOPS = 4  # of a circle, in words
_NAMELESS = "kernel"  # the role of a wait that does not say who waits, for what: SOME_WAIT of nbep.lang


def paragraph(waits: Waits, hosts: list[tuple[str, str]]) -> list[str]:
    """The lines of the first paragraph. hosts: names of those that wait, and for what."""
    group = waits.cause()
    if group is None:
        same: dict[str, list[str]] = {}
        for name, what in hosts:
            same.setdefault(what, []).append(name)
        lines = []
        for what, names in same.items():
            ranks = [int(name.rpartition(" ")[2]) for name in names if name[-1].isdecimal()]
            wait = f"the hosts of ranks {ranges(ranks)} wait" if len(ranks) > 1 else f"{names[0]} waits"
            lines.append(f"No kernel runs: {wait} for {what}")
        return lines
    awaited = waits.awaited[group]
    if is_undone := _is_undone(group):  # who has stored last is not the one who is waited for
        awaited = awaited._replace(rank=None)
    lines = [sentence(group, awaited.rank), *(_calls(waits) or _starts(waits, group))]
    if group.cell is not None and isinstance(group.cell[0], Allocation) and not group.cell[0].freed:
        lines += _stores(waits, group, group.cell, awaited)
        lines += _network(waits, group, awaited)
    elif group.cell is not None and group.cell[2] == "phase":
        lines += _phases(group.cell[0])
    way = waits.way_round(group)
    if len(way) > 1:
        for other in way[1 : 1 + _MOST_HOPS]:
            lines.append(sentence(other, waits.awaited[other].rank))
            if other.cell is not None and isinstance(other.cell[0], Allocation):
                lines += _lost(other, other.cell)
        is_one_kernel = len({other.launch.name for other in way}) == 1
        names = [label(other, is_one_kernel) for other in way]
        sure = all(waits.is_sure(here, there) for here, there in zip(way, [*way[1:], way[0]], strict=True))
        several = len({of_rank(other) for other in way}) > 1
        how = "They wait in a circle" if sure else f"{'The ranks' if several else 'They'} wait for each other"
        lines.append(f"{how}: " + " -> ".join([*names, names[0]]))
    alike = sorted(
        {of_rank(g) for g in waits.groups if g is not group and _is_alike(waits, g, group)} - {of_rank(group)}
    )
    if alike:
        is_own = awaited.rank == group.rank and waits.is_private(group.cell)
        whom = "" if awaited.rank is None or is_own else f" for {name_of(awaited.rank)}"
        lines.append(f"{_ranks(alike)} {_verb(alike, 'wait')}{whom} in the same way")
    lines += _left(waits, group, group.rank if awaited.rank is None else awaited.rank)
    lines += _never_stored(waits, group, awaited)
    lines += _idle_ranks(waits)
    if not is_undone and _is_given_up(waits, group, awaited):
        left = f"{_ranks([group.rank])} has no thread left that could store to it: "
        left += "all wait here, or for those that do"
        services = [launch for launch in waits.world.launches if launch.is_service and _rank(launch) == group.rank]
        lines.append(left + ("; its NIC has nothing to do" if any(map(is_idle, services)) else ""))
    return [line for text in lines for line in text.splitlines()]


def sentence(group: Group, rank: int | None) -> str:
    """Who waits for whom, for which cell, what is expected there and what is seen."""
    report, cell = group.report, group.cell
    where = f"kernel `{group.launch.name}`, {who(group.threads)}"
    if report is not None and report.peer != rank:
        rank = None  # it polls several cells, and reports another one
    for_whom = "" if rank is None else f" for {name_of(rank)}"
    if report is not None and report.role != _NAMELESS:
        for_what = f"{for_whom}: {report.awaited}" if for_whom else f" for {report.awaited}"
        text = f"{name_of(group.rank)}: the {report.role} ({where}) waits{for_what}"
        text += "\nIt" if cell is not None else ""
    elif cell is not None:
        text = f"{name_of(group.rank)}, {where}, waits{for_whom}\nIt"
    else:
        text = f"{name_of(group.rank)}, {where}, {group.wait.body[0]}"
        text += "".join(f"; {line}" for line in group.wait.body[1:])
    if cell is not None:
        text += f" {_poll(group, cell)}"
        if not is_reported(report, cell):  # it is not known which of them matters
            others = [other for other in group.wait.cells if other is not cell]
            others.sort(key=lambda other: not _is_unwritten(other))
            text += "".join(f", and {_poll(group, other)}" for other in others[:_MOST_CELLS])
    return text + f", at {describe_site(group.chain[0])}" if group.chain else text


def label(group: Group, is_one_kernel: bool = False) -> str:
    """A group in few words. is_one_kernel: its kernel need not be named"""
    if group.report is not None and group.report.role != _NAMELESS:
        return f"{name_of(group.rank)} {group.report.role}"
    kernel = "" if is_one_kernel else f" `{group.launch.name}`"
    return f"{name_of(group.rank)}{kernel} {who(group.threads)}"


def _poll(group: Group, cell: Cell) -> str:
    allocation, offset, kind, value = cell
    if kind == "phase":
        return f"waits for {allocation.cell(offset)}"
    if allocation.freed:
        return f"polls {allocation.cell(offset)}, which is freed"
    expected = group.expected.get((allocation, offset))
    if group.report is not None and group.report.expected != group.report.seen and _is_vague(expected):
        expected, value = str(group.report.expected), group.report.seen
    wanted = "" if expected is None else f"expects {expected} and "
    alone = len(group.wait.cells) > 1 and _is_unwritten(cell)
    return f"polls {allocation.cell(offset)}, {wanted}sees {value}" + ", to which nobody has stored" * alone


def _is_vague(expected: str | None) -> bool:
    """Whether what a loop compares with says less than the report of its wait: several numbers, or a sign alone."""
    if expected is None or expected in ("-1 or less", "0 or more"):
        return True
    return " or " in expected.replace(" or more", "").replace(" or less", "")


def _is_unwritten(cell: Cell) -> bool:
    return isinstance(cell[0], Allocation) and not cell[0].freed and cell[1] not in cell[0].writers


def _stores(waits: Waits, group: Group, cell: Cell, awaited: Awaited) -> list[str]:
    """Who stored to the cell, and next to it."""
    allocation, offset, kind, _ = cell
    writer = allocation.writers.get(offset)
    last = "The last store to it that is not weak is"
    if writer is None:
        lines = ["So far only weak stores, or none, have written it"]
        sources: dict[int, list[int]] = {}
        for rank, other in waits.same_cell(allocation, offset).items():
            sources.setdefault(rank_of(other[0]), []).append(rank)
        for source, ranks in list(sources.items())[:_MOST_NEAR]:
            lines.append(f"In the memory of {_ranks(ranks).lower()} the same byte was stored by {name_of(source)}")
    elif any((t.block.name, t.thread_idx) == writer[:2] for t in group.threads):
        lines = [f"{last} the waiting thread's own, at {describe_site(writer[2])}"]
    else:
        lines = [f"{last} by {_by(writer)}" + (", which has ended" if waits.thread_of(writer) is None else "")]
    lines += _wrapped(group, cell) or _lost(group, cell)
    others = near(allocation, offset, awaited.rank)
    if not others and writer is None:  # whoever stored to a cell of the same name
        stem = stem_of(allocation, offset)
        others = [at for at in near(allocation, offset, None) if stem_of(allocation, at) == stem]
    elif waits.is_private(cell):  # no peer takes another cell there for this one
        others = [at for at in others if stem_of(allocation, at) == stem_of(allocation, offset)]
    running = {(_rank(launch), launch.name) for launch in waits.world.launches}
    still_runs = any(rank == awaited.rank for rank, _ in running)
    for other in others[:_MOST_NEAR]:
        if still_runs and (rank_of((by := allocation.writers[other])[0]), kernel_of(by[0])) not in running:
            continue  # of a kernel before
        value = _value(allocation, other, kind)
        lines.append(f"Next to it, {allocation.cell(other)} is {value}, stored by {_by(allocation.writers[other])}")
    return lines


def _wrapped(group: Group, cell: Cell) -> list[str]:
    """That the cell has counted on past the largest value that it can hold."""
    allocation, offset, kind, seen = cell
    if offset not in allocation.wrapped:
        return []
    value, writer = allocation.wrapped[offset]
    expected = group.expected.get((allocation, offset), "" if group.report is None else "?")
    counts_up = re.match(r"(-?\d+) or more", expected)
    if expected and (counts_up is None or int(counts_up[1]) <= seen) and "which no" not in expected:
        return []
    least, most = range_of(kind)
    held = wrap(value, kind)
    return [f"It has wrapped: {value}, stored by {_by(writer)}, is {held} in an {kind}, which holds {least} to {most}"]


def _lost(group: Group, cell: Cell) -> list[str]:
    """That the cell has gone back, has been overwritten, or that two threads have stored to it as if to count."""
    allocation, offset, _, seen = cell
    lost = allocation.lost.get(offset)
    expected = group.expected.get((allocation, offset), "" if group.report is None else str(group.report.expected))
    wanted = re.fullmatch(r"(-?\d+)( or more)?", expected)
    launch = f", {group.launch.title}, block "
    if lost is not None and launch in lost.writer[0] and lost.by[0] != lost.writer[0]:
        was_enough = expected == f"anything but {lost.new}" != f"anything but {lost.value}"
        if wanted is not None and wanted[2] is not None and launch not in lost.by[0]:
            was_enough = lost.new < int(wanted[1]) <= lost.value
        if was_enough:
            return [f"It was {lost.value}, stored by {_by(lost.writer)}; {_by(lost.by)}, has overwritten that"]
    if lost is None or wanted is None or launch not in lost.by[0] or launch not in lost.writer[0]:
        return []  # what was before this launch is another story
    least, counts_up = int(wanted[1]), wanted[2] is not None
    if lost.new < lost.value and (counts_up or lost.value == least):
        if lost.by == lost.writer:
            return [f"It has gone back from {lost.value} to {lost.new}, by a store of {_by(lost.by)}"]
        return [f"It has gone back from {lost.value}, stored by {_by(lost.writer)}, to {lost.new}, by {_by(lost.by)}"]
    if counts_up and seen == lost.value == lost.new < least and lost.writer[2] == lost.by[2]:
        before, last = _by((*lost.writer[:2], None)), _by((*lost.by[:2], None))
        return [f"Both {before}, and {last}, have stored {lost.value} there: to count together takes an atomic"]
    return []


def _is_undone(group: Group) -> bool:
    """Whether another rank has stored what is waited for, and a store of this one has overwritten that."""
    cell = group.cell
    if group.report is not None or cell is None or not isinstance(cell[0], Allocation) or cell[0].freed:
        return False
    lost = cell[0].lost.get(cell[1])
    is_of_both = lost is not None and rank_of(lost.by[0]) == of_rank(group) != rank_of(lost.writer[0])
    return is_of_both and bool(_lost(group, cell))


def _network(waits: Waits, group: Group, awaited: Awaited) -> list[str]:
    """What has become of the messages that a group waits for, if a NIC carries them."""
    peer = -1 if group.report is None else group.report.peer
    source, destination = (group.rank, peer) if awaited.rank == group.rank else (awaited.rank, group.rank)
    describe = None if source is None else waits.world.networks.get(source)
    found = [] if describe is None or destination < 0 or destination == source else describe(destination)[:1]
    return [f"On {name_of(source or 0)}, {line}" for line in found]


def _phases(mbarrier: Any) -> list[str]:
    """How far an mbarrier is, for threads that may have missed a phase."""
    if mbarrier.last is None:
        return ["No thread has arrived at it so far"]
    over = "1 phase of it is over" if mbarrier.phases == 1 else f"{mbarrier.phases} phases of it are over"
    last = mbarrier.last
    return [f"{over}; the last thread to arrive was {last.block.name}, {warps_and_lanes([last.thread_idx])}"]


def _is_given_up(waits: Waits, group: Group, awaited: Awaited) -> bool:
    """Whether a rank waits for itself, and all of its threads that are left wait there, or for those that do."""
    if awaited.rank != group.rank or awaited.groups or group.cell is None:
        return False
    here = [g for g in waits.groups if of_rank(g) == group.rank]
    alike = [g for g in here if g.chain[:1] == group.chain[:1]]
    return all(g in alike or any(waits.waits_for(g, other) for other in alike) for g in here)


def _value(allocation: Allocation, offset: int, kind: str) -> Any:
    try:
        return allocation.read(offset, kind)
    except (IndexError, ValueError, TypeError):  # of another size, at the end
        return "not aligned"


def _by(writer: Writer) -> str:
    block, thread, site = writer
    return f"{block}, {warps_and_lanes([thread])}" + (f", at {describe_site(site)}" if site is not None else "")


def _is_alike(waits: Waits, group: Group, cause: Group) -> bool:
    """Whether a group waits for the same rank at the same line."""
    rank = waits.awaited[cause].rank
    same = group.chain[:1] == cause.chain[:1] and group.launch.name == cause.launch.name
    same = same and group.wait.lacking == cause.wait.lacking
    if rank == cause.rank and waits.is_private(cause.cell):
        return same and waits.awaited[group].rank == of_rank(group)
    return same and waits.awaited[group].rank == rank and (rank is None or of_rank(group) != rank)


def _left(waits: Waits, group: Group, rank: int) -> list[str]:
    """A line for the threads of a rank's launch that have left the kernel."""
    lines = []
    for launch in waits.world.launches:
        if launch.rank == rank and launch.name == group.launch.name:
            gone = [thread for block in launch.blocks for thread in block.threads if thread.exited]
            if gone and len(text := who(gone)) <= _LONGEST:
                lines.append(f"Threads that have left kernel `{launch.name}` of {name_of(rank)}: {text}")
    return list(dict.fromkeys(lines))  # launches that run at the same time may say the same


def _never_stored(waits: Waits, group: Group, awaited: Awaited) -> list[str]:
    """A line for the ranks that have run the same kernel to its end, and have stored nothing to a cell of that name."""
    cell = group.cell
    if cell is None or not _is_unwritten(cell):
        return []
    world, (allocation, offset), launch = waits.world, cell[:2], group.launch
    stem = stem_of(allocation, offset)
    around = [allocation.writers[at] for at in near(allocation, offset, None) if stem_of(allocation, at) == stem]
    stored = {rank_of(writer[0]) for writer in (*around, *waits.same_cell(allocation, offset).values())}
    busy = {_rank(item) for item in world.launches} | stored
    gone = [r for r in range(world.num_ranks) if r not in busy and world.num_launches[r, launch.name] >= launch.number]
    if not around or not gone or awaited.rank not in (None, *gone):
        return []
    return [
        f"{_ranks(gone)} {'has' if len(gone) == 1 else 'have'} left kernel `{launch.name}` without a store to `{stem}`"
    ]


def _idle_ranks(waits: Waits) -> list[str]:
    """Lines for ranks on which no kernel waits: what their hosts do."""
    busy = {of_rank(group) for group in waits.groups}
    states: dict[str, list[int]] = {}
    for host in waits.world.hosts:
        if host.rank not in busy:
            what = host.waits_for() if callable(host.waits_for) else host.waits_for
            site = None if host.finished else caller_site(host.gr_frame)
            place = "" if site is None else f", at {describe_site(site)}"
            state = "has returned" if host.finished else f"waits for {what}{place}"
            states.setdefault(state, []).append(host.rank)
    lines = []
    for state, ranks in states.items():
        if len(ranks) > 1:
            state = state.replace("has ", "have ", 1).replace("waits ", "wait ", 1)
        whose = "its host" if len(ranks) == 1 else "their hosts"
        lines.append(f"{_ranks(ranks)} {_verb(ranks, 'run')} no kernel: {whose} {state}")
    return lines


def _calls(waits: Waits) -> list[str]:
    """A line for each buffer whose ranks have not made the same number of collective calls."""
    lines = []
    for so_far in waits.world.call_logs:
        made: dict[tuple[int, str], list[int]] = {}
        for rank, call in enumerate(so_far()):
            made.setdefault(call, []).append(rank)
        if len(made) > 1:
            said = [
                f"{_ranks(ranks).lower()} {'has' if len(ranks) == 1 else 'have'} made {number}"
                + (f", the last one {verb}" if verb else "")
                for (number, verb), ranks in sorted(made.items())
            ]
            lines.append(f"Of the buffer's collective calls, {'; '.join(said)}")
    return lines


def _starts(waits: Waits, group: Group) -> list[str]:
    """A line if some ranks have started the kernel less often than others, but at least once."""
    name, world = group.launch.name, waits.world
    ranks: dict[int, list[int]] = {}
    for rank in range(world.num_ranks):
        ranks.setdefault(world.num_launches[rank, name], []).append(rank)
    if len(ranks) < 2 or 0 in ranks:
        return []
    said = [
        f"{'once' if number == 1 else f'{number} times'} on {_ranks(those).lower()}"
        for number, those in sorted(ranks.items())
    ]
    return [f"Kernel `{name}` was started {', '.join(said)}"]


def _rank(launch: Any) -> int:
    """The rank of a launch, or whose NIC it is."""
    return launch.rank % NIC_NUMBERS


def _ranks(ranks: list[int]) -> str:
    return f"Rank {ranges(ranks)}" if len(ranks) == 1 else f"Ranks {ranges(ranks)}"


def _verb(ranks: list[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
