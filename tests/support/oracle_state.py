"""Where an interleaving of a program of `oracle` has come to, and sets of events: an int with a bit for each."""

from __future__ import annotations

from collections.abc import Iterator


class State:
    """Where an interleaving has come to.

    memory: its bytes; none once it is freed
    at: the next step of each thread; -1: not started. parked: who has arrived somewhere and waits
    base, over: what comes before the next step of each, by base causality; by nbep's rule for loads
    before, overs: the same of each event that has happened; seen: the writes that come before it in observation order;
    chain: the same, for who observes it; heads: of a write, the first operations of the release patterns that it ends
    made: the accesses that have happened; failed: of those, compare-and-swaps that have only read
    writes: those that write to each (cell, size), in order, and what
    met: who has come to a barrier or a collective, by its key. places: how far each stream has come
    points: what comes before the next task of a stream, and before an event
    is_in_vain: the last step is a look of a wait that the other one would not have ended, either
    """

    is_in_vain = False

    LISTS = "memory", "writers", "at", "parked", "base", "over", "before", "overs", "seen", "chain", "heads", "answers"
    DICTS = "writes", "met", "places", "points"

    def copy(self) -> State:
        new = State.__new__(State)
        new.made, new.failed, new.happened = self.made, self.failed, self.happened
        for name in State.LISTS:
            setattr(new, name, getattr(self, name).copy())
        for name in State.DICTS:
            setattr(new, name, getattr(self, name).copy())
        return new

    def key(self) -> tuple:
        lists = [tuple(getattr(self, name)) for name in State.LISTS]
        return (*lists, *(frozenset(getattr(self, name).items()) for name in State.DICTS))


def bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def union(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] | b[0], a[1] | b[1]
