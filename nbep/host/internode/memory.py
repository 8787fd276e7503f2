"""One rank's share of the mode between nodes: its workspace beside the RDMA buffer, and the size of its blocks."""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.internode.arguments import MAX_WARPS, MAX_WARPS_BEFORE_SM90
from nbep.device.kernels.internode.cached_notify import internode_cached_notify
from nbep.device.kernels.internode.combine import combine_smem_bytes, internode_combine
from nbep.device.kernels.internode.dispatch import internode_dispatch
from nbep.device.kernels.internode.notify_dispatch import internode_notify_dispatch
from nbep.device.layout.internode import MAX_CHANNELS
from nbep.device.layout.intranode import ALIGNMENT_BYTES, align_up
from nbep.device.protocols.totals import Progress
from nbep.host.target.base import Kernel
from nbep.host.transport.rdma import RdmaMemory

KERNELS: tuple[Kernel, ...] = (
    internode_notify_dispatch,
    internode_cached_notify,
    internode_dispatch,
    internode_combine,
)


class InternodeMemory:
    """See above.

    Attributes: progress: argument of the kernels; num_rdma_ranks, num_nvl_ranks: nodes, and ranks of each
    """

    def __init__(self, rdma: RdmaMemory, num_rdma_ranks: int, num_nvl_ranks: int) -> None:
        self.rdma = rdma
        self.num_rdma_ranks = num_rdma_ranks
        self.num_nvl_ranks = num_nvl_ranks
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

    @property
    def network(self) -> Any:
        return self.rdma.network

    @property
    def cells(self) -> int:
        """Offset of the mode's cells in the RDMA buffer."""
        return self.rdma.cells

    def kernel(self, kernel: Kernel) -> Kernel:
        """The kernel for this network."""
        return self.rdma.kernel(kernel)

    def num_warps(self, num_threads: int | None) -> int:
        """Warps of a block of dispatch or combine; num_threads: of the config."""
        if num_threads is not None:
            return num_threads // 32
        wanted = self.rdma.runtime.ring_threads(self.num_nvl_ranks) // 32
        return max(self.fewest_warps, min(self.most_warps, wanted))

    @property
    def most_warps(self) -> int:
        """For which a block has registers, and room in its shared memory, in combine too."""
        most = MAX_WARPS if self.rdma.runtime.has_tma else MAX_WARPS_BEFORE_SM90
        of_warp = combine_smem_bytes(32) - combine_smem_bytes(0)
        return min(most, (self.rdma.runtime.max_smem_bytes - combine_smem_bytes(0)) // of_warp)

    @property
    def fewest_warps(self) -> int:
        """With which every role has one: NVL receivers and a sender, or forwarders of each node, and coordinators."""
        return max(self.num_nvl_ranks, self.num_rdma_ranks) + 2

    def num_nvl_receivers(self, num_warps: int) -> int:
        """Warps of each team of NVL receivers in dispatch; the other half of the block sends."""
        return max(1, (num_warps - 2) // 2 // max(1, self.num_nvl_ranks - 1))

    def num_rdma_receivers(self, num_warps: int) -> int:
        """Warps that receive in combine; the other half sends, if NVLink carries rows at all."""
        return num_warps - 1 if self.num_nvl_ranks == 1 else max(1, (num_warps - 1) // 2)

    def free(self) -> None:
        self.workspace.free()
