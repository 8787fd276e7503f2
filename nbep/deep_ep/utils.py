"""What programs import from deep_ep.utils: a module in v1.2.1, later a package, all of whose modules are this one.

Source: DeepEP deep_ep/utils.py; later deep_ep/utils/envs.py, event.py and math.py
"""

import sys
from typing import Any

from nbep.host.cast import per_token_cast_back, per_token_cast_to_fp8
from nbep.host.elastic.buffer import get_logical_domain_size, get_physical_domain_size
from nbep.host.events import EventHandle, EventOverlap

__all__ = [
    "EventHandle",
    "EventOverlap",
    "align",
    "ceil_div",
    "check_nvlink_connections",
    "check_torch_deterministic",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
]

envs = event = math = sys.modules[__name__]
sys.modules.update({f"{__name__}.{name}": envs for name in ("envs", "event", "math")})


def check_nvlink_connections(group: Any) -> None:
    """Nothing to check before: a Buffer asks the driver who reaches whom, and names a pair that does not."""


def check_torch_deterministic() -> None:
    """Nothing to check: no output of nbep is read before the kernel has written it."""


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    return ceil_div(x, y) * y
