"""A kernel that tells other ranks something, and does not wait for what they tell it: a wait that is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..machine.memory import Allocation
from ..machine.names import name_of
from ..machine.orders import ACQUIRES, RELEASES
from ..models.history import Loaded, Stored
from ..models.knowledge import Access, Owner
from .causes import Cause

if TYPE_CHECKING:
    from ..run import Run


def wait_missing(world: Run, earlier: Access, access: Access) -> Cause | None:
    """That one of two ranks has gone on in a kernel, and has waited there for no thread.

    The other one has not left it yet: that is what the wait is for. One of the two accesses is of this kernel.
    """
    for ahead, behind in ((earlier, access), (access, earlier)):
        if ahead.owner.rank != behind.owner.rank and (signal := _signal_without_wait(world, ahead, behind.owner)):
            who, whom = name_of(ahead.owner.rank), name_of(behind.owner.rank)
            return Cause(
                "no wait", (signal.cell,), words={"kernel": signal.store.owner.kernel, "who": who, "whom": whom}
            )
    return None


def _signal_without_wait(world: Run, access: Access, behind: Owner) -> Stored | None:
    """The last signal to the memory of the one behind, by such a kernel. It tells all ranks, as a barrier does.

    access: of the one ahead. One with an order may be a signal itself: its kernel may wait after that. So may a later
    one, for a signal of the kernel that the other has not left
    """
    ahead = access.owner
    has_waited: set[tuple[str, int]] = set()
    loaded: set[tuple[Allocation, int]] = set()
    has_answered: set[tuple[str, int]] = set()
    signals: list[Stored] = []
    ranks: dict[object, set[int]] = {}  # that a line of a launch has signalled
    for event in reversed(world.history.between(0, world.history.now)):
        if isinstance(event, Loaded) and event.load.owner.rank == ahead.rank and event.load.order in ACQUIRES:
            has_waited.add((event.load.owner.kernel, event.load.owner.launch))
            loaded.add((event.allocation, event.load.begin))
        elif isinstance(event, Stored) and event.store.owner.rank == behind.rank and event.store.order in RELEASES:
            if (event.allocation, event.store.begin) in loaded:
                has_answered.add((event.store.owner.kernel, event.store.owner.launch))
        elif isinstance(event, Stored) and event.store.owner.rank == ahead.rank and event.store.order in RELEASES:
            signals += [event] if event.allocation.rank == behind.rank else []
            ranks.setdefault((event.store.owner.launch, event.store.site), set()).add(event.allocation.rank)
    for event in signals:
        kernel, number = event.store.owner.kernel, event.store.owner.launch
        is_one = kernel in (ahead.kernel, behind.kernel) and (kernel, number) not in has_waited | has_answered
        is_here = (ahead.kernel, ahead.launch) == (kernel, number) and not access.reach
        is_past = is_here or _has_left(world, ahead.rank, kernel, number)
        if is_one and is_past and len(ranks[number, event.store.site]) == world.num_ranks:
            if not _has_left(world, behind.rank, kernel, number):
                return event
    return None


def _has_left(world: Run, rank: int, kernel: str, number: int) -> bool:
    """Whether a rank has run a kernel to its end for the given time."""
    queued = [item for s in world.streams if s.rank == rank for what, item, _ in s.queue if what == "launch"]
    running = [launch for launch in world.launches if launch.rank == rank]
    open_ = [launch.number for launch in (*queued, *running) if launch.name == kernel]
    return world.num_launches[rank, kernel] >= number and number not in open_
