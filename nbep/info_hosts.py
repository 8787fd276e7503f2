"""Which rank is where and what reaches what, tried out by a small exchange. All ranks of a launch run it.

    mpiexec -n 4 nbep info --hosts
    torchrun --nproc-per-node 2 --no-python nbep info --hosts

Every rank sends a token to every other in low-latency mode and looks at what it receives. Ranks of one host share
memory; if there are several hosts, NICs connect nodes that are as large as the hosts allow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import groupby
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from nbep.device.layout.intranode import MAX_NVL_PEERS
from nbep.device.terminal import STDOUT, write_json
from nbep.host.buffer import Buffer
from nbep.host.ranks import hosts
from nbep.host.ranks.comm import Communicator, gather_results
from nbep.host.ranks.timeouts import PeerTimeout
from nbep.host.target.process import connect
from nbep.host.transport.base import TransportName

HIDDEN = 256
MEMORY = "memory"


def main(json: Path | None = None) -> int:
    try:
        group = _world()
        comm, runtime = connect(group, None)
        found = look(comm, group, runtime.target)
    except (ValueError, RuntimeError) as error:
        print(f"nbep info --hosts: {error}", file=sys.stderr, flush=True)
        if isinstance(error, PeerTimeout):
            raise SystemExit(1) from None
        return 1
    if comm.rank == 0:
        write_json(json, found)
        if json != STDOUT:
            print("\n".join(lines_of(found)), flush=True)
    return 0


def _world() -> Any:
    """All ranks of the launch."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        import torch.distributed

        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        return torch.distributed.group.WORLD
    from mpi4py import MPI

    return MPI.COMM_WORLD


def look(comm: Communicator, group: Any, target: str) -> dict[str, Any]:
    """What rank 0 prints. Collective. Raises: RuntimeError on every rank if one receives other tokens than were sent"""
    names = hosts.names_of(comm)
    transport, node_size = nodes_of(names)
    if comm.size > 1:
        received = exchange(group, comm, target, transport, node_size)
        gather_results(comm, lambda: _check(received, comm.size))
    ranks = [
        {"rank": rank, "host": names[rank], "reaches": reached(rank, comm.size, transport, node_size)}
        for rank in range(comm.size)
    ]
    same = hosts.own_facts(comm)
    return {"target": target, "transport": transport, "num_nvl_peers": node_size, "same": same, "ranks": ranks}


def nodes_of(names: Sequence[str]) -> tuple[TransportName, int]:
    """The transport that connects ranks on these hosts, and the ranks of a node: as many as all hosts allow."""
    common = gcd(*(len(list(ranks)) for _, ranks in groupby(names)))
    node_size = max(size for size in range(1, MAX_NVL_PEERS + 1) if common % size == 0)
    return ("direct" if node_size == len(names) else "ibgda"), node_size


def reached(rank: int, num_ranks: int, transport: str, node_size: int) -> dict[str, str]:
    """How a rank reaches each other one."""
    return {
        str(peer): MEMORY if peer // node_size == rank // node_size else transport
        for peer in range(num_ranks)
        if peer != rank
    }


def exchange(group: Any, comm: Communicator, target: str, transport: TransportName, node_size: int) -> list[float]:
    """Send a token of this rank's number to every rank. The numbers that came, in order. Collective."""
    size = comm.size
    num_bytes = Buffer.get_low_latency_rdma_size_hint(size, HIDDEN, size, size)
    x: Any
    if target == "emulator":
        import ml_dtypes

        x = np.full((size, HIDDEN), comm.rank, ml_dtypes.bfloat16)
        topk_idx: Any = np.arange(size)[:, None]
    else:
        import torch

        x = torch.full((size, HIDDEN), comm.rank, dtype=torch.bfloat16, device="cuda")
        topk_idx = torch.arange(size, device="cuda")[:, None]
    buffer = Buffer(
        group,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=1,
        transport=transport,
        num_nvl_peers=node_size,
    )
    recv_x, recv_count, *_ = buffer.low_latency_dispatch(x, topk_idx, size, size, use_fp8=False)
    numbers = [float(row[0]) for row in recv_x[0][: int(recv_count[0])]]
    buffer.destroy()
    return sorted(numbers)


def _check(received: list[float], num_ranks: int) -> None:
    if received != list(range(num_ranks)):
        raise RuntimeError(f"received tokens of ranks {received}, expected one of each of {num_ranks} ranks")


def lines_of(found: dict[str, Any]) -> list[str]:
    """The same for people."""
    ranks = found["ranks"]
    lines = [f"{len(ranks)} ranks, target {found['target']}, transport {found['transport']}"]
    lines.append("the same on all: " + ", ".join(f"{name} {value}" for name, value in found["same"].items()))
    for rank in ranks:
        ways: dict[str, list[str]] = {}
        for peer, way in rank["reaches"].items():
            ways.setdefault(way, []).append(peer)
        reaches = "; ".join(f"{', '.join(peers)} over {way}" for way, peers in ways.items())
        lines.append(f"rank {rank['rank']} on {rank['host']} reaches {reaches or 'no other rank'}")
    return [
        *lines,
        "each rank has received a token from each: right" if len(ranks) > 1 else "one rank: nothing to send",
    ]
