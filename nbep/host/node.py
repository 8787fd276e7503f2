"""What the verbs see of one rank's share of a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.intranode import RingShape
from nbep.device.protocols.peers import Bounds
from nbep.host.counters import Counters, Received
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
from nbep.host.target.memory import SymmetricMemory
from nbep.host.target.new_arrays import Make
from nbep.host.target.streams import Event, Stream
from nbep.host.transport.base import Transport


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
