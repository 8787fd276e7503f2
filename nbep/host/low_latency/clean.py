"""Buffer.clean_low_latency_buffer, and the mask of ranks without which this rank goes on.

How calls of the normal mode between nodes and low-latency calls take turns with the bytes of the RDMA buffer.

 low-latency calls --hooks called--> a call between nodes --clean_low_latency_buffer--> low-latency calls

To the call between nodes. It fills the buffers of the ranks that have its place in other nodes, and its own send area.
 - It comes behind this rank's low-latency calls, whatever their stream.
 - Its notify tells those ranks that this one has come to it, so they may fill what low-latency calls have read here.
 - Its own send area may hold what a NIC has not read yet, for a rank with another place: that rank has not received it.
   A cached notify does not ask it. So where messages leave from the send area, all ranks come together once more: in
   the kernel of clean_low_latency_buffer.

To low-latency calls. They fill the buffers of all ranks, where a call between nodes may still read.
clean_low_latency_buffer comes behind this rank's call, whatever its stream, and lets all ranks come together.

Source: DeepEP csrc/deep_ep.cpp, Buffer::clean_low_latency_buffer; deep_ep/buffer.py, Buffer.clean_low_latency_buffer
("after running the normal dispatch/combine"); after v1.2.1 csrc/legacy/buffer.hpp,
low_latency_query_mask_buffer and its neighbours
"""

from __future__ import annotations

from typing import Any

from nbep.device.kernels.low_latency.clean_low_latency_buffer import clean_low_latency_buffer as clean_kernel
from nbep.device.kernels.low_latency.mask_buffer import query_mask_buffer as query_kernel
from nbep.device.kernels.low_latency.mask_buffer import update_mask_buffer as update_kernel
from nbep.device.layout.low_latency import shape_of
from nbep.host import validate
from nbep.host.arguments import flags, integer, refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.low_latency import checks
from nbep.host.low_latency.launch import on_current_stream
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.node import Node
from nbep.host.target.base import Array, PreparedLaunch

VERB = "clean_low_latency_buffer"


def clean_low_latency_buffer(
    memory: Node, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
) -> None:
    """See Buffer.clean_low_latency_buffer."""
    mode = checks.mode_of(memory, VERB)
    memory.check_faults()
    num_max_tokens = integer("num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, 1)
    hidden, num_experts = integer("hidden", hidden, 1), checks.num_experts(mode, num_experts)
    mode.check_size(shape_of(mode.num_ranks, num_experts, num_max_tokens, hidden, 0, 0, 0, 0))
    memory.compare_call(VERB, dict)
    _clean(memory, mode)


def begin_verb(memory: Node, verb: str) -> LowLatencyMemory:
    """What a verb begins with. Where masks were taken off, the ranks meet in clean_low_latency_buffer before it.

    Raises: ValueError for another buffer, or while a graph is captured that would have to begin so; PeerTimeout after
            an earlier one
    """
    memory.check_faults()
    mode = memory.low_latency
    if mode is None:
        mode = checks.mode_of(memory, verb)
    if mode.is_unclean:
        if memory.runtime.is_capturing:
            refuse(verb, "a call in a CUDA graph after masks were taken off", f"captured after {VERB}")
        _clean(memory, mode)
    return mode


def _clean(memory: Node, mode: LowLatencyMemory) -> None:
    mode.restart()
    on_current_stream(memory, prepare_clean(memory, mode))


def prepare_clean(memory: Node, mode: LowLatencyMemory) -> PreparedLaunch:
    """The kernel, behind which all ranks have come to it."""
    args = mode.network, mode.work, memory.bounds, mode.num_rdma_bytes
    return memory.runtime.prepare(mode.kernel(clean_kernel), 1, block_sizes(memory.runtime).notify, 0, *args)


# --- Which ranks this rank goes on without


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


# --- How calls of the normal mode between nodes and low-latency calls take turns with the bytes of the RDMA b


def check_turn(memory: Node, verb: str) -> None:
    """Raises: ValueError if a low-latency call is under way"""
    if memory.low_latency is not None:
        memory.low_latency.check_received(verb)


def take_turn(memory: Node, verb: str) -> None:
    """Let what comes next on the stream of the call have the RDMA buffer."""
    mode = memory.low_latency
    if mode is not None and mode.give_way(verb, memory.stream) and mode.sends_from_buffer:
        prepare_clean(memory, mode).launch(memory.stream)
