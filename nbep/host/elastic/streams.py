"""How many blocks the kernels of an `ElasticBuffer` take, and what they come behind."""

from __future__ import annotations

from typing import Any

from nbep.device.layout.elastic import THREADS_BEFORE_SM90
from nbep.device.layout.intranode import MAX_NVL_PEERS
from nbep.host.block_sizes import block_sizes
from nbep.host.events import handle_of
from nbep.host.node import Node
from nbep.host.target.streams import PastEvent

WARP = 32


def num_threads(memory: Node) -> int:
    """Of a block."""
    threads = block_sizes(memory.runtime).ring(min(memory.num_ranks, MAX_NVL_PEERS))
    return threads if memory.runtime.has_tma else min(threads, THREADS_BEFORE_SM90)


def blocks_for(memory: Node, num_sms: int, num_items: int, threads: int) -> int:
    """num_sms, or fewer if there is no work for so many. A GPU is faster if each item has an SM, not only a warp."""
    items_of_block = 1 if memory.runtime.target == "cuda" else threads // WARP
    return max(1, min(num_sms, -(-num_items // items_of_block)))


def wait_before_epilogue(memory: Node, event: Any) -> None:
    """Let the call under way wait for an event: in nbep there is no epilogue of its own, so all of the call does."""
    handle = handle_of(event)
    if handle is not None and not isinstance(handle.event, PastEvent):
        memory.stream.wait(handle.event)
