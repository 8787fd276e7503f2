"""Who waits for whom at the end of a run, and the wait that holds up the others.

Each group waits for some others: for those that a barrier misses, for the peer that its report names, for the thread
that last stored to the cell, or for whoever alone could. A wait that no other group holds up, or a circle of waits, is
the cause; where there are several, the one that is known best and that most others wait for. `hang_words` tells it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from ..machine.memory import Allocation, Writer
from ..machine.names import NIC_NUMBERS
from .waiting import Group, index_of, is_atomic, kernel_of, named_source, near, rank_of, stem_of

if TYPE_CHECKING:
    from ..machine.access import Cell
    from ..machine.thread import Thread
    from ..run import Run


class Awaited(NamedTuple):
    """Whom a group waits for: a rank, if one is known, and groups.

    is_over: the one who stored last is not there
    exact: those of the groups that are known to be waited for themselves, and not just their rank
    """

    rank: int | None
    groups: list[Group]
    is_over: bool = False
    exact: tuple[Group, ...] = ()


class Waits:
    """Who waits for whom."""

    def __init__(self, world: Run, groups: list[Group]):
        self.world = world
        self.groups = groups
        self.group_of = {thread: group for group in groups for thread in group.threads}
        self.blocks = {block.name: block for launch in world.launches for block in launch.blocks}
        self._seen_by: dict[Allocation, set[int]] = {}
        for group in groups:
            group.own_cells = [cell for cell in group.wait.cells if self.is_private(cell)]
        self.index = {group: None if group.cell is None else index_of(group.cell) for group in groups}
        self.indices = {group: {index_of(cell) for cell in group.wait.cells} - {None} for group in groups}
        self.has_lost_warps = {  # whether all threads of a warp have left a kernel
            launch: any(all(lane.exited for lane in warp.lanes) for block in launch.blocks for warp in block.warps)
            for launch in world.launches
        }
        self.awaited = {group: self._awaited(group) for group in groups}
        self.number = {group: i for i, group in enumerate(groups)}
        # By number: a bit for each group that it waits for, directly or not; and of those that it surely waits for.
        self.reach = self._close([self.awaited[group].groups for group in groups])
        self.sure = {group: [g for g in self.awaited[group].groups if self.is_sure(group, g)] for group in groups}
        self.sure_reach = self._close(list(self.sure.values()))

    # --- whom a group waits for ---------------------------------------------------------------------------------

    def _awaited(self, group: Group) -> Awaited:
        wait = group.wait
        if wait.absent or wait.strangers:
            threads = [*wait.absent, *wait.strangers]
            missing = _unique(self.group_of[t] for t in threads if t in self.group_of)
            return Awaited(None, missing, exact=tuple(missing))
        cells = [cell for cell in wait.cells if isinstance(cell[0], Allocation)]
        main = group.cell
        if main is not None and main[2] == "phase":
            mbarrier: Any = main[0]
            last = self.group_of.get(mbarrier.last)
            return Awaited(None, [last], exact=(last,)) if last not in (None, group) else Awaited(None, [])
        if main is None or main not in cells:
            return Awaited(None, [])
        parts = [self._awaited_at(group, main), *(self._awaited_at(group, c) for c in cells if c is not main)]
        groups = _unique(other for part in parts for other in part.groups)
        return parts[0]._replace(groups=groups, exact=tuple(other for part in parts for other in part.exact))

    def _awaited_at(self, group: Group, cell: Cell) -> Awaited:
        """Whom a group waits for that polls a cell."""
        allocation, offset, _, _ = cell
        writer = allocation.writers.get(offset)
        thread = None if writer is None else self.thread_of(writer)
        peer = -1 if group.report is None or not allocation.number else group.report.peer
        is_private = self.is_private(cell)
        if is_private and (writer is None or thread in group.threads or peer >= 0):
            return self._of_rank(group, group.rank, writer)
        if peer >= 0 and (peer != group.rank or len(group.wait.cells) == 1):
            return self._of_rank(group, peer, writer)
        if writer is not None and is_atomic(writer[2]):  # others may be yet to add to it
            seen_by = self.ranks_that_see(allocation)
            others = [g for g in self.groups if g.chain[:1] != group.chain[:1] and not self._misses(g, group)]
            others = [g for g in others if not allocation.number or of_rank(g) in seen_by]
            return Awaited(group.rank if is_private else None, others)
        if writer is not None and thread not in group.threads:
            source = rank_of(writer[0])
            if thread is None:
                others = [g for g in self.groups if of_rank(g) == source != group.rank]
                return Awaited(source, others, is_over=True)
            there = [self.group_of[thread]] if thread in self.group_of else []
            return Awaited(source, there, exact=tuple(there))
        only = self._only_rank(allocation, offset, group)
        if only is not None:
            return self._of_rank(group, only, None)
        if not allocation.number:
            return self._of_block(group, allocation, offset)
        if self.world.num_ranks == 1:
            return Awaited(None, [g for g in self.groups if g is not group])
        return Awaited(None, [])

    def _of_rank(self, group: Group, rank: int, writer: Writer | None) -> Awaited:
        """A rank is waited for: its thread that has stored before, or else all that waits there."""
        is_over = False
        if writer is not None and rank_of(writer[0]) == rank:
            thread = self.thread_of(writer)
            if thread is None and writer[0] in self.blocks and not is_atomic(writer[2]):
                return Awaited(rank, [], is_over=True)
            there = None if thread is None or thread in group.threads else self.group_of.get(thread)
            if there is not None and not self._misses(there, group):
                return Awaited(rank, [there], exact=(there,))
            is_over = thread is None and kernel_of(writer[0]) == group.launch.name and not is_atomic(writer[2])
        others = [g for g in self.groups if of_rank(g) == rank and g is not group]
        if rank == group.rank:  # those who wait in the same way, or for each other at a barrier, do not hold it up
            others = [g for g in others if g.chain[:1] != group.chain[:1] and g.wait.cells]
        return Awaited(rank, others, is_over)

    def _of_block(self, group: Group, allocation: Allocation, offset: int) -> Awaited:
        """A cell in shared memory to which no thread has stored: who did next to it, or else all that waits there."""
        writers = [self.thread_of(allocation.writers[at]) for at in near(allocation, offset, None)]
        known = _unique(self.group_of[t] for t in writers if t in self.group_of)
        known = [g for g in known if g.chain[:1] != group.chain[:1] and not self._misses(g, group)]
        if known:
            return Awaited(None, known[:1], exact=(known[0],))
        blocks = {thread.block for thread in group.threads}
        there = [g for g in self.groups if g is not group and blocks & {t.block for t in g.threads}]
        return Awaited(None, [g for g in there if not self._misses(g, group)] or there)

    def ranks_that_see(self, allocation: Allocation) -> set[int]:
        """The ranks that have an address for some memory, or whose NIC has."""
        if allocation not in self._seen_by:
            spaces = self.world.spaces.items()
            self._seen_by[allocation] = {n % NIC_NUMBERS for n, s in spaces if allocation in s.segments.values()}
        return self._seen_by[allocation]

    def is_private(self, cell: Cell | None) -> bool:
        """Whether a cell lies in global memory that no other rank sees."""
        allocation = None if cell is None else cell[0]
        if not isinstance(allocation, Allocation) or not allocation.number or allocation.freed:
            return False
        return self.world.num_ranks > 1 and len(self.ranks_that_see(allocation)) == 1

    def _misses(self, group: Group, other: Group) -> bool:
        """Whether a group waits at a barrier or a collective for threads of another one."""
        there = set(other.threads)
        return any(thread in there for thread in group.wait.absent)

    def thread_of(self, writer: Writer) -> Thread | None:
        """Who stored, if it is still there."""
        block = self.blocks.get(writer[0])
        thread = None if block is None or writer[1] >= len(block.threads) else block.threads[writer[1]]
        return None if thread is None or thread.exited else thread

    def _only_rank(self, allocation: Allocation, offset: int, group: Group) -> int | None:
        """The rank that stores to this cell, if the same cell of other ranks tells, or if there is one other rank."""
        writers = self.same_cell(allocation, offset)
        sources = {rank: rank_of(writer[0]) for rank, writer in writers.items()}
        num_ranks = self.world.num_ranks
        if len(sources) > 1:
            if len(set(sources.values())) == 1:
                return next(iter(sources.values()))
            shifts = {(source - rank) % num_ranks for rank, source in sources.items()}
            if len(shifts) == 1 and shifts != {0}:
                return (allocation.rank + shifts.pop()) % num_ranks
        said = named_source(allocation, offset)
        if said is not None and said < num_ranks:
            return said
        is_shared = sum(allocation in space.segments.values() for space in self.world.spaces.values()) > 1
        return 1 - group.rank if num_ranks == 2 and is_shared and group.rank < 2 else None

    def same_cell(self, allocation: Allocation, offset: int) -> dict[int, Any]:
        """rank -> who stored last to the same byte of its memory of the same name."""
        found = {}
        for rank, space in self.world.spaces.items():
            for other in space.segments.values():
                same = other.rank == rank != allocation.rank and other.name == allocation.name
                if same and other.nbytes == allocation.nbytes and offset in other.writers:
                    found[rank] = other.writers[offset]
        return found

    # --- the cause ----------------------------------------------------------------------------------------------

    def _close(self, awaited: list[list[Group]]) -> list[int]:
        """The transitive closure of who waits for whom; a group waits for itself if the waits go round."""
        reach = [sum(1 << self.number[other] for other in others) for others in awaited]
        for i in range(len(reach)):
            for j, mask in enumerate(reach):
                if mask >> i & 1:
                    reach[j] |= reach[i]
        return reach

    def waits_for(self, group: Group, other: Group) -> bool:
        return bool(self.reach[self.number[group]] >> self.number[other] & 1)

    def circle(self, group: Group) -> list[Group]:
        """The groups that a group waits for and that wait for it; itself among them, if there are any."""
        return [other for other in self.groups if self.waits_for(group, other) and self.waits_for(other, group)]

    def cause(self) -> Group | None:
        """The group that the report is about."""
        ends = []
        for group in self.groups:
            members = sum(1 << self.number[other] for other in self.circle(group))
            if not self.reach[self.number[group]] & ~members:
                ends.append(group)
        return min(ends, key=self._rank_among_causes, default=None)

    def _rank_among_causes(self, group: Group) -> tuple:
        """Best first: how well it is known why this ends in nothing; who holds up most; who is the best to tell it."""
        awaited, members = self.awaited[group], self.circle(group) or [group]
        is_known = any(member.wait.lacking for member in members) or awaited.rank is not None or len(members) > 1
        is_poll = group.cell is not None
        dependents = sum(self.waits_for(other, group) for other in self.groups)
        cell = group.cell
        is_unwritten = cell is not None and isinstance(cell[0], Allocation) and cell[1] not in cell[0].writers
        missed = 2  # 0: stores went to a cell of its name, 1: by whom it waits for to another one next to it
        if is_unwritten and cell is not None:
            around = near(cell[0], cell[1], awaited.rank)
            if around:
                is_kin = stem_of(cell[0], around[0]) == stem_of(cell[0], cell[1])
                missed = 0 if is_kin else 2 - (awaited.rank is not None)
        order = self.number[group]
        goes_round = bool(self.sure_reach[order] >> order & 1)
        is_of_another = awaited.rank not in (None, group.rank)
        tells = (
            not group.wait.lacking,
            group.report is None,
            not awaited.is_over,
            goes_round or not self.is_private(cell),  # no peer can end it, and no thread here surely waits for it
            missed,
            not goes_round,
            not is_of_another,
            not is_unwritten,
        )
        return not is_known, not (is_poll or group.wait.lacking), -dependents, *tells, order

    def way_round(self, group: Group) -> list[Group]:
        """The shortest way from a group back to it, without its end; empty if there is none."""
        awaited = {other: self.awaited[other].groups for other in self.groups}
        return self._shortest(group, self.sure) or self._shortest(group, awaited)

    def _shortest(self, group: Group, awaited: dict[Group, list[Group]]) -> list[Group]:
        before: dict[Group, Group] = {}
        queue = deque([group])
        while queue:
            here = queue.popleft()
            if group in awaited[here]:
                way = [here]
                while way[-1] is not group:
                    way.append(before[way[-1]])
                return way[::-1]
            for other in sorted(awaited[here], key=lambda g: self._far_from(g, here)):
                if other not in before and other is not group:
                    before[other] = here
                    queue.append(other)
        return []

    def is_sure(self, group: Group, other: Group) -> bool:
        """Whether a group waits for this other one, not only for some thread of its rank."""
        awaited = self.awaited[group]
        if other in awaited.exact or self.index[group] in self.indices[other]:
            return True
        if self.is_private(group.cell) or self.has_lost_warps[other.launch]:  # they may be the ones that are waited for
            return False
        return sum(there.cell is not None for there in awaited.groups) < 2

    def _far_from(self, group: Group, here: Group) -> tuple[bool, bool, int]:
        """How little a group has to do with another one that waits for it: with its threads, or with its index."""
        groups = self.awaited[group].groups
        return here not in groups, self.index[here] not in self.indices[group], len(groups)


def of_rank(group: Group) -> int:
    """The rank of a group, or whose NIC it is."""
    return group.rank % NIC_NUMBERS


def _unique(groups: Any) -> list[Group]:
    return list(dict.fromkeys(groups))
