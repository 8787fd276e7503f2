"""How many SMs a dispatch or combine should take: enough that they read and write as fast as the wire carries.

Source: DeepEP deep_ep/buffers/elastic.py, ElasticBuffer.get_theoretical_num_sms
"""

from __future__ import annotations

import math
from typing import NamedTuple

MIN_SMS = 4
MIN_SMS_ALONE = 64  # where no computation runs beside
MARGIN = 1.25
NVLINK_GBS = 405.0  # of an H100 or H200 in one direction, nine tenths of it
RDMA_GBS = 45.0  # of 400 Gbit/s, the same


class Rates(NamedTuple):
    """In GB/s: of each wire in one direction, and of an SM."""

    nvlink_gbs: float
    rdma_gbs: float
    sm_read_gbs: float
    sm_write_gbs: float


def expected_ranks(num_experts: int, num_topk: int, num_ranks: int) -> float:
    """On how many ranks the experts of a token lie, if all choices are alike likely."""
    elsewhere = num_experts - num_experts // num_ranks
    return num_ranks * (1 - math.comb(elsewhere, num_topk) / math.comb(num_experts, num_topk))


def theoretical_num_sms(
    num_experts: int,
    num_topk: int,
    ranks: tuple[int, int],
    rates: Rates,
    device_sms: int,
    prefers_overlap: bool,
) -> int:
    """See ElasticBuffer.get_theoretical_num_sms. What is read, written and sent is counted in rows that arrive.

    A rank's SMs write the rows for its node, and between nodes its own tokens once, from where they leave. NVLink is
    the wire to keep busy, as in DeepEP, which counts nothing where nodes have one rank each: then it is the network.

    Args: ranks: how many there are, and of a node
    """
    num_ranks, num_nvl_ranks = ranks
    reads = 1 / expected_ranks(num_experts, num_topk, num_ranks)
    in_node = num_nvl_ranks / num_ranks
    writes = in_node + (reads if in_node < 1 else 0)
    on_wire, gbs = in_node * (1 - 1 / num_nvl_ranks), rates.nvlink_gbs
    if num_nvl_ranks == 1:
        on_wire, gbs = 1 - in_node, rates.rdma_gbs
    num_sms: float = device_sms  # one rank alone: no wire to wait for
    if on_wire > 0:
        rows_per_s = gbs / on_wire
        num_sms = max(rows_per_s * reads / rates.sm_read_gbs, rows_per_s * writes / rates.sm_write_gbs)
    wanted = max(MIN_SMS, math.ceil(num_sms * MARGIN))
    wanted += wanted % 2
    return min(wanted if prefers_overlap else max(wanted, MIN_SMS_ALONE), device_sms)
