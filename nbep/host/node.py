"""What the verbs see of one rank's share of a buffer.

The counts of received tokens, which a notify kernel writes and the CPU polls.

 set 0   moe_recv_counter | one for each local expert | moe_recv_rdma_counter    the CPU waits for these
 set 1   the same                                                                no CPU waits

A launch of the second kind may still run when the next call resets the first set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.intranode import MAX_LOCAL_EXPERTS, RingShape
from nbep.device.protocols.peers import Bounds
from nbep.host.elastic.memory import ElasticMemory
from nbep.host.events import EventOverlap
from nbep.host.handles import Identity, Numbered
from nbep.host.internode.memory import InternodeMemory
from nbep.host.intranode.direct import DirectMemory
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.plans import Plans
from nbep.host.ranks.call_log import Arguments
from nbep.host.ranks.processes import Gone
from nbep.host.rdma_memory import RdmaMemory
from nbep.host.target.base import Array, Kernel, Runtime
from nbep.host.target.memory import PolledMemory, SymmetricMemory
from nbep.host.target.new_arrays import Make
from nbep.host.target.streams import Event, Stream
from nbep.host.transport.base import Transport

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


class Ordered(Protocol):
    """What the caller said of a call's place among other work; see Buffer.get_dispatch_layout. Requests have it."""

    @property
    def previous_event(self) -> EventOverlap | None: ...
    @property
    def async_finish(self) -> bool: ...
    @property
    def allocate_on_comm_stream(self) -> bool: ...


class Order(NamedTuple):
    """That alone."""

    previous_event: EventOverlap | None
    async_finish: bool
    allocate_on_comm_stream: bool


class Node(Protocol):
    """See `NodeMemory`, which is one.

    num_ranks, num_nvl_peers: of the group, of a node; identity: what handles remember
    compares_handles: notify kernels compare whose handles calls get; num_dispatches: that made one, so far
    ring_shape: of the latest launch; rdma, low_latency, direct, internode, elastic: None if the buffer has no such part
    """

    runtime: Runtime
    rank: int
    num_ranks: int
    num_nvl_peers: int
    num_nvl_bytes: int
    timeout_ms: float
    identity: Identity
    comm_stream: Stream
    stream: Stream  # of the call under way
    symmetric: SymmetricMemory
    transport: Transport
    counters: Counters
    check_faults: Callable[[], None]  # raise what a kernel has reported, if one has
    peers: Any
    is_deep_eps: bool  # of nbep.deep_ep
    compares_handles: bool
    num_dispatches: int
    ring_shape: RingShape | None
    latest_event: Event | None
    layout_plans: Plans[Any]
    counted_plans: Plans[Any]  # of dispatches without a handle
    cached_plans: Plans[Any]  # of those with one
    combine_plans: Plans[Any]
    elastic_plans: Plans[Any]  # of an ElasticBuffer's dispatches
    elastic_combine_plans: Plans[Any]
    rdma: RdmaMemory | None
    low_latency: LowLatencyMemory | None
    direct: DirectMemory | None
    internode: InternodeMemory | None
    elastic: ElasticMemory | None

    @property
    def num_nodes(self) -> int: ...
    @property
    def first_in_node(self) -> int: ...
    @property
    def bounds(self) -> Bounds: ...
    @property
    def layout_arrivals(self) -> int: ...
    @property
    def layout_totals(self) -> int: ...
    def add_reports(self, error: Exception) -> None: ...
    @property
    def has_fault(self) -> bool: ...
    def kernel(self, kernel: Kernel) -> Kernel: ...
    def check_open(self) -> None: ...
    def who_is_gone(self) -> Gone: ...
    def allocate(
        self, order: Ordered, make: Make | None = None, numbers: Sequence[int] = ()
    ) -> tuple[list[Array], list[Any]]: ...
    def await_counts(self, num_local_experts: int, timeout_ms: float = 0, limit: str = "") -> Received: ...
    def finish(self, async_finish: bool) -> EventOverlap: ...
    def compare(self, call: Call, handle: Numbered | None = None) -> None: ...
    def compare_call(self, verb: str, arguments: Callable[..., Arguments], *of: Any) -> None: ...
