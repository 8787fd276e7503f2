"""Buffer.combine inside a node with zero_copy: rows go straight to a place of their own at their source, which adds up.

cached_notify_dispatch: meet the peers --> direct_combine
"""

from __future__ import annotations

from typing import NamedTuple

from nbep.device.kernels.intranode.direct_combine import DirectCombineSizes, direct_combine_smem_bytes
from nbep.device.kernels.intranode.direct_combine import direct_combine as combine_kernel
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.direct import CELL_WORDS, SlotPlaces, SlotShape, num_landed_words
from nbep.host import validate
from nbep.host.block_sizes import block_sizes
from nbep.host.config import Config
from nbep.host.intranode.notify import prepare_reset
from nbep.host.node import Node
from nbep.host.target.base import PreparedLaunch
from nbep.host.tokens import CombineGiven


def num_push_warps(config: Config, num_warps: int) -> int:
    """How many warps of an SM begin as senders: enough to fill its way out, the others keep its way in busy."""
    return config.num_push_warps or max(1, num_warps // (3 if config.num_sms <= 12 else 2))


class DirectCombine(NamedTuple):
    """The launches of a combine without rings."""

    notify: PreparedLaunch
    combine: PreparedLaunch
    places: SlotPlaces
    shape: SlotShape


def prepare_direct_combine(
    memory: Node, num_combined_tokens: int, given: CombineGiven, config: Config, call: Call
) -> DirectCombine:
    """The launches, for arguments that are checked. The second takes arrays of the handle."""
    runtime, num_ranks, direct = memory.runtime, memory.num_ranks, validate.zero_copy(memory)
    chunk = config.num_max_nvl_chunked_send_tokens
    shape = SlotShape(num_ranks, config.num_channels, given.hidden_bytes, given.num_topk, chunk)
    places = direct.place_slots(shape, num_combined_tokens)
    num_words = CELL_WORDS + num_landed_words(num_combined_tokens * (num_ranks - 1), num_ranks, chunk)
    num_threads = config.num_threads or block_sizes(runtime).ring(num_ranks)
    validate.num_push_warps(config, num_threads // 32)
    combine = runtime.prepare(
        combine_kernel,
        config.num_sms,
        num_threads,
        direct_combine_smem_bytes(num_threads, runtime.has_tma),
        direct.peers,
        memory.bounds,
        places,
        shape,
        DirectCombineSizes(num_combined_tokens, num_push_warps(config, num_threads // 32)),
    )
    return DirectCombine(prepare_reset(memory, direct.peers, num_words, call), combine, places, shape)
