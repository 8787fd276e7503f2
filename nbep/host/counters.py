"""The counts of received tokens, which a notify kernel writes and the CPU polls.

 set 0   moe_recv_counter | one for each local expert | moe_recv_rdma_counter    the CPU waits for these
 set 1   the same                                                                no CPU waits

A launch of the second kind may still run when the next call resets the first set.
"""

from __future__ import annotations

from typing import NamedTuple

from nbep.device.layout.intranode import MAX_LOCAL_EXPERTS
from nbep.host.target.memory import PolledMemory

WORDS = 2 + MAX_LOCAL_EXPERTS
OF_NODE = WORDS - 1
NUM_BYTES = 2 * 4 * WORDS


class Addresses(NamedTuple):
    """Where a kernel writes."""

    moe_recv_counter: int
    moe_recv_expert_counter: int
    moe_recv_rdma_counter: int


class Received(NamedTuple):
    """What has come to a rank. of_node: what passes through it, 0 inside a node"""

    num_tokens: int
    of_experts: list[int]
    of_node: int


class Counters:
    """Both sets, NUM_BYTES from an offset of the memory on."""

    def __init__(self, memory: PolledMemory, offset: int):
        self._address = memory.address + offset
        self._words = memory.words(offset, WORDS)

    def addresses(self, polled: bool) -> Addresses:
        """Of the set that the CPU polls, or of the other one."""
        base = self._address + (0 if polled else 4 * WORDS)
        return Addresses(base, base + 4, base + 4 * OF_NODE)

    def reset(self) -> None:
        """Nothing is here yet; no launch that writes the polled set is left."""
        self._words.fill(-1)

    def poll(self, num_local_experts: int, between_nodes: bool) -> Received | None:
        """The counts; None while one of them is missing."""
        counts = self._words.poll(0, 1 + num_local_experts)
        if (counts < 0).any():
            return None
        of_node = self._words.poll(OF_NODE, OF_NODE + between_nodes)
        if (of_node < 0).any():
            return None
        total, *of_experts = (int(count) for count in counts)
        return Received(total, of_experts, int(of_node.sum()))
