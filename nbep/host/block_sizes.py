"""Block sizes of nbep's kernels that suit a target: few threads on the emulator, which runs one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from nbep.device.layout.low_latency import MAX_RANKS
from nbep.device.protocols.staging import STAGE_STRIDE
from nbep.host.target.base import Runtime

WARP = 32
_sizes: WeakKeyDictionary[Runtime, BlockSizes] = WeakKeyDictionary()


@dataclass
class BlockSizes:
    """Threads of a block.

    layout       of get_dispatch_layout and of the casts
    notify       of the notify kernels, at least
    low_latency  of low-latency dispatch and combine
    mix_roles    default of Config.mix_roles
    most_ring    of dispatch and combine, at most; None: a warp for each rank, two at least
    """

    layout: int
    notify: int
    low_latency: tuple[int, int]
    mix_roles: bool
    most_ring: int | None

    def ring(self, num_ranks: int) -> int:
        """Of dispatch and combine, if no config says it: a multiple of 32 * num_ranks, at least 64, at most 768."""
        return self.most_ring or max(2 * WARP, num_ranks * WARP)


def block_sizes(runtime: Runtime) -> BlockSizes:
    """Those of a rank."""
    if runtime not in _sizes:
        if runtime.target == "cuda":
            low_latency = low_latency_threads(runtime.has_tma, runtime.max_smem_bytes)
            _sizes[runtime] = BlockSizes(256, 128, low_latency, True, 768)
        else:
            _sizes[runtime] = BlockSizes(WARP, WARP, (3 * WARP, 3 * WARP), False, None)
    return _sizes[runtime]


def low_latency_threads(has_tma: bool, max_smem_bytes: int) -> tuple[int, int]:
    """Of low-latency dispatch and combine on a GPU."""
    if has_tma:
        return 640, 512
    fit = (max_smem_bytes - 4 * MAX_RANKS) // STAGE_STRIDE  # warps of combine, beside its table
    return 512, WARP * min(12, fit)
