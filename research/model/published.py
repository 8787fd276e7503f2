"""DeepEP's published table: what its rows were made of, and the time of each.

The normal kernels' rows are GB/s in the unit of DeepEP's tests: a token counts once for each rank that gets it inside a
node, and once for each node between nodes, the sender's own included. Bytes of that unit by GB/s give the time.

Source: DeepEP v1.2.1 tests/test_intranode.py and tests/test_internode.py (nvl_recv_bytes, rdma_send_bytes, fp8_factor)
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nbep.host.config import COMBINE_TABLE, DISPATCH_TABLE, Config, Table, table_config
from research.model.times import NUM_SAMPLES
from research.model.work import DISPATCH, INTRANODE, LOW_LATENCY, Work

FILE = Path(__file__).parent / "data" / "deepep_v1.toml"


@dataclass(frozen=True)
class Row:
    """us is None where only gb_per_s is published."""

    mode: str
    verb: str
    ranks: int
    gb_per_s: float
    us: float | None = None


@lru_cache(maxsize=1)
def table() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text())


def rows() -> list[Row]:
    return [Row(**row) for row in table()["row"]]


@lru_cache(maxsize=256)
def work_of(mode: str, num_ranks: int) -> Work:
    """The work of the table's setting, with the fewest experts from 256 on that the ranks share evenly."""
    setting = table()
    is_normal = mode != LOW_LATENCY
    num_nvl_peers = min(num_ranks, setting["num_nvl_peers"])
    configs = [_config(known, num_ranks) for known in (DISPATCH_TABLE, COMBINE_TABLE)]
    nvl = [config.num_max_nvl_chunked_send_tokens for config in configs]
    rdma = [config.num_max_rdma_chunked_send_tokens for config in configs]
    return Work(
        mode,
        num_ranks,
        num_nvl_peers,
        setting["tokens"]["normal" if is_normal else "low_latency"],
        setting["hidden"],
        setting["num_topk"],
        -(-setting["num_experts"] // num_ranks) * num_ranks,
        num_channels=setting["num_sms"] // 2,
        nvl_chunks=(nvl[0], nvl[1]),
        rdma_chunks=(rdma[0], rdma[1]),
    )


def _config(known: Table, num_ranks: int) -> Config:
    """The recommended config; past the end of the table, and between its entries, that of the next smaller one."""
    nearest = max(ranks for ranks in (*known.in_node, *known.over_nodes) if ranks <= num_ranks)
    return table_config(known, table()["num_sms"], nearest)


def us_of(row: Row) -> float:
    """The published time."""
    return row.us if row.us is not None else unit_bytes(row) / row.gb_per_s / 1e3


def unit_bytes(row: Row) -> float:
    """Bytes of the average rank in the unit of DeepEP's tests."""
    work = work_of(row.mode, row.ranks)
    if row.mode == LOW_LATENCY:
        values = work.hidden + work.hidden // 128 * 4 + 16 if row.verb == DISPATCH else 2 * work.hidden
        return work.num_tokens * work.num_topk * values
    values = work.hidden + work.hidden // 128 * 4 if row.verb == DISPATCH else 2 * work.hidden
    ranks = np.unique(np.linspace(0, work.num_ranks - 1, NUM_SAMPLES[work.mode]).astype(int))
    return values * float(np.mean([_num_goals(work, int(rank)) for rank in ranks]))


def _num_goals(work: Work, rank: int) -> int:
    routes = work.routes(rank)
    if work.mode == INTRANODE:
        return int(routes.sum())
    return int(routes.reshape(work.num_tokens, work.num_nodes, work.num_nvl_peers).any(axis=2).sum())
