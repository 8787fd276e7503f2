"""What a launch may ask for: the limits of an H100, as far as they are known without machine code.

How many registers a kernel takes is not known: on a GPU it may be fewer blocks that an SM holds.

Source: CUDA C++ Programming Guide, "Compute Capabilities"
"""

from __future__ import annotations

from typing import Any

from .code import KernelTypeError

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
NUM_SMS = 132
SHARED_BYTES = 48 << 10  # of a block: numba-cuda does not ask for more
SM_WARPS, SM_BLOCKS, SM_SHARED_BYTES = 64, 32, 228 << 10
RESERVED_BYTES = 1 << 10  # of each block's shared memory


def blocks_at_once(threads: int, shared_bytes: int) -> int:
    """How many blocks the card holds at once, that is also the most of a cooperative launch."""
    if shared_bytes > SHARED_BYTES:
        return 0
    by_shared = SM_SHARED_BYTES // (shared_bytes + RESERVED_BYTES)
    return NUM_SMS * min(SM_BLOCKS, SM_WARPS // -(-threads // 32), by_shared)


def check_shared(name: str, static: int, dynamic: int) -> None:
    """Raises: ValueError for dynamic shared memory that no launch can have; KernelTypeError for static"""
    if static > SHARED_BYTES:
        raise KernelTypeError(f"{name}: {static} bytes of static shared memory; there are {SHARED_BYTES}")
    if not 0 <= dynamic <= SHARED_BYTES - static:
        beside = f", beside {static} bytes of static shared memory" if static else ""
        raise ValueError(
            f"{name}: {dynamic} bytes of dynamic shared memory{beside}; must be 0 to {SHARED_BYTES - static}"
        )


def check_cooperative(name: str, blocks: int, most: Any) -> None:
    """Raises: ValueError for more blocks than can be there at once"""
    if blocks > most:
        raise ValueError(
            f"{name}: {blocks} blocks of a cooperative launch, which all wait for each other; at most {most} of this "
            "size are on the device at once: see max_cooperative_grid_blocks"
        )
