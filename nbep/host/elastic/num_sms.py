"""How many SMs a dispatch or combine should take: enough that they read and write as fast as the wire carries.

Source: DeepEP deep_ep/buffers/elastic.py, ElasticBuffer.get_theoretical_num_sms
"""

from __future__ import annotations

import math

MIN_SMS = 4
MIN_SMS_ALONE = 64  # where no computation runs beside
MARGIN = 1.25
NVLINK_GBS = 405.0  # of an H100 or H200 in one direction, nine tenths of it


def expected_ranks(num_experts: int, num_topk: int, num_ranks: int) -> float:
    """On how many ranks the experts of a token lie, if all choices are alike likely."""
    elsewhere = num_experts - num_experts // num_ranks
    return num_ranks * (1 - math.comb(elsewhere, num_topk) / math.comb(num_experts, num_topk))


def theoretical_num_sms(
    num_experts: int,
    num_topk: int,
    num_ranks: int,
    nvlink_gbs: float,
    sm_read_gbs: float,
    sm_write_gbs: float,
    device_sms: int,
    prefers_overlap: bool,
) -> int:
    """See ElasticBuffer.get_theoretical_num_sms. What is read, written and sent is counted in rows that arrive."""
    reads = 1 / expected_ranks(num_experts, num_topk, num_ranks)
    writes = 1.0
    on_wire = 1 - 1 / num_ranks
    num_sms: float = device_sms  # one rank alone: no wire to wait for
    if on_wire > 0:
        rows_per_s = nvlink_gbs / on_wire
        num_sms = max(rows_per_s * reads / sm_read_gbs, rows_per_s * writes / sm_write_gbs)
    wanted = max(MIN_SMS, math.ceil(num_sms * MARGIN))
    wanted += wanted % 2
    return min(wanted if prefers_overlap else max(wanted, MIN_SMS_ALONE), device_sms)
