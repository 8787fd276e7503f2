"""Source: DeepEP deep_ep/utils/envs.py"""

from typing import Any


def check_nvlink_connections(group: Any) -> None:
    """Nothing to check before: a Buffer asks the driver who reaches whom, and names a pair that does not."""


def check_torch_deterministic() -> None:
    """Nothing to check: no output of nbep is read before the kernel has written it."""
