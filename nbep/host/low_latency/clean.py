"""Buffer.clean_low_latency_buffer: the cells of the low-latency mode as they were at construction.

Source: DeepEP csrc/deep_ep.cpp, Buffer::clean_low_latency_buffer
"""

from __future__ import annotations

from nbep.device.kernels.low_latency.clean_low_latency_buffer import clean_low_latency_buffer as clean_kernel
from nbep.device.layout.low_latency_host import shape_of
from nbep.host.arguments import integer, refuse
from nbep.host.block_sizes import block_sizes
from nbep.host.low_latency import checks
from nbep.host.low_latency.launch import on_current_stream
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.node import Node
from nbep.host.target.base import PreparedLaunch

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
