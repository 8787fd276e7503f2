"""How calls of the normal mode between nodes and low-latency calls take turns with the bytes of the RDMA buffer.

 low-latency calls --hooks called--> a call between nodes --clean_low_latency_buffer--> low-latency calls

To the call between nodes. It fills the buffers of the ranks that have its place in other nodes, and its own send area.
 - It comes behind this rank's low-latency calls, whatever their stream.
 - Its notify tells those ranks that this one has come to it, so they may fill what low-latency calls have read here.
 - Its own send area may hold what a NIC has not read yet, for a rank with another place: that rank has not received it.
   A cached notify does not ask it. So where messages leave from the send area, all ranks come together once more: in
   the kernel of clean_low_latency_buffer.

To low-latency calls. They fill the buffers of all ranks, where a call between nodes may still read.
clean_low_latency_buffer comes behind this rank's call, whatever its stream, and lets all ranks come together.

Source: DeepEP deep_ep/buffer.py, Buffer.clean_low_latency_buffer ("after running the normal dispatch/combine")
"""

from __future__ import annotations

from nbep.host.low_latency.clean import prepare_clean
from nbep.host.node import Node


def check_turn(memory: Node, verb: str) -> None:
    """Raises: ValueError if a low-latency call is under way"""
    if memory.low_latency is not None:
        memory.low_latency.check_received(verb)


def take_turn(memory: Node, verb: str) -> None:
    """Let what comes next on the stream of the call have the RDMA buffer."""
    mode = memory.low_latency
    if mode is not None and mode.give_way(verb, memory.stream) and mode.sends_from_buffer:
        prepare_clean(memory, mode).launch(memory.stream)
