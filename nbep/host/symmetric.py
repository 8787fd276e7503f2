"""The memory of one `Buffer`: what its modes add to a SharedMemory.

symmetric memory  num_nvl_bytes of rings | barrier signals | pointer tables | calls; see layout.intranode
                  | num_zero_copy_bytes for calls without rings; see layout.direct
counters          moe_recv_counter, moe_recv_expert_counter: kernels write, the CPU polls
claim, workspace  this rank's kernels only
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from nbep.device.alignment import ALIGNMENT_BYTES
from nbep.device.kernels.intranode.cached_notify import cached_notify_combine, cached_notify_dispatch
from nbep.device.kernels.intranode.notify_dispatch import notify_dispatch
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.intranode import CALL_ROWS, MAX_LOCAL_EXPERTS, TRAILER_BYTES, RingShape
from nbep.device.layout.names import describe_nvl_offset, describe_offset
from nbep.device.protocols.peers import BUFFER_PTRS
from nbep.device.protocols.waits import FaultReport
from nbep.host import causes, node
from nbep.host.arguments import refuse
from nbep.host.calls import DIGESTS, DISPATCH, ELASTIC_DISPATCH, VERBS, arguments_of
from nbep.host.config import Sizes
from nbep.host.elastic.memory import ElasticMemory
from nbep.host.events import EventHandle, EventOverlap, handle_of
from nbep.host.handles import Identity, Numbered
from nbep.host.internode.memory import InternodeMemory
from nbep.host.intranode.direct import DirectMemory
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.node import Ordered
from nbep.host.plans import Plans
from nbep.host.ranks.call_log import Arguments, CallLog
from nbep.host.ranks.comm import Communicator
from nbep.host.ranks.timeouts import PeerTimeout, Undo
from nbep.host.rdma_memory import RdmaMemory
from nbep.host.shared_memory import Opened, SharedMemory
from nbep.host.target.base import Array, Runtime
from nbep.host.target.new_arrays import Make
from nbep.host.target.streams import Event, PastEvent, Stream
from nbep.host.transport.base import Transport


class CommWork:
    """Where the calls of a buffer run, one behind the other.

    A call runs on the comm stream. One that holds the caller's current stream back anyway runs on that stream itself,
    where it is the rank's own: then no event has to lead to the comm stream and back.

    stream: of the call under way
    is_deep_eps: a blocking call returns the empty event that DeepEP's does
    """

    runtime: Runtime
    comm_stream: Stream
    check_faults: Callable[[], None]
    stream: Stream
    is_deep_eps = False
    latest_event: Event | None = None  # at the end of the latest call, where the host reads arrays
    _last_stream: Stream | None = None  # of the call before
    _previous: EventHandle | None = None  # what the call under way comes behind

    def _choose_stream(self, is_blocking: bool) -> bool:
        """Set `stream`, whose next work comes behind the call before. Returns whether it is the caller's own.

        is_blocking: the call comes behind the current stream, which waits for it
        """
        runtime = self.runtime
        is_callers = runtime.has_own_stream and is_blocking
        stream = self.stream = runtime.current_stream if is_callers else self.comm_stream
        last = self._last_stream
        if last is not stream and not runtime.is_capturing:  # the order of a graph's calls is the caller's
            if last is not None and last.key != stream.key:
                if last.is_capturing:  # its end is that of work that a graph records, not of the call
                    got = "another one than the call before had, which is being captured"
                    refuse("current stream", got, "the same one until the capture has ended")
                stream.wait(last.record())
            self._last_stream = stream
        return is_callers

    def allocate(
        self, order: Ordered, make: Make | None = None, numbers: Sequence[int] = ()
    ) -> tuple[list[Array], list[Any]]:
        """New arrays for the next kernels to write, of `make`; after it `stream` comes behind what it has to.

        That is previous_event, or else the current stream, which may still use memory that an allocator hands out. So
        behind an event alone the memory is the comm stream's own, if its library minds other streams; if not, the comm
        stream comes behind the current one after all.
        """
        made: tuple[list[Array], list[Any]] = ([], [])
        if order.previous_event is None:
            if make is not None:
                made = make(numbers)
            if not self._choose_stream(not order.async_finish):
                self.comm_stream.wait_current_stream()
            return made
        self._choose_stream(False)
        previous = self._previous = handle_of(order.previous_event)
        if previous is not None and not isinstance(previous.event, PastEvent):
            self.comm_stream.wait(previous.event)
        is_own = previous is not None and (order.allocate_on_comm_stream or not self.runtime.is_capturing)
        if make is not None:
            with self.runtime.allocating_on(self.comm_stream) if is_own else nullcontext():
                made = make(numbers)
        if not (is_own and (not made[0] or self.runtime.let_current_stream_use(made[0]))):
            self.comm_stream.wait_current_stream()
        return made

    def finish(self, async_finish: bool) -> EventOverlap:
        """The event at the end of a call; unless async_finish, the caller's current stream waits for it."""
        end: Event | None = None
        if async_finish or self.stream is self.comm_stream:
            end = self.comm_stream.record() if async_finish else self.comm_stream.hand_over()
            if self.runtime.host_reads_arrays:
                self.latest_event = end
        previous, self._previous = self._previous, None
        checks: tuple[Callable[[], None], ...] = (self.check_faults,)
        if previous is not None:  # the call may have read what a call of another buffer has failed to bring
            checks += tuple(check for check in previous.checks if check != self.check_faults)
        if not async_finish:
            for check in checks:
                check()
            if self.is_deep_eps:
                return EventOverlap()
        return EventOverlap(EventHandle(end, checks, self.stream))

    def synchronize_calls(self) -> None:
        """Block until the calls so far are done, which may be on a stream of the caller."""
        self.comm_stream.synchronize()
        if self._last_stream is not None and self._last_stream is not self.comm_stream:
            self._last_stream.synchronize()


