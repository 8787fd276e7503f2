"""Which ranks this rank goes on without: query, update and clean of the mask buffer.

Source: DeepEP csrc/legacy/buffer.hpp after v1.2.1, Buffer::low_latency_query_mask_buffer and its neighbours
"""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.low_latency.query_mask_buffer import query_mask_buffer as query_kernel
from nbep.device.kernels.low_latency.update_mask_buffer import update_mask_buffer as update_kernel
from nbep.host import validate
from nbep.host.arguments import flags, integer, refuse
from nbep.host.low_latency import checks
from nbep.host.low_latency.launch import on_current_stream
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.node import Node
from nbep.host.target.base import Array

WARP = 32


def query_mask_buffer(memory: Node, mask_status: Array) -> None:
    """See Buffer.low_latency_query_mask_buffer."""
    mode = _mode(memory, "low_latency_query_mask_buffer")
    validate.output("mask_status", memory.runtime.view(mask_status), "int32", (mode.num_ranks,))
    _launch(memory, query_kernel, (mask_status,), mode.mask, mode.num_ranks)


def update_mask_buffer(memory: Node, rank_to_mask: int, mask: bool) -> None:
    """See Buffer.low_latency_update_mask_buffer."""
    mode = _mode(memory, "low_latency_update_mask_buffer")
    rank = integer("rank_to_mask", rank_to_mask, 0)
    flags(mask=mask)
    if rank >= mode.num_ranks:
        refuse("rank_to_mask", rank, f"a rank below {mode.num_ranks}")
    if rank == mode.rank:
        refuse("rank_to_mask", rank, "another rank than the one that calls it")
    _update(memory, mode, rank, 1, int(mask))


def clean_mask_buffer(memory: Node) -> None:
    """See Buffer.low_latency_clean_mask_buffer."""
    mode = _mode(memory, "low_latency_clean_mask_buffer")
    _update(memory, mode, 0, mode.num_ranks, 0)


def _mode(memory: Node, verb: str) -> LowLatencyMemory:
    mode = checks.mode_of(memory, verb)
    if mode.mask == 0:
        raise ValueError(f"{verb}: the buffer masks no ranks; make it with enable_shrink=True")
    memory.check_faults()
    return mode


def _update(memory: Node, mode: LowLatencyMemory, first_rank: int, num_ranks: int, is_masked: int) -> None:
    kernel = mode.kernel(update_kernel)
    _launch(memory, kernel, (), mode.network, mode.work, mode.num_rdma_bytes, first_rank, num_ranks, is_masked)
    mode.is_unclean = mode.is_unclean or not is_masked


def _launch(memory: Node, kernel: Any, arrays: tuple[Any, ...], *last_args: Any) -> None:
    runtime = memory.runtime
    on_current_stream(memory, runtime.prepare(kernel, 1, WARP, 0, *last_args), runtime.arguments(arrays), arrays)
