"""Source: DeepEP deep_ep/buffers/elastic.py"""

from nbep.deep_ep.elastic import ElasticBuffer
from nbep.host.elastic.handle import EPHandle
from nbep.host.events import EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
