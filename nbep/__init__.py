"""Expert-parallel dispatch and combine from one kernel source: on GPUs through Numba, on CPUs through an emulator.

def main(comm):                                    # once per rank
    buffer = nbep.Buffer(comm, num_nvl_bytes=1 << 20)
    ...

results = nbep.spawn(main, num_ranks=4)            # or main(MPI.COMM_WORLD) under mpiexec
"""

from nbep import starting  # noqa: F401 - before all that takes long

# isort: split
from nbep import debug
from nbep.emulator import DataRace, DeadlockError, EmulatorError
from nbep.host.buffer import Buffer
from nbep.host.cast import per_token_cast_back, per_token_cast_to_fp8
from nbep.host.config import Config
from nbep.host.events import EventHandle, EventOverlap
from nbep.host.faults import NetworkError
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.ranks.comm import InProcessComm
from nbep.host.ranks.timeouts import PeerTimeout
from nbep.host.spawn import spawn
from nbep.host.symmetric import NodeMemory
from nbep.host.transport.base import NicOptions
from nbep.version import __version__ as __version__

__all__ = [
    "Buffer",
    "Config",
    "DataRace",
    "DeadlockError",
    "DispatchHandle",
    "EmulatorError",
    "EventHandle",
    "EventOverlap",
    "InProcessComm",
    "NetworkError",
    "NicOptions",
    "NodeMemory",
    "PeerTimeout",
    "debug",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "spawn",
]
