"""The world: an emulated machine, and what it says when a run is stopped.

    world = World(num_ranks=2, seed=7)
    results = world.run([host0, host1])     # one host function per rank

The same seed replays the same run exactly; another seed is another interleaving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import ref

from greenlet import getcurrent

from .machine.errors import EmulatorError, Uninitialized
from .machine.faults import AccessFault, Diverged, LaneLeft, NeverFull, NoSegment
from .models.host import HostRace
from .models.races import Race
from .reports.deadlock import deadlock_error
from .reports.faults import access_fault, diverged, lane_left, never_full, no_segment
from .reports.race import host_race, race
from .reports.unwritten import tell_who_writes
from .run import Run
from .schedule.scheduler import Host, Stuck

# Which words go with a fact.
WORDS: dict[type, Callable[[Any], EmulatorError]] = {
    AccessFault: access_fault,
    NoSegment: no_segment,
    Diverged: diverged,
    LaneLeft: lane_left,
    NeverFull: never_full,
    Race: race,
    HostRace: host_race,
    Stuck: deadlock_error,
}


class World(Run):
    """An emulated machine with all of its ranks in this process; see `Run` for its arguments."""

    latest: ClassVar[Callable[[], World | None]] = lambda: None  # the world that was made last, if it is still there

    def __init__(self, num_ranks: int, seed: int = 0, **options: Any):
        super().__init__(num_ranks, seed, **options)
        World.latest = ref(self)

    def error_of(self, fact: Any) -> EmulatorError:
        return WORDS[type(fact)](fact)

    def explain(self, error: BaseException) -> None:
        if isinstance(error, Uninitialized):
            tell_who_writes(error, self)

    def show_threads(self) -> None:
        """Somebody wants to look at them."""

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run one host function per rank to the end, and all they launched; their results by rank.

        Raises:
            Exception: the first one of a host or a kernel, with its own traceback and a note that names the rank
        """
        if len(functions) != self.num_ranks:
            raise ValueError(f"functions: {len(functions)} for {self.num_ranks} ranks")
        self.hosts = [Host(rank, function, getcurrent()) for rank, function in enumerate(functions)]
        for host in self.hosts:
            host.reluctance = self.strategy.host_reluctance(host.rank, self.num_ranks)
        self.runnable += self.hosts
        try:
            self._run_guarded(self._all_done)
        finally:
            self.is_over = True
        self.order.run_over()
        self._abort()  # what serves others has nothing left to do
        return [host.result for host in self.hosts]

    def _all_done(self) -> bool:
        is_idle = not self.operations and all(launch.is_service for launch in self.launches)
        return is_idle and all(host.finished for host in self.hosts)
