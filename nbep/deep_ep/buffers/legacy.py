"""Source: DeepEP deep_ep/buffers/legacy.py"""

from nbep.deep_ep.buffer import Buffer
from nbep.host.config import Config
from nbep.host.events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
