"""The CPU as a reader and a writer of memory, and one who waits. Nothing is checked here; see `models.host`."""

from collections.abc import Iterable
from typing import Any


class Cpu:
    """The hosts of all ranks.

    has_looked: whether a host has read bytes, or asked for an event, since this was last set to False
    """

    has_looked = False

    def wait(self, known: Any) -> None:
        """It has waited for an event where so much is known."""

    def read(self, allocation: Any, offset: int, nbytes: int, polls: bool) -> None:
        """It is about to read bytes. polls: a cell with acquire order; else plainly."""
        self.has_looked = True

    def write(self, allocation: Any, offset: int, nbytes: int) -> None:
        """It is about to write bytes."""

    def frees(self, allocation: Any) -> None:
        """It is about to free an allocation."""

    def unmaps(self, allocation: Any, rank: int) -> None:
        """It is about to take an allocation from the address space of a rank that is not its owner."""

    def looks(self, allocation: Any, offset: int, nbytes: int) -> None:
        """It may read a word now, with acquire order, and would go on waiting."""

    def tells(self) -> Any:
        """What it knows, for others who hear of it where they meet."""

    def hears(self, told: Iterable[Any]) -> None:
        """It has met others, who have told so much."""

    def meets(self) -> None:
        """It has waited, and has looked at nothing: so for other hosts, and nobody has said for which."""

    def has_written(self, allocation: Any, offset: int, nbytes: int) -> None:
        """It has. No store of a thread wakes who waits for that: let the scheduler look, also where it has before."""
        for threads in list(allocation.watchers.values()):
            for thread in list(threads):
                thread.has_looked_again = False
