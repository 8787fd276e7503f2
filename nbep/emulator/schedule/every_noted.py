"""What the blocks of a program touch in a run, what they leave in memory and what is known behind them: see `Parts`."""

from __future__ import annotations

from typing import Any

from ..machine.memory import Allocation
from ..models.knowledge import CPU_CLOCK, NOTHING, Access, Knowledge, Place, join_two, latest
from .every_step import Who, Words, name_of, words_of

Unit = tuple[int, str, int, int]  # rank, kernel, number of the launch, block
Made = tuple[int, tuple[str, int]]  # the rank of an allocation, and `made`
CPU: Unit = (-1, "", 0, 0)


def unit_of(who: Who) -> Unit:
    return who[:4] if who[1] else CPU


class Touched:
    """What a unit has accessed in a run, by words."""

    __slots__ = ("loads", "stores", "changed")

    def __init__(self) -> None:
        self.changed: set[Any] = set()  # by atomics
        self.loads: dict[Any, list[Access]] = {}
        self.stores: dict[Any, list[Access]] = {}

    def add(self, words: Words, access: Access) -> None:
        here = self.stores if access.verb == "store" else self.loads
        for word in words:
            here.setdefault(word, []).append(access)
        if access.is_atomic:
            self.changed.update(words)

    def common(self, other: Touched) -> set[Any]:
        """The words that both have touched, and one has stored to."""
        mine, others = self.stores.keys(), other.stores.keys()
        return (mine & others) | (mine & other.loads.keys()) | (others & self.loads.keys())

    def is_known(self, word: Any, known: Knowledge) -> bool:
        """Whether one who knows so much knows of all accesses to a word."""
        return not any(one.is_beyond(known.stores) for one in self.stores.get(word, ())) and not any(
            one.is_beyond(known.loads) for one in self.loads.get(word, ())
        )


class Noted:
    """What the units of the run under way have touched.

    places: of the launch of each
    held: what those of the focus have left in memory, by words; is_final: words that others have stored over since
    of_hosts: each access of a host, with what hosts knew then
    knowledge: of each unit, what its threads knew when they left it
    is_unclear: whether two allocations have one name, or it is not known what was left in a word
    """

    def __init__(self, focus: frozenset[Unit]) -> None:
        self.focus = focus
        self.held: dict[Any, bytes] = {}
        self.is_final: set[Any] = set()
        self.touched: dict[Unit, Touched] = {}
        self.places: dict[Unit, Place] = {}
        self.of_hosts: list[tuple[Words, Access, Knowledge]] = []
        self.knowledge: dict[Unit, Knowledge] = {}
        self.allocations: dict[Made, Allocation] = {}
        self.histories: dict[Made, Any] = {}
        self.names: dict[Made, set[tuple[int, str]]] = {}
        self.is_unclear = False

    def note(self, unit: Unit, place: Place, allocation: Allocation, access: Access) -> None:
        if unit not in self.touched:
            self.touched[unit], self.places[unit] = Touched(), place
        words = self.words_of(allocation, access)
        self.touched[unit].add(words, access)
        if access.verb == "store" and unit not in self.focus:
            self.store_over(words)

    def note_host(self, allocation: Allocation, access: Access, knowledge: Knowledge) -> None:
        words = self.words_of(allocation, access)
        self.of_hosts.append((words, access, knowledge))
        if access.verb == "store":
            self.store_over(words)

    def note_exit(self, unit: Unit, place: Place, knowledge: Knowledge) -> None:
        if unit not in self.touched:
            self.touched[unit], self.places[unit] = Touched(), place
        self.knowledge[unit] = join_two(self.knowledge.get(unit, NOTHING), knowledge)

    def known_behind(self) -> dict[Unit, tuple[Any, ...]]:
        """What is known behind each unit: which launches are over, and how much hosts have done."""
        places = {unit[:3]: place for unit, place in self.places.items()}
        return {
            unit: tuple(
                (
                    frozenset(launch for launch, place in places.items() if place.end <= latest(numbers, place.clock)),
                    sum(access.number <= latest(numbers, CPU_CLOCK) for _, access, _ in self.of_hosts),
                )
                for numbers in (one.stores, one.loads)
            )
            for unit, one in self.knowledge.items()
        }

    def store_over(self, words: Words) -> None:
        """Another unit has stored to words: what those of the focus have left there must have been seen before."""
        self.is_final |= words & self.held.keys()
        stored = (self.touched[unit].stores for unit in self.focus if unit in self.touched)
        self.is_unclear |= any(not words.isdisjoint(here.keys() - self.held.keys()) for here in stored)

    def words_of(self, allocation: Allocation, access: Access) -> Words:
        name = allocation.rank, allocation.made
        self.names.setdefault(name, set()).add(name_of(allocation))
        self.is_unclear |= self.histories.setdefault(name, allocation.messages) is not allocation.messages
        if name not in self.allocations or self.allocations[name].freed:  # an array is mapped again for each launch
            self.allocations[name] = allocation
        return words_of(name, access.begin, access.end - access.begin)

    def hold(self) -> None:
        """Hold what units of the focus have stored so far, and what others have not stored over since."""
        stored = set[Any]().union(*map(self.stored_by, self.focus)) - self.is_final
        memories = {name: one.memory for name, one in self.allocations.items() if not one.freed}
        for name, word in stored:
            if name in memories:
                self.held[name, word] = bytes(memories[name][4 * word : 4 * word + 4])

    def stored_by(self, unit: Unit) -> set[Any]:
        return set(self.touched[unit].stores) if unit in self.touched else set()

    def is_viewed(self, word: Any) -> bool:
        """Whether a host may read a word without asking."""
        name, at = word
        return any(begin < 4 * at + 4 and 4 * at < end for begin, end in self.allocations[name].viewed)

    def is_for_hosts(self, word: Any) -> bool:
        """Whether hosts access a word, or may do so without asking."""
        return self.is_viewed(word) or any(word in words for words, _, _ in self.of_hosts)

    def met_by_hosts(self) -> set[Unit]:
        """Units with which hosts have something in common that nothing orders."""
        found = set()
        for unit, touched in self.touched.items():
            place = self.places[unit]
            known = min(latest(place.start.stores, CPU_CLOCK), latest(place.start.loads, CPU_CLOCK))
            for words, access, knowledge in self.of_hosts:
                is_met = words & touched.stores.keys() or (access.verb == "store" and words & touched.loads.keys())
                over = min(latest(knowledge.stores, place.clock), latest(knowledge.loads, place.clock))
                if is_met and place.end > over and access.number > known:
                    found.add(unit)
                    break
        return found
