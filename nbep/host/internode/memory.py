"""One rank's share of the mode between nodes: its workspace beside the RDMA buffer, and the size of its blocks."""

from __future__ import annotations

from nbep.device.kernels.internode.arguments import MAX_WARPS, MAX_WARPS_BEFORE_SM90, Progress
from nbep.device.kernels.internode.cached_notify import internode_cached_notify
from nbep.device.kernels.internode.combine import combine_smem_bytes, kernel_for, most_warps
from nbep.device.kernels.internode.dispatch import internode_dispatch
from nbep.device.kernels.internode.notify_dispatch import internode_notify_dispatch
from nbep.device.layout.internode import MAX_CHANNELS
from nbep.device.layout.intranode import ALIGNMENT_BYTES, align_up
from nbep.host.arguments import refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.rdma_memory import RdmaMemory
from nbep.host.target.base import Kernel, Runtime


def warps_that_fit(runtime: Runtime, most: int) -> int:
    """For how many of most warps a block has registers, and room in its shared memory, in combine too."""
    of_warp = combine_smem_bytes(32) - combine_smem_bytes(0)
    fit = (runtime.max_smem_bytes - combine_smem_bytes(0)) // of_warp
    return min(most if runtime.has_tma else MAX_WARPS_BEFORE_SM90, fit)


def check_nodes(runtime: Runtime, num_nodes: int) -> None:
    """Raises: ValueError if the card's blocks have no warp for each node and the coordinators"""
    most = warps_that_fit(runtime, most_warps(num_nodes)) - 2
    if num_nodes > most:
        refuse(
            "group", f"{num_nodes} nodes", f"at most {most} nodes on this GPU: a block of combine needs a warp for each"
        )


class InternodeMemory:
    """See above.

    Attributes: progress: argument of the kernels; num_rdma_ranks, num_nvl_ranks: nodes, and ranks of each;
                most_combine_warps: that the kernel of combine is made for
    """

    def __init__(self, rdma: RdmaMemory, num_rdma_ranks: int, num_nvl_ranks: int) -> None:
        self.rdma = rdma
        self.num_rdma_ranks = num_rdma_ranks
        self.num_nvl_ranks = num_nvl_ranks
        self.combine_kernel, self.most_combine_warps = kernel_for(num_rdma_ranks), most_warps(num_rdma_ranks)
        notify: tuple[Kernel, ...] = internode_notify_dispatch, internode_cached_notify
        self.kernels = *notify, internode_dispatch, self.combine_kernel
        cells = align_up(4 * MAX_CHANNELS * num_rdma_ranks, ALIGNMENT_BYTES)
        self.workspace = rdma.runtime.allocate(2 * (cells + ALIGNMENT_BYTES), "internode workspace", self._describe)
        sent = self.workspace.address
        received, rounds = sent + cells, sent + 2 * cells
        self.progress = Progress(sent, received, rounds, rounds + 4, rounds + ALIGNMENT_BYTES)

    def _describe(self, offset: int) -> str:
        """Name the cell at an offset of the workspace, for reports."""
        rounds = self.progress.rounds - self.progress.sent
        if offset >= rounds:
            return "rounds" if offset < rounds + ALIGNMENT_BYTES else "grid arrivals"
        name, word = ("sent", offset // 4) if offset < rounds // 2 else ("received", (offset - rounds // 2) // 4)
        return f"{name}[channel {word // self.num_rdma_ranks}, node {word % self.num_rdma_ranks}]"

    def num_warps(self, num_threads: int | None, most: int = MAX_WARPS) -> int:
        """Warps of a block of dispatch or combine; num_threads: of the config; most: that the kernel is made for."""
        if num_threads is not None:
            return num_threads // 32
        fewest, most = self.bounds_of_warps(most)
        return max(fewest, min(most, block_sizes(self.rdma.runtime).ring(self.num_nvl_ranks) // 32))

    def bounds_of_warps(self, most: int = MAX_WARPS) -> tuple[int, int]:
        """Fewest and most warps of a block of dispatch or combine: with the fewest every role has at least one.

        Between so many nodes that a block of dispatch has not as many warps, it needs fewer.
        """
        return min(max(self.num_nvl_ranks, self.num_rdma_ranks) + 2, most), warps_that_fit(self.rdma.runtime, most)

    def num_nvl_receivers(self, num_warps: int) -> int:
        """Warps of each team of NVL receivers in dispatch; the other half of the block sends."""
        return max(1, (num_warps - 2) // 2 // max(1, self.num_nvl_ranks - 1))

    def num_rdma_receivers(self, num_warps: int) -> int:
        """Warps that receive in combine; the other half sends, if NVLink carries rows at all."""
        return num_warps - 1 if self.num_nvl_ranks == 1 else max(1, (num_warps - 1) // 2)
