"""Where the tests run: on the emulator, or on a GPU whose virtual ranks are threads of this process.

NBEP_TEST_TARGET   emulator (default) or cuda
NBEP_TEST_ARRAYS   whose arrays nbep gets; see arrays.py. On a GPU torch (default), cupy or numba; on the emulator numpy
                   (default) or torch, which some tests that are marked emulator_only do not take
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest

TARGET = os.environ.get("NBEP_TEST_TARGET", "emulator")
if TARGET not in ("emulator", "cuda"):
    raise ValueError(f"NBEP_TEST_TARGET: got {TARGET!r}; must be emulator or cuda")

# Parameters of tests: a GPU has its own memory model.
GPU_HAS_ITS_OWN = pytest.mark.emulator_only("a GPU has its own memory model")
# The short part has `checked`, which takes the steps of a run under `sc` and looks at more; the thorough part has all.
SC = pytest.param("sc", marks=pytest.mark.thorough) if TARGET == "emulator" else "sc"
MEMORY_MODELS = [
    SC,
    pytest.param("delayed", marks=[GPU_HAS_ITS_OWN, pytest.mark.thorough]),
    pytest.param("checked", marks=GPU_HAS_ITS_OWN),
]

# Waits inside kernels: a rank that fails leaves its peers' kernels waiting, and the next test with them.
CUDA_TIMEOUT_MS = "5000"


def set_environment() -> None:
    """Settings of a GPU run. They count only if they are made before torch, CuPy and Numba are imported."""
    if TARGET != "cuda":
        return
    for name, value in {
        # A hardware queue for every stream: a kernel never starts behind another rank's spinning one.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # Memory that is handed out while kernels spin: torch's own allocator may wait for them in cudaMalloc, and
        # Numba in cuMemFree.
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "NUMBA_CUDA_MAX_PENDING_DEALLOCS_COUNT": str(1 << 30),
        "NUMBA_CUDA_MAX_PENDING_DEALLOCS_RATIO": "1.0",
        "NBEP_TIMEOUT_MS": CUDA_TIMEOUT_MS,
    }.items():
        os.environ.setdefault(name, value)


def unusable_reason() -> str | None:
    """Why no test can run on a GPU here, or None if they can."""
    from nbep.host.target.cuda import driver

    return driver.unusable_reason()


def spawn(fn: Callable[..., Any], num_ranks: int, args: Sequence[Any] = (), seed: int = 0, **options: Any) -> list[Any]:
    """nbep.spawn on the target. On a GPU the seed and on_deadlock mean nothing: threads run as they run."""
    import nbep

    if TARGET == "cuda":
        ignored = {"on_deadlock"} | ({"memory_model"} if options.get("memory_model") == "sc" else set())
        if unknown := options.keys() - ignored:
            raise ValueError(f"{', '.join(unknown)}: only the emulator knows them; mark the test emulator_only")
    return nbep.spawn(fn, num_ranks, TARGET, args, seed, **options)


def check_schedule(condition: bool) -> None:
    """Assert what every schedule of the emulator makes true, but a fast or slow GPU may not."""
    assert condition or TARGET != "emulator"
