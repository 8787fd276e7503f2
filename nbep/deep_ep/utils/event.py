"""Source: DeepEP deep_ep/utils/event.py"""

from nbep.host.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
