from .machine.errors import (
    DataRace,
    DeadlockError,
    Divergence,
    EmulatorError,
    HostAtomic,
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
from .machine.memory import AddressSpace, Allocation, Mapping
from .machine.stream import Event, Launch, Stream
from .machine.thread import FULL_MASK, Thread, current_thread
from .run import RankContext
from .world import World

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
    "HostAtomic",
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
