"""What `nbep bench internode` says and writes."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from nbep.bench.parts.internode_calls import Carried
from nbep.bench.parts.normal_clock import Push
from nbep.device.terminal import console_for, write_json


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

    @property
    def of_push(self) -> float:
        return self.allowed_us / self.us


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


class Report:
    """What rank 0 says and writes, after every transport, so that a run that is cut off has said what it knows."""

    def __init__(
        self,
        is_virtual: bool,
        options: argparse.Namespace,
        carried: dict[str, Carried],
        pushes: dict[int, Push],
    ):
        self.is_virtual = is_virtual
        self.options = options
        self.carried = carried
        self.pushes = pushes
        self.rows: list[Row] = []
        self.console = console_for(options.json, width=120)

    def begin(self) -> None:
        """Say what is measured, and the ceiling."""
        from rich.table import Table

        options, console = self.options, self.console
        console.print(
            f"{options.nodes} virtual nodes of {options.num_nvl_peers} ranks; {network(self.is_virtual)}\n"
            f"{options.tokens} tokens a rank, hidden {options.hidden}, top-{options.topk} of {options.experts} experts "
            f"on {options.topk_groups} nodes",
            highlight=False,
        )
        copies = Table(title="push, GB/s")
        for name in ("SMs", "to peers", "at home", "both"):
            copies.add_column(name, justify="right")
        for sms, rates in self.pushes.items():
            copies.add_row(str(sms), *(f"{rate:.1f}" for rate in rates))
        console.print(copies)
        moved = Table(title="MB of a rank in one call")
        for name in ("work", "RDMA", "NVL", "stored", "link"):
            moved.add_column(name, justify="left" if name == "work" else "right")
        for work, carried in self.carried.items():
            moved.add_row(work, *(f"{num_bytes / 1e6:.2f}" for num_bytes in carried))
        console.print(moved)
        for line in COUNTED:
            console.print(line, highlight=False)

    def add(self, rows: list[Row]) -> None:
        """The rows of one transport."""
        from rich.table import Table

        self.rows += rows
        table = Table(title=rows[0].transport)
        names = ("SMs", "NVL chunk", "RDMA chunk", "us", "RDMA GB/s", "NVL GB/s", "link GB/s", "allowed us", "of push")
        table.add_column("work")
        for name in names:
            table.add_column(name, justify="right")
        for row in rows:
            sizes = (row.num_sms, row.nvl_chunk, row.rdma_chunk)
            rates = (row.us, row.rdma_gbps, row.nvl_gbps, row.link_gbps, row.allowed_us)
            table.add_row(row.work, *map(str, sizes), *(f"{rate:.1f}" for rate in rates), f"{row.of_push:.2f}")
        self.console.print(table)
        for work in dict.fromkeys(row.work for row in rows):
            best = min((row for row in rows if row.work == work), key=lambda row: row.us)
            self.console.print(
                f"best {work}: {best.us:.1f} us, {best.rdma_gbps:.1f} GB/s RDMA, {best.nvl_gbps:.1f} GB/s NVL, "
                f"{best.of_push:.2f} of push ({best.num_sms} SMs, NVL chunk {best.nvl_chunk}, RDMA chunk "
                f"{best.rdma_chunk})",
                highlight=False,
            )
        write_json(self.options.json, self._everything(), is_last=False)

    def close(self) -> None:
        """Nothing comes any more."""
        write_json(self.options.json, self._everything())

    def add_faults(self, transport: str, faults: list[str]) -> None:
        for fault in faults:
            self.console.print(f"{transport}: {fault}", highlight=False)

    def _everything(self) -> dict[str, Any]:
        options = self.options
        return {
            "num_nodes": options.nodes,
            "num_nvl_peers": options.num_nvl_peers,
            "network": network(self.is_virtual),
            "counted": COUNTED,
            "carried_bytes": {work: carried._asdict() for work, carried in self.carried.items()},
            "push_gbps": {sms: rates._asdict() for sms, rates in self.pushes.items()},
            "rows": [{**asdict(row), "of_push": row.of_push} for row in self.rows],
        }
