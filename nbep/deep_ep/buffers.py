"""Where DeepEP's main has its buffers: deep_ep.buffers.legacy that of v1.2.1, deep_ep.buffers.elastic ElasticBuffer."""

from nbep.deep_ep import buffer as legacy
from nbep.deep_ep import elastic

__all__ = ["elastic", "legacy"]
