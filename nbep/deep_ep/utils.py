"""What programs import from deep_ep.utils.

Source: DeepEP deep_ep/utils.py
"""

from typing import Any

from nbep.host.events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap", "check_nvlink_connections"]


def check_nvlink_connections(group: Any) -> None:
    """Nothing to check before: a Buffer asks the driver who reaches whom, and names a pair that does not."""
