"""The mode between nodes: the bodies of intranode.py run on ranks of several nodes, with options of this module.

`Case.num_nodes` says how the ranks lie; those of a node are consecutive.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import nbep
from nbep import reference
from nbep.host.config import combine_rings, dispatch_rings
from nbep.specimens.workloads import intranode
from nbep.specimens.workloads.cases import Case, Report
from nbep.specimens.workloads.intranode import FACTORS, Outcome, check_layout, with_channels

# Two channels, chunks of two tokens. Rings are smaller than most traffic: of four slots between nodes, and of eight
# inside a node, which up to four nodes share in combine.
CONFIG = nbep.Config(4, 2, 8, 2, 4)
# 1, tiny, -1, tiny cancel: what was rounded in float32 stays.
CANCELLING = np.array([1, 1.5 * 2**-20, -1, 1.25 * 2**-19, 1, 1.25 * 2**-20, -1, 1], np.float32)
# Small, so that queues wrap and messages are cut.
NIC = nbep.NicOptions(num_entries=64, chunk_bytes=512, seed=1)


@dataclass(frozen=True)
class Options(intranode.Options):
    """As inside a node.

    transport: of the buffer
    nic: how the software NIC is made, and what it does badly
    """

    config: nbep.Config = field(default_factory=lambda: with_channels(CONFIG))
    own_weights: bool = True
    transport: str = "direct"
    nic: nbep.NicOptions = NIC

    def buffer_arguments(self, case: Case) -> dict[str, Any]:
        return {
            **num_bytes(case, self),
            "num_nvl_peers": case.num_nvl_peers,
            "transport": self.transport,
            "nic": self.nic,
            "num_qps_per_rank": self.config.num_channels,
            "handle_type": self.handle_type,
        }

    def factors(self, case: Case, rank: int) -> np.ndarray:
        """In turn: what shows that a node's sum is rounded, the order of its ranks, and the order of the nodes."""
        node, local = divmod(rank, case.num_nvl_peers)
        in_turn = np.array(
            [FACTORS[rank % 8], CANCELLING[local], CANCELLING[node % len(CANCELLING)] * 2.0**local], np.float32
        )
        return in_turn[np.arange(case.hidden) % 3]

    def heads(self, handle: Any) -> tuple:
        return handle.send_rdma_head, handle.send_nvl_head

    def reference_dispatch(self, case: Case, x: list, **options: Any) -> list:
        return reference.internode_dispatch(x, case.layouts, self.config.num_channels, case.num_nvl_peers, **options)

    def reference_combine(self, case: Case, x: list[np.ndarray], dispatched: list, **options: Any) -> list:
        return reference.internode_combine(x, dispatched, case.num_nvl_peers, **options)

    def check_layout(self, report: Report, case: Case, rank: int, layout: tuple, sent: list[str]) -> None:
        of_nodes = reference.count_tokens_per_rdma_rank(case.layouts[rank], case.num_nvl_peers)
        check_layout(report, case.layouts[rank], layout, sent, of_nodes)

    def check_handle(
        self,
        report: Report,
        case: Case,
        want: reference.InternodeDispatched,
        outcome: Outcome,
        sent: list[str],
        received: list[str],
    ) -> None:
        check_handle(report, want, outcome, sent)


def num_bytes(case: Case, options: Options) -> dict[str, int]:
    """Exactly what the calls need, so that a write past the rings is out of bounds."""
    fp8, of_nodes = options.fp8 is not None, (case.num_nodes, case.num_nvl_peers)
    num_topk = case.topk_idx[0].shape[1] if options.with_topk else 0
    slot = (1 if fp8 else 2) * case.hidden, num_topk, case.hidden // 128 if fp8 else 0
    calls = (
        dispatch_rings(options.config, *of_nodes, *slot),
        combine_rings(options.config, *of_nodes, 2 * case.hidden, num_topk),
    )
    return {
        "num_nvl_bytes": max(rings.num_nvl_bytes for rings in calls),
        "num_rdma_bytes": max(rings.num_rdma_bytes for rings in calls),
    }


# The arrays of a handle as it unpacks, but for recv_src_meta, which is nbep's own.
HANDLE = (
    "is_token_in_rank",
    "rdma_channel_prefix_matrix",
    "gbl_channel_prefix_matrix",
    "recv_rdma_channel_prefix_matrix",
    "recv_rdma_rank_prefix_sum",
    "recv_gbl_channel_prefix_matrix",
    "recv_gbl_rank_prefix_sum",
)


def check_handle(report: Report, want: reference.InternodeDispatched, outcome: Outcome, sent: list[str]) -> None:
    *matrices, _, send_rdma_head, send_nvl_head = outcome.handle
    for name, matrix in zip(HANDLE, matrices, strict=True):
        report.same(name, matrix, getattr(want, name))
    heads = outcome.heads
    used = len(want.send_nvl_head)  # num_worst_tokens may have added rows
    report.same("send_rdma_head", heads[0], want.send_rdma_head, sent)
    report.same("send_nvl_head", heads[1][:used], want.send_nvl_head)
    if outcome.combined_x is not None:
        num_channels = want.rdma_channel_prefix_matrix.shape[1]
        encoded = reference.encode_send_head(want.send_rdma_head, num_channels)
        report.same("send_rdma_head after combine", send_rdma_head, encoded, sent)
        encoded = reference.encode_send_nvl_head(
            want.send_nvl_head, want.recv_rdma_channel_prefix_matrix, want.recv_rdma_rank_prefix_sum
        )
        report.same("send_nvl_head after combine", send_nvl_head[:used], encoded)
