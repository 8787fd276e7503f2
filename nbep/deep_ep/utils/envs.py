"""Source: DeepEP deep_ep/utils/envs.py"""

from typing import Any

from nbep.host.elastic.buffer import get_logical_domain_size, get_physical_domain_size

__all__ = [
    "check_nvlink_connections",
    "check_torch_deterministic",
    "get_logical_domain_size",
    "get_physical_domain_size",
]


def check_nvlink_connections(group: Any) -> None:
    """Nothing to check before: a Buffer asks the driver who reaches whom, and names a pair that does not."""


def check_torch_deterministic() -> None:
    """Nothing to check: no output of nbep is read before the kernel has written it."""
