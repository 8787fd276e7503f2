"""Where DeepEP's main has its buffers: deep_ep.buffers.legacy that of v1.2.1, deep_ep.buffers.elastic ElasticBuffer."""

import sys

from nbep.deep_ep import buffer as legacy
from nbep.deep_ep import elastic

__all__ = ["elastic", "legacy"]
sys.modules[f"{__name__}.elastic"], sys.modules[f"{__name__}.legacy"] = elastic, legacy
