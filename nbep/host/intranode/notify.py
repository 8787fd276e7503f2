"""What comes before dispatch inside a node: the exchange of counts, or only the reset of cells."""

from __future__ import annotations

from nbep.device.kernels.intranode.cached_notify import cached_notify_dispatch
from nbep.device.kernels.intranode.notify_dispatch import NotifySizes, notify_dispatch
from nbep.device.kernels.parts.calls import Call
from nbep.device.protocols.peers import Peers
from nbep.host.block_sizes import block_sizes
from nbep.host.node import Node
from nbep.host.target.base import PreparedLaunch


def prepare_counts(memory: Node, peers: Peers, sizes: NotifySizes, call: Call) -> PreparedLaunch:
    """The launch of the kernel that exchanges counts, compares the ranks' calls, and resets cells.

    It takes the fields of NotifyOutputs and NotifyInputs.
    """
    grid, threads = 1 + memory.num_ranks, block_sizes(memory.runtime).notify
    return memory.runtime.prepare(memory.kernel(notify_dispatch), grid, threads, 0, peers, memory.bounds, sizes, call)


def prepare_reset(memory: Node, peers: Peers, num_cell_words: int, call: Call) -> PreparedLaunch:
    """The launch of the kernel that resets so many words and meets the peers, whose calls it compares."""
    runtime = memory.runtime
    threads = block_sizes(runtime).notify
    kernel = memory.kernel(cached_notify_dispatch)
    return runtime.prepare(kernel, 1, threads, 0, num_cell_words, peers, memory.bounds, call)
