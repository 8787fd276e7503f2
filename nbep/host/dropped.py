"""Memory that is no longer used, until all its ranks give it back together: of Buffers that went away without
`destroy`, and of those that were destroyed while somebody held an array of their memory.

 rank 0   drops buffer (4, 7)      makes a Buffer: "I hold (4, 7)" --+--> all ranks of (4, 7) hold it: they close it
 rank 1   drops it later           makes a Buffer: "I hold (4, 7)" --+

To give memory back is collective, and Python drops an object when it likes: in one rank's garbage collector, while an
exception travels in another. A destructor that waits for the other ranks, as DeepEP's does, then hangs. So what was
dropped waits for the next Buffer that the same ranks make together, and for no rank in particular. A rank that still
has an array of it does not name it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from nbep.host.arguments import refuse
from nbep.host.reports import KernelReport
from nbep.host.target.base import Runtime
from nbep.host.target.memory import SymmetricMemory

Name = tuple[int, ...]  # the number that each rank has given to the buffer: no two buffers of a rank have one


class Dropped(Protocol):
    """What a Buffer holds. is_shown: as SymmetricMemory's"""

    name: Name
    runtime: Runtime

    @property
    def is_shown(self) -> bool: ...
    def close(self) -> None: ...


class Used(Dropped, Protocol):
    """The same, with the report of its kernels."""

    report: KernelReport


class DestroyedOnce:
    """The end of a Buffer and of an ElasticBuffer, which hold memory until it is destroyed, or they go away."""

    _memory: Used | None
    explicitly_destroy: bool

    def _give_back(self) -> None:
        """Collective. Raises: ValueError if it is destroyed already, and what closing the memory raises"""
        memory = self._memory
        if memory is None:
            refuse("buffer", "one that is destroyed already", "destroyed once")
        memory.runtime.check_caller("destroy")
        self._memory = None
        memory.close()

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is None:
            return
        with suppress(Exception):
            memory.report.warn()
        if self.explicitly_destroy:
            warnings.warn(f"{self!r} goes away without destroy()", RuntimeWarning, stacklevel=2)
        else:
            keep_dropped(memory)


class KeptMemory:
    """Memory of a destroyed Buffer that an array shows, on one rank at least."""

    def __init__(self, name: Name, runtime: Runtime, memories: Sequence[SymmetricMemory]):
        self.name = name
        self.runtime = runtime
        self._memories = memories

    @property
    def is_shown(self) -> bool:
        return any(memory.is_shown for memory in self._memories)

    def close(self) -> None:
        for memory in self._memories:
            memory.free()


def keep_dropped(memory: Dropped) -> None:
    """Only its kernels still use the memory."""
    memory.runtime.dropped[memory.name] = memory


def idle_names(runtime: Runtime) -> list[Name]:
    """What this rank holds and does not use."""
    return [name for name, memory in runtime.dropped.items() if not memory.is_shown]


def give_back_dropped(runtime: Runtime, held: Sequence[Iterable[Name]]) -> None:
    """Close what all the ranks that had made it have dropped. Collective; held: what each of the ranks here holds."""
    for name in sorted(set.intersection(*map(set, held))):
        if len(name) != len(held):
            continue  # made by other ranks too, who are not here
        try:
            runtime.dropped.pop(name).close()
        except Exception as error:
            text = f"the end of a Buffer that was dropped without destroy() has failed: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
