"""How a scheduler makes its choices: a strategy says who runs next, for how long, and when what is under way happens.

    uniform                  anyone who can run; some ranks and warps are slow under some seeds (the default)
    few_preemptions[:D[:N]]  the warp of highest priority runs until it waits; D times it is put last, somewhere in the
                             first N primitive calls. Bugs that need few preemptions show soon under it, see PCT
    starved                  one rank hardly runs, under some seeds only its host or one of its blocks
    late                     what is under way happens last: stores of `delayed`, bulk copies, starts of kernels

Each replays from its name and its seed. `uniform` meets most faults; the others go where it seldom goes.

Source: Burckhardt, Kothari, Musuvathi, Nagarakatte, "A Randomized Scheduler with Probabilistic Guarantees of Finding
Bugs", ASPLOS 2010 (PCT)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any

# The largest length of a quantum: one of these, by the seed, so that neighbouring seeds have different ones.
_LONGEST = (4096, 32, 4, 256, 2, 8)
_SLOW = 0.85  # how often a slow thread gives way
_SLOW_SHARE = 0.2
_STARVED = 0.98
_NEVER = 2.0**-20  # a rate that is as good as none: then things happen when nothing else can
_WHOLE_QUANTUM = 4096  # of a thread that is never preempted
ALONE = 1 << 40  # primitive calls: more than any run has


class Strategy:
    """`uniform`, and what the others replace of it.

    Attributes:
        name: as `strategy_of` reads it
        seed: of the run; all choices come from it
        operation_rate: the chance, at each step, that one of the operations under way happens
        slow_reluctance: how often slow threads and hosts give way when it is their turn
    """

    name = "uniform"
    slow_reluctance = _SLOW
    chooses_hosts = False  # whether it says which of the hosts that wait goes on
    world: Any = None  # whose threads it chooses from

    def __init__(self, seed: int, draws: random.Random):
        self.seed = seed
        self.draws = draws
        self.longest = _LONGEST[seed % len(_LONGEST)]
        self.operation_rate = 0.5 ** draws.randint(0, 5)
        self.slow_ranks: dict[int, bool] = {}

    def quanta(self, count: int) -> list[int]:
        """Lengths of quanta, less one, in primitive calls."""
        uniform, longest = self.draws.random, self.longest
        return [int(longest ** uniform()) - 1 for _ in range(count)]

    def reluctance(self, rank: int, block: int) -> float:
        """How often the threads of a new warp give way when it is their turn: `slow_reluctance`, or 0, as for seed 0.

        Some ranks are slow, and some warps of the others.
        """
        if self.seed == 0:
            return 0.0
        if rank not in self.slow_ranks:
            self.slow_ranks[rank] = self.draws.random() < _SLOW_SHARE
        return self.slow_reluctance if self.slow_ranks[rank] or self.draws.random() < _SLOW_SHARE else 0.0

    def host_reluctance(self, rank: int, num_ranks: int) -> float:
        """The same for a host; asked before anything runs."""
        return 0.0

    def wait_of(self, predicate: Callable[[], bool]) -> Callable[[], bool]:
        """The predicate for which a host waits, as it is to be asked."""
        return predicate

    def ready_list(self) -> Ready | None:
        """Where threads and hosts wait for their turn; None for a list of which anyone may come next."""
        return None


class Starved(Strategy):
    """One rank, or one part of it, runs when no other can, or hardly ever."""

    name = "starved"
    slow_reluctance = _STARVED

    def __init__(self, seed: int, draws: random.Random):
        super().__init__(seed, draws)
        self.rank = 0
        self.part = draws.choice(("all", "all", "kernels", "host", "block"))
        self.block = draws.choice((0, 0, 1, 1, 2, 3))
        self.choice = draws.random()

    def host_reluctance(self, rank: int, num_ranks: int) -> float:
        self.rank = int(self.choice * num_ranks)
        return self.slow_reluctance if rank == self.rank and self.part in ("all", "host") else 0.0

    def reluctance(self, rank: int, block: int) -> float:
        if rank != self.rank or self.part == "host":
            return 0.0
        return self.slow_reluctance if self.part != "block" or block == self.block else 0.0


class Late(Strategy):
    """What is under way happens when nothing else can, under some seeds a bit earlier."""

    name = "late"

    def __init__(self, seed: int, draws: random.Random):
        super().__init__(seed, draws)
        self.operation_rate = draws.choice((_NEVER, _NEVER, 2.0**-8))


class FewPreemptions(Strategy):
    """Priorities: the ready warp that has the highest runs; it changes at a few points of the run alone."""

    def __init__(self, seed: int, draws: random.Random, preemptions: int = 3, length: int = 20_000):
        super().__init__(seed, draws)
        self.name = f"few_preemptions:{preemptions}:{length}"
        self.points = sorted(draws.randrange(1, length + 1) for _ in range(preemptions))
        # Ranks, blocks or warps are what is ordered by priority: an attribute of threads.
        self.grain = draws.choice(("rank", "block", "warp_state", "warp_state"))
        self.priorities: dict[Any, float] = {}
        self.lowest = 0.0

    def quanta(self, count: int) -> list[int]:
        return [_WHOLE_QUANTUM - 1] * count

    def reluctance(self, rank: int, block: int) -> float:
        return 0.0

    def ready_list(self) -> Ready:
        return Ready(self)

    def group_of(self, thread: Any) -> Any:
        """Those who have one priority: a host, or what the grain says."""
        return getattr(thread, self.grain) if hasattr(thread, "warp_state") else thread

    def priority(self, thread: Any) -> float:
        """Of a thread or a host; the highest runs."""
        group = self.group_of(thread)
        if group not in self.priorities:
            self.priorities[group] = self.draws.random()
        return self.priorities[group]

    def put_last(self, thread: Any) -> None:
        """Let all others go before a thread's group."""
        self.lowest -= 1.0
        self.priorities[self.group_of(thread)] = self.lowest

    def quantum(self, calls: int, quantum: int) -> int:
        """A quantum that begins after so many primitive calls: no preemption lies inside."""
        while self.points and self.points[0] <= calls:
            self.points.pop(0)
        return min(quantum, self.points[0] - calls - 1) if self.points else quantum


