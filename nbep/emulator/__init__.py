"""A seeded emulator of GPU threads: all threads of all blocks of all ranks, interleaved at every primitive.

It knows nothing of expert parallelism.  Read in this order:

    kinds, memory   bytes at addresses, one address space per rank
    orders          memory orders and scopes
    access, thread  what one thread can do; `faults` explains what it must not, and `source` finds the line
    block, warp     where threads meet
    bulk            copies that happen later, and the mbarriers that say when
    scheduler       who runs next, and what a deadlock is; `report` tells it
    stream, world   launches, events, ranks
    delayed         stores that are seen as late as their order allows
    checked         accesses to the same bytes that nothing orders; `knowledge` is what threads know of each other's,
                    `data_race` the report
    tracing         calls an observer at every access
    process         one rank per process, as under mpiexec
"""

from .errors import (
    DataRace,
    DeadlockError,
    Divergence,
    EmulatorError,
    Misaligned,
    NonCoherent,
    OutOfBounds,
    ProxyFence,
    ReadOnly,
    Trap,
    Uninitialized,
    Unmapped,
    UseAfterFree,
)
from .memory import AddressSpace, Allocation, Mapping
from .stream import Event, Launch, Stream
from .thread import FULL_MASK, Thread, current_thread
from .world import RankContext, World

__all__ = [
    "FULL_MASK",
    "AddressSpace",
    "Allocation",
    "DataRace",
    "DeadlockError",
    "Divergence",
    "EmulatorError",
    "Event",
    "Launch",
    "Mapping",
    "Misaligned",
    "NonCoherent",
    "OutOfBounds",
    "ProxyFence",
    "RankContext",
    "ReadOnly",
    "Stream",
    "Thread",
    "Trap",
    "Uninitialized",
    "Unmapped",
    "UseAfterFree",
    "World",
    "current_thread",
]
