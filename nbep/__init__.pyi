__version__: str

from .emulator import DataRace, DeadlockError, EmulatorError
from .host.buffer import Buffer
from .host.cast import per_token_cast_back, per_token_cast_to_fp8
from .host.config import Config
from .host.elastic.buffer import ElasticBuffer
from .host.elastic.handle import EPHandle
from .host.events import EventHandle, EventOverlap
from .host.faults import NetworkError
from .host.handles import DispatchHandle
from .host.ranks.comm import InProcessComm
from .host.ranks.timeouts import PeerTimeout
from .host.shared_memory import SharedMemory
from .host.spawn import spawn
from .host.transport.base import NicOptions
from .lab import debug

__all__ = [
    "Buffer",
    "Config",
    "DataRace",
    "DeadlockError",
    "DispatchHandle",
    "EPHandle",
    "ElasticBuffer",
    "EmulatorError",
    "EventHandle",
    "EventOverlap",
    "InProcessComm",
    "NetworkError",
    "NicOptions",
    "SharedMemory",
    "PeerTimeout",
    "debug",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "spawn",
]