class Alone(Strategy):
    """Each thread runs alone up to its next choice, and a tree chooses: nothing is drawn, and no thread is slow."""

    def __init__(self) -> None:
        super().__init__(0, random.Random(0))
        self.operation_rate = 1.0

    def quanta(self, count: int) -> list[int]:
        return [ALONE] * count

    def reluctance(self, rank: int, block: int) -> float:
        return 0.0

    def quantum(self, calls: int, quantum: int) -> int:
        return ALONE

    def put_last(self, thread: Any) -> None:
        """No thread is preempted."""


class Ready:
    """Threads and hosts by priority; as a list for those who only put some in.

    A place in the heap is that of a priority which may have changed: then it is put in again.
    """

    def __init__(self, strategy: FewPreemptions):
        self.strategy = strategy
        self.heap: list[tuple[float, int, Any]] = []
        self.count = 0
        self.last: Any = None  # who ran last

    def append(self, thread: Any) -> None:
        self.count += 1
        heappush(self.heap, (-self.strategy.priority(thread), self.count, thread))

    def extend(self, threads: Iterable[Any]) -> None:
        for thread in threads:
            self.append(thread)

    def __iadd__(self, threads: Iterable[Any]) -> Ready:
        self.extend(threads)
        return self

    def __len__(self) -> int:
        return len(self.heap)

    def __iter__(self) -> Iterator[Any]:
        return (thread for _, _, thread in self.heap)

    def clear(self) -> None:
        self.heap.clear()

    def take(self) -> Any:
        """The one that runs next."""
        while True:
            place, _, thread = heappop(self.heap)
            if -place == self.strategy.priority(thread):
                return thread
            self.append(thread)


STRATEGIES: dict[str, type[Strategy]] = {
    "uniform": Strategy,
    "few_preemptions": FewPreemptions,
    "starved": Starved,
    "late": Late,
}


def strategy_of(text: str | Strategy, seed: int, draws: random.Random) -> Strategy:
    """The strategy that a name asks for; behind few_preemptions their number may stand, and among how many calls.

    Raises: ValueError if there is none
    """
    if isinstance(text, Strategy):
        return text
    name, *numbers = text.split(":") if isinstance(text, str) else [""]
    made = STRATEGIES.get(name)
    allowed = 2 if made is FewPreemptions else 0
    are_numbers = all(number.isdecimal() and int(number) < 1 << 40 for number in numbers)
    if made is None or len(numbers) > allowed or not are_numbers:
        raise ValueError(f"strategy: got {text!r}; must be {', '.join(STRATEGIES)}, or few_preemptions:D or :D:N")
    if len(numbers) == 2 and int(numbers[1]) < 1:
        raise ValueError(f"strategy: got {text!r}; N must be at least 1")
    return made(seed, draws, *map(int, numbers))
