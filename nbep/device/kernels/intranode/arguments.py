"""What every function of a kernel inside a node needs."""

from typing import NamedTuple

from nbep.device.protocols.peers import Bounds, Peers
from nbep.device.protocols.teams import Team


class Context(NamedTuple):
    """A kernel's arguments that are no arrays, and what this thread is there for.

    shape, sizes: those of the kernel's signature
    places: where the arrays lie in the symmetric memory, of a kernel without rings; else 0
    team: who works with this thread, for which peer and channel; -1 for what a kernel does not have
    """

    peers: Peers
    bounds: Bounds
    shape: tuple
    sizes: tuple
    places: tuple | int
    team: Team
