"""What `nbep bench internode` says and writes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from nbep.bench.parts.internode_calls import Carried
from nbep.bench.parts.normal_clock import Push
from nbep.bench.parts.report import Report, push_gbps


@dataclass(frozen=True)
class Row:
    """One measurement. Bandwidths are in GB/s for each rank."""

    transport: str
    work: str
    num_sms: int
    nvl_chunk: int
    rdma_chunk: int
    us: float
    rdma_gbps: float
    nvl_gbps: float
    link_gbps: float
    allowed_us: float
    of_push: float


COLUMNS = {
    "work": "work",
    "SMs": "num_sms",
    "NVL chunk": "nvl_chunk",
    "RDMA chunk": "rdma_chunk",
    "us": "us:.1f",
    "RDMA GB/s": "rdma_gbps:.1f",
    "NVL GB/s": "nvl_gbps:.1f",
    "link GB/s": "link_gbps:.1f",
    "allowed us": "allowed_us:.1f",
    "of push": "of_push:.2f",
}
MOVED = {"work": "work", "RDMA": "rdma:.2f", "NVL": "nvl:.2f", "stored": "stored:.2f", "link": "link:.2f"}
COUNTED = (
    "us: from a call with a cached handle to its end, the notify kernel too.",
    "RDMA and NVL, DeepEP's units: a token counts once for each node that it goes to, its own too; once for each rank.",
    "link: of both hops, what goes to another rank. stored: all of both hops, whether it leaves the GPU or not.",
    "Receivers' copies to the user's arrays do not count, nor does what a software NIC copies.",
    "allowed: link bytes by push to peers, or stored bytes by push at home, whichever takes longer, at as many SMs.",
)


def network(is_virtual: bool) -> str:
    """What carries the bytes between the nodes."""
    if is_virtual:
        return 'the "network" is the memory of one card; no NIC and no NVLink is measured'
    return 'the "network" is NVLink, or memory where ranks share a card; no NIC is measured'


def begin_report(
    is_virtual: bool, options: argparse.Namespace, carried: Mapping[str, Carried], pushes: Mapping[int, Push]
) -> Report:
    """What rank 0 says: what is measured, and the ceiling; the rows come later."""
    report = Report(
        options,
        num_nodes=options.nodes,
        num_nvl_peers=options.num_nvl_peers,
        network=network(is_virtual),
        counted=COUNTED,
        carried_bytes={work: of_work._asdict() for work, of_work in carried.items()},
        push_gbps=push_gbps(pushes),
    )
    report.say(
        f"{options.nodes} virtual nodes of {options.num_nvl_peers} ranks; {network(is_virtual)}",
        f"{options.tokens} tokens a rank, hidden {options.hidden}, top-{options.topk} of {options.experts} experts "
        f"on {options.topk_groups} nodes",
    )
    report.say_push(pushes)
    megabytes = [
        argparse.Namespace(work=work, **{name: num_bytes / 1e6 for name, num_bytes in of_work._asdict().items()})
        for work, of_work in carried.items()
    ]
    report.table(megabytes, MOVED, "MB of a rank in one call")
    report.say(*COUNTED)
    return report


def add_transport(report: Report, rows: list[Row]) -> None:
    """The rows of one transport."""
    report.table(rows, COLUMNS, rows[0].transport)
    for work in dict.fromkeys(row.work for row in rows):
        best = min((row for row in rows if row.work == work), key=lambda row: row.us)
        report.say(
            f"best {work}: {best.us:.1f} us, {best.rdma_gbps:.1f} GB/s RDMA, {best.nvl_gbps:.1f} GB/s NVL, "
            f"{best.of_push:.2f} of push ({best.num_sms} SMs, NVL chunk {best.nvl_chunk}, RDMA chunk "
            f"{best.rdma_chunk})"
        )
    report.add(rows=rows)
