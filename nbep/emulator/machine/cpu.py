"""The CPU as a reader and a writer of memory, and one who waits. Nothing is checked here; see `models.host`."""

from typing import Any


class Cpu:
    """The CPU of all ranks."""

    def wait(self, known: Any) -> None:
        """It has waited for an event where so much is known."""

    def read(self, allocation: Any, offset: int, nbytes: int, polls: bool) -> None:
        """It is about to read bytes. polls: a cell with acquire order; else plainly."""

    def write(self, allocation: Any, offset: int, nbytes: int) -> None:
        """It is about to write bytes."""

    def has_written(self, allocation: Any, offset: int, nbytes: int) -> None:
        """It has. No store of a thread wakes who waits for that: let the scheduler look, also where it has before."""
        for threads in list(allocation.watchers.values()):
            for thread in list(threads):
                thread.has_looked_again = False
