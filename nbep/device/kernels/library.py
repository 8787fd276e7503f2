"""nbep's kernels for what the lower half does with them: compile, load, check, name cells. See device.library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nbep.device.jit import over, spec_of
from nbep.device.kernels.elastic.number_choices import TABLE_BYTES
from nbep.device.kernels.elastic.publish import PublishSizes
from nbep.device.kernels.get_dispatch_layout import LayoutSizes, num_counters
from nbep.device.kernels.internode import arguments as internode
from nbep.device.kernels.internode.combine import internode_combine, kernel_for
from nbep.device.kernels.intranode import combine
from nbep.device.kernels.intranode.dispatch import SHARED_TAILS_BYTES
from nbep.device.kernels.low_latency.arguments import Call
from nbep.device.kernels.low_latency.calls import ComparedCall
from nbep.device.kernels.low_latency.combine_receiver import sum_table_bytes
from nbep.device.kernels.low_latency.dispatch_receiver import table_bytes
from nbep.device.kernels.low_latency.dispatch_sender import stage_bytes
from nbep.device.kernels.network_push import PushSizes, smem_bytes
from nbep.device.kernels.parts.staged_sums import FULL_BYTES, LIST_BYTES, SUM_STAGE_BYTES
from nbep.device.layout.internode import COUNT_MESSAGE_BYTES, MAX_RDMA_RANKS
from nbep.device.layout.low_latency import DeduplicatedShape, LowLatencyShape
from nbep.device.library import KernelLibrary
from nbep.device.protocols.staging import STAGE_BYTES, STAGE_STRIDE

# What lies in the shared memory of each kernel: reports use these names

Describe = Callable[[int], str]
WARP = 32


def shared_cells(kernel: str, args: Sequence[Any], num_threads: int, has_tma: bool) -> Describe | None:
    """What names the byte at an offset of a block's shared memory; None for a kernel of another's."""

    by_kernel: dict[str, Describe] = {
        "get_dispatch_layout": lambda offset: _layout(_one_of(args, LayoutSizes), offset),
        "dispatch": _dispatch,
        "combine": lambda offset: _combine(num_threads // WARP, offset),
        "direct_dispatch": _stage,
        "lay_out_rows": _stage,
        "direct_combine": lambda offset: _listed_sums(num_threads // WARP, has_tma, offset),
        "elastic_publish": lambda offset: _elastic_publish(_one_of(args, PublishSizes), offset),
        "elastic_dispatch": _stage,
        "elastic_send_dispatch": _stage,
        "elastic_send_combine": _stage,
        **dict.fromkeys(
            [f"elastic_{name}" for name in ("combine", "push_sums", "add_sums", "fetch_combine", "gather_combine")],
            lambda offset: _listed_sums(num_threads // WARP, has_tma, offset),
        ),
        "low_latency_dispatch": lambda offset: _low_latency_dispatch(_one_of(args, LowLatencyShape), offset),
        "low_latency_combine": lambda offset: _low_latency_combine(_one_of(args, LowLatencyShape), offset),
        "internode_notify_dispatch": partial(_of_warp, "count message", COUNT_MESSAGE_BYTES),
        "internode_dispatch": _internode_dispatch,
        "internode_combine": _internode_combine,
        "network_push": lambda offset: _of_warp("stage", smem_bytes(WARP, _one_of(args, PushSizes).num_bytes), offset),
    }
    return by_kernel.get(kernel)


def _one_of(args: Sequence[Any], kind: type) -> Any:
    return next(argument for argument in args if isinstance(argument, kind))


def _stage(offset: int) -> str:
    """Of `staging.open_stage`."""
    warp, byte = divmod(offset, STAGE_STRIDE)
    return f"stage[warp {warp}] + {byte}" if byte < STAGE_BYTES else f"full[warp {warp}], its stage's mbarrier"


def _elastic_publish(sizes: PublishSizes, offset: int) -> str:
    """The stages, where two blocks have their tables before."""
    warp, byte = divmod(offset, TABLE_BYTES)
    return f"{_stage(offset)}, before that counts[warp {warp}, {byte // 4}]" if sizes.does_number else _stage(offset)


def _layout(sizes: LayoutSizes, offset: int) -> str:
    counter = offset // 4
    return f"counts[{counter}]" if counter < num_counters(sizes) else "is_last"


def _dispatch(offset: int) -> str:
    if offset >= SHARED_TAILS_BYTES:
        return _stage(offset - SHARED_TAILS_BYTES)
    return f"shared_tail[team of warp {offset // 4}]"


def _combine(num_warps: int, offset: int) -> str:
    board = combine.locate_board(num_warps)
    if offset >= board.tails:
        return f"shared_tails[src {(offset - board.tails) // 4}]"
    if offset >= board.heads:
        warp, rank = divmod((offset - board.heads) // 4, combine.MAX_RANKS)
        return f"shared_heads[warp {warp}, src {rank}]"
    if offset >= board.weights:
        warp, row = divmod((offset - board.weights) // 8, combine.MAX_RANKS)
        return f"weights[warp {warp}, {row}]"
    warp, row = divmod((offset - board.rows) // 8, combine.MAX_ROWS)
    return f"rows[warp {warp}, {row}]"


def _listed_sums(num_warps: int, has_tma: bool, offset: int) -> str:
    stages = (SUM_STAGE_BYTES + FULL_BYTES) * num_warps if has_tma else 0
    if offset >= stages:
        warp, byte = divmod(offset - stages, LIST_BYTES)
        return f"rows[warp {warp}, {byte // 8}]"
    return _sum_stage(num_warps, offset)


def _sum_stage(num_warps: int, offset: int) -> str:
    """Of `staged_sums.open_sum_stage`: the stages of all warps, then their mbarriers."""
    warp, byte = divmod(offset, SUM_STAGE_BYTES)
    if warp < num_warps:
        return f"stage[warp {warp}] + {byte}"
    warp, byte = divmod(offset - SUM_STAGE_BYTES * num_warps, FULL_BYTES)
    return f"full[warp {warp}, {byte // 8}], a mbarrier of its stage"


def _low_latency_dispatch(shape: LowLatencyShape, offset: int) -> str:
    """What sends and what receives use the same bytes."""
    number, byte = divmod(offset, stage_bytes(shape))
    sends = f"stage {number} + {byte}" if number < 2 else f"histogram[{(offset - 2 * stage_bytes(shape)) // 4}]"
    stages = table_bytes(shape) if shape.deduplicate else 0
    receives = f"table + {offset}" if offset < stages else _stage(offset - stages)
    return f"{sends} to send, {receives} to receive"


def _low_latency_combine(shape: LowLatencyShape, offset: int) -> str:
    stages = sum_table_bytes(shape)
    return f"table + {offset}" if offset < stages else _stage(offset - stages)


def _teams(offset: int) -> str:
    """What dispatch and combine between nodes have in common."""
    if offset < internode.BOARD:
        return f"batch[team {offset // 16}] + {offset % 16}"
    warp, byte = divmod(offset - internode.BOARD, internode.BOARD_ROW)
    return f"board[warp {warp}, {byte // 4}]"


def _internode_dispatch(offset: int) -> str:
    return _teams(offset) if offset < internode.STAGES else _stage(offset - internode.STAGES)


def _internode_combine(offset: int) -> str:
    if offset < internode.LISTS:
        return _teams(offset)
    if offset >= internode.COMBINE_STAGES:
        return _stage(offset - internode.COMBINE_STAGES)
    if offset >= internode.PUBLISHED:
        return f"published[{(offset - internode.PUBLISHED) // 4}]"
    warp, byte = divmod(offset - internode.LISTS, internode.LIST_BYTES)
    row = byte // 8
    weights = internode.WEIGHT_LIST // 8
    return f"rows[warp {warp}, {row}]" if row < weights else f"weights[warp {warp}, {row - weights}]"


def _of_warp(name: str, num_bytes: int, offset: int) -> str:
    """Where each warp has as many bytes."""
    warp, byte = divmod(offset, num_bytes)
    return f"{name}[warp {warp}] + {byte}"


def variants(kernel: Callable) -> tuple[Callable, ...]:
    """A kernel and, of those of low-latency calls, the one with deduplicate; of combine, the one for many nodes."""
    if kernel is internode_combine:
        return kernel, kernel_for(MAX_RDMA_RANKS)
    if spec_of(kernel).hints.get("shape") is not LowLatencyShape:
        return (kernel,)
    return kernel, over(kernel, DeduplicatedShape, "shape")


def comparing_calls(kernel: Callable) -> tuple[Callable, ...]:
    """The variant that compares calls, if there is one."""
    return (over(kernel, ComparedCall, "call"),) if spec_of(kernel).hints.get("call") is Call else ()


LIBRARY = KernelLibrary(
    "nbep.device.kernels",
    ("kernels.parts.", "kernels.", "protocols."),
    variants,
    comparing_calls,
    {
        "notify_dispatch": "peers",
        "cached_notify_dispatch": "peers",
        "cached_notify_combine": "peers",
        "low_latency_dispatch": "network",
        "low_latency_combine": "network",
        "clean_low_latency_buffer": "network",
    },
    shared_cells,
)