BARRIER_KERNELS = notify_dispatch, cached_notify_dispatch, cached_notify_combine


class NodeMemory(CommWork, SharedMemory):
    """One rank's share of a buffer. Construction is collective. `identity` is what handles remember.

    check_faults: a buffer raises the same on every later call
    zero_rdma: for messages of whole 16 bytes, which take bytes along that were never written

    Raises: RuntimeError on every rank if one cannot allocate, or cannot reach a peer; it names the rank
    """

    hides_trailer = False
    polled_bytes = node.NUM_BYTES
    own_name = "claim and layout workspace"

    def __init__(
        self,
        comm: Communicator,
        runtime: Runtime,
        sizes: Sizes,
        timeout_ms: float,
        transport: Transport,
        *,
        rdma_transport: Transport | None = None,
        num_nvl_peers: int = 0,
        zero_rdma: bool = False,
    ):
        self.num_nvl_bytes = sizes.num_nvl_bytes
        self.identity = Identity()
        self.ring_shape: RingShape | None = None  # of the latest launch
        self.layout_plans: Plans[Any] = Plans(runtime)
        self.counted_plans: Plans[Any] = Plans(runtime)
        self.cached_plans: Plans[Any] = Plans(runtime)
        self.combine_plans: Plans[Any] = Plans(runtime, 2)  # as many rows of x and topk_weights as the handle says
        self.elastic_plans: Plans[Any] = Plans(runtime)
        self.elastic_combine_plans: Plans[Any] = Plans(runtime)
        self.rdma: RdmaMemory | None = None
        self.low_latency: LowLatencyMemory | None = None  # unless the buffer has no low-latency mode
        self.direct: DirectMemory | None = None  # unless the buffer has no room for it
        self.internode: InternodeMemory | None = None  # where the normal mode goes between nodes
        self.elastic: ElasticMemory | None = None  # of an ElasticBuffer
        # A rank that was masked has missed calls of the others.
        self._call_log = None if sizes.enable_shrink else CallLog.shared(comm)
        if self._call_log is not None and comm.rank == 0:
            runtime.tell_calls(self._call_log.so_far)
        self.compares_handles = sizes.check_calls
        self.num_dispatches = 0  # that made a handle
        self._num_calls, self._last_call = 0, ""  # collective ones; a replay of a CUDA graph counts for none
        self._sizes, self._rdma_transport, self._zero_rdma = sizes, rdma_transport, zero_rdma
        num_nodes = comm.size // (num_nvl_peers or comm.size)
        # Counters of get_dispatch_layout, at most: of ranks, of nodes and of experts.
        self.own_bytes = 4 * (comm.size + num_nodes + comm.size * MAX_LOCAL_EXPERTS)
        self.trailer_bytes = TRAILER_BYTES + sizes.num_zero_copy_bytes
        super().__init__(
            comm,
            runtime,
            sizes.num_nvl_bytes,
            timeout_ms,
            transport,
            handle_type=sizes.handle_type,
            num_nvl_peers=num_nvl_peers,
            others=() if rdma_transport is None else (rdma_transport,),
            lets_ranks_go=sizes.enable_shrink,
        )

    def _allocate_more(self, undo: Undo) -> Any:
        """The areas of the modes; the handle of the RDMA buffer."""
        runtime, sizes = self.runtime, self._sizes
        self.stream = self.comm_stream
        # A row of words that is not 0 is a call that differs: see kernels.parts.calls.
        self.symmetric.write(self.num_nvl_bytes + CALL_ROWS, np.zeros((TRAILER_BYTES - CALL_ROWS) // 4, np.int32))
        if sizes.num_zero_copy_bytes > 0:
            start = self.num_nvl_bytes + TRAILER_BYTES
            self.direct = DirectMemory(runtime, self.symmetric, start, sizes.num_zero_copy_bytes, self.num_ranks)
        self.counters = node.Counters(self.host_visible, ALIGNMENT_BYTES)
        if self._rdma_transport is None:
            return None
        nodes = self.num_ranks, self.num_nodes
        rdma = RdmaMemory(
            runtime,
            self.comm,
            sizes.num_rdma_bytes,
            *nodes,
            sizes.handle_type,
            self._rdma_transport,
            self._zero_rdma,
        )
        undo.callback(self._free, rdma.symmetric)
        self.rdma = rdma
        if sizes.low_latency_mode:
            self.low_latency = LowLatencyMemory(rdma, self.rank, self.num_ranks, sizes)
            undo.callback(self.low_latency.free)
        if self.num_nodes > 1 and self.num_nvl_bytes > 0:
            self.internode = InternodeMemory(rdma, self.num_nodes, self.num_nvl_peers)
            undo.callback(self.internode.free)
        return rdma.handle

    def _close_peers(self) -> None:
        with Undo() as undo:  # the one also if the other fails
            undo.callback(super()._close_peers)
            if self.rdma is not None:
                undo.callback(self.rdma.close_peers)

    def _open_peers(self, opened: list[Opened]) -> None:
        if self.rdma is not None:
            kernels = self.internode.kernels if self.internode else ()
            if self.low_latency is not None:
                kernels += self.low_latency.kernels()
            memories = self.rdma.open([each.more for each in opened], self.bounds, kernels)
            if self.low_latency is not None:
                self.low_latency.open(memories)
        super()._open_peers(opened)
        if self.handle_type == "host":
            for kernel in BARRIER_KERNELS:  # before one of them waits for other ranks: see Runtime.load
                self.runtime.load(self.kernel(kernel))
        if self.direct is not None:
            bases = self.symmetric.read(self.num_bytes + BUFFER_PTRS, self.num_ranks, np.int64)
            self.direct.open(bases, self.peers)

    def _masked_ranks(self) -> list[int]:
        return [] if self.low_latency is None else self.low_latency.masked_ranks()

    def _synchronize(self) -> bool:
        """Wait for the work of this rank. Returns `is_shown`."""
        self.synchronize_calls()
        if self.low_latency is not None:
            self.low_latency.synchronize()
        if self.direct is not None:
            self.direct.forget()
        return self.is_shown

    @property
    def is_shown(self) -> bool:
        """As SymmetricMemory.is_shown."""
        return super().is_shown or (self.rdma is not None and self.rdma.symmetric.is_shown)

    def check_open(self) -> None:
        """Raises: ValueError if the memory has been given back"""
        if not self._is_open:
            refuse("buffer", "one that is destroyed", "used before destroy")

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_nvl_peers

    @property
    def layout_arrivals(self) -> int:
        return self.device.address + ALIGNMENT_BYTES // 2

    @property
    def layout_totals(self) -> int:
        return self.device.address + ALIGNMENT_BYTES

    def compare(self, call: Call, handle: Numbered | None = None) -> None:
        """As compare_call, of a call whose notify kernel compares it, too. handle: that it is given"""
        verb = VERBS[call.verb]
        if self._call_log is not None:
            self._log_call(verb, arguments_of(call, handle))
        self._num_calls, self._last_call = self._num_calls + 1, verb
        if handle is None and verb in (DISPATCH, ELASTIC_DISPATCH):
            self.num_dispatches = 1 + self.num_dispatches % (DIGESTS - 2)

    def compare_call(self, verb: str, arguments: Callable[..., Arguments], *of: Any) -> None:
        """Count a collective call, and compare what must be alike on all ranks, if they live in this process.

        arguments: what gives them for the values behind it
        It comes right before the first launch: a call that has failed until then may be made again.

        Raises: ValueError if this rank differs from one that was here before
        """
        if self._call_log is not None:
            self._log_call(verb, arguments(*of))
        self._num_calls, self._last_call = self._num_calls + 1, verb

    def _log_call(self, verb: str, arguments: Arguments) -> None:
        assert self._call_log is not None
        if self.runtime.is_capturing:
            self._call_log.close()
        self._call_log.add(self.rank, verb, arguments)

    @property
    def network_of_waits(self) -> Transport:
        return self.transport if self.rdma is None else self.rdma.transport

    def cause_of(self, report: FaultReport) -> Exception | None:
        return causes.cause_of(self.rank, report)

    def known_cause(self, report: FaultReport) -> Exception | None:
        return causes.known_cause(self, report)

    def add_reports(self, error: Exception) -> None:
        """Add to a time-out how many calls this rank has made, and on rank 0 who waits for whom on all ranks."""
        error.add_note(self.calls)
        super().add_reports(error)
        if isinstance(error, PeerTimeout) and error.report is not None and self.runtime.target == "cuda":
            error.add_note("nbep.debug.save_call before a call keeps its routing, to run it on the emulator")

    @property
    def calls(self) -> str:
        """How many collective calls this rank has made: a rank that has made fewer is the one that others wait for."""
        last = f", the last one {self._last_call}" if self._last_call else ""
        return f"rank {self.rank} has made {self._num_calls} collective call{'s' * (self._num_calls != 1)}{last}"

    @property
    def has_fault(self) -> bool:
        """Whether a kernel of this rank has reported something."""
        return self.report.is_there()

    def await_counts(self, num_local_experts: int, timeout_ms: float = 0, limit: str = "") -> node.Received:
        """What comes, as the counters of a notify kernel say, for which the CPU waits; limit: timeout_ms in words

        The kernel's own waits are to be over first: they say more.
        """
        timeout_ms = timeout_ms or 2 * self.timeout_ms

        def poll() -> node.Received | None:
            return self.counters.poll(num_local_experts, self.internode is not None)

        self.runtime.wait_until(
            lambda: self.has_fault or poll() is not None,
            lambda: "moe_recv_counter: the counts of received tokens",
            int(1e6 * timeout_ms),
        )
        self.check_faults()
        received = poll()
        if received is None:
            gone = self.who_is_gone()
            raise RuntimeError(
                f"rank {self.rank}: the counts of received tokens did not arrive in {limit or f'{timeout_ms:g} ms'}"
                + (f"; {gone}" if gone else "")
            )
        return received

    def _describe(self, offset: int) -> str:
        if self.direct is not None and offset >= self.direct.start:
            return self.direct.describe(offset)
        if self.elastic is not None and offset < self.num_nvl_bytes:
            return self.elastic.describe(offset)
        if self.internode is not None and offset < self.num_nvl_bytes:
            return describe_nvl_offset(self.ring_shape, self.num_nodes, self.num_nvl_peers, offset)
        return describe_offset(self.ring_shape, self.num_ranks, self.num_nvl_bytes, offset)

    def _describe_own(self, offset: int) -> str:
        if offset >= ALIGNMENT_BYTES:
            return f"layout totals[{(offset - ALIGNMENT_BYTES) // 4}]"
        return "claim" if offset < ALIGNMENT_BYTES // 2 else "layout arrivals"
