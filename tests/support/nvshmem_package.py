"""NVSHMEM's package, which most environments lack. `.ci/nightly nvshmem` has it and says so:
then its absence is no excuse."""

import os
import sys
from pathlib import Path

import pytest

REQUIRED = "NBEP_TEST_NVSHMEM"


def include_folder() -> Path:
    """Where NVSHMEM's headers are; skips the test if they are not installed."""
    if sys.platform != "linux":
        pytest.skip("NVSHMEM is Linux's")
    from nbep.device.network import nvshmem_library

    try:
        nvshmem_library.archive()
        return nvshmem_library.include_folder("nvshmem")
    except nvshmem_library.NvshmemMissing as error:
        skip_or_fail(str(error))


def skip_or_fail(reason: str):
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, but: {reason}")
    pytest.skip(reason)
