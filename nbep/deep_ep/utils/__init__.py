"""What programs import from deep_ep.utils: a module in v1.2.1, later a package.

Source: DeepEP deep_ep/utils.py; later deep_ep/utils/
"""

from nbep.deep_ep.utils.envs import check_nvlink_connections
from nbep.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]
