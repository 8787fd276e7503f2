"""The memory of one `Buffer`: what its modes add to a SharedMemory.

symmetric memory  num_nvl_bytes of rings | barrier signals | pointer tables | calls; see layout.intranode
                  | num_zero_copy_bytes for calls without rings; see layout.direct
counters          moe_recv_counter, moe_recv_expert_counter: kernels write, the CPU polls
claim, workspace  this rank's kernels only
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from nbep.device.alignment import ALIGNMENT_BYTES
from nbep.device.kernels.get_dispatch_layout import LayoutWorkspace
from nbep.device.kernels.intranode.cached_notify import cached_notify_combine, cached_notify_dispatch
from nbep.device.kernels.intranode.notify_dispatch import notify_dispatch
from nbep.device.kernels.low_latency.calls import LOW_LATENCY_CALLS_DIFFER
from nbep.device.kernels.parts.arrivals import number_of
from nbep.device.kernels.parts.calls import CALLS_DIFFER, NUM_WORDS, Call
from nbep.device.layout.internode import call_offset
from nbep.device.layout.intranode import CALL_BYTES, CALL_ROWS, MAX_LOCAL_EXPERTS, TRAILER_BYTES, RingShape
from nbep.device.layout.low_latency import call_offset as word_offset
from nbep.device.layout.names import describe_nvl_offset, describe_offset
from nbep.device.protocols.peers import BUFFER_PTRS
from nbep.device.protocols.waits import FaultReport
from nbep.host import causes
from nbep.host.arguments import refuse
from nbep.host.calls import (
    DIGESTS,
    DISPATCH,
    ELASTIC_DISPATCH,
    VERBS,
    Arguments,
    CallLog,
    arguments_of,
    received_error,
)
from nbep.host.comm_work import CommWork
from nbep.host.config import Sizes
from nbep.host.elastic.memory import ElasticMemory
from nbep.host.handles import Identity, OfThisProcess
from nbep.host.internode.memory import InternodeMemory
from nbep.host.intranode.direct import DirectMemory
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.plans import Plans
from nbep.host.ranks.comm import Communicator
from nbep.host.ranks.timeouts import PeerTimeout, Undo
from nbep.host.rdma_memory import RdmaMemory
from nbep.host.shared_memory import Opened, SharedMemory
from nbep.host.target import base
from nbep.host.target.base import Runtime, Stream
from nbep.host.target.memory import PolledMemory
from nbep.host.transport.base import Transport

WORDS = 2 + MAX_LOCAL_EXPERTS
OF_NODE = WORDS - 1
NUM_BYTES = 2 * 4 * WORDS


class Received(NamedTuple):
    """What has come to a rank. of_node: what passes through it, 0 inside a node"""

    num_tokens: int
    of_experts: list[int]
    of_node: int


class Counters:
    """The counts of received tokens, which a notify kernel writes and the CPU polls.

     set 0   moe_recv_counter | one for each local expert | moe_recv_rdma_counter    the CPU waits for these
     set 1   the same                                                                no CPU waits

    A launch of the second kind may still run when the next call resets the first set.

    Both take NUM_BYTES from an offset of the memory on.
    """

    def __init__(self, memory: PolledMemory, offset: int):
        self._address = memory.address + offset
        self._words = memory.words(offset, WORDS)

    def addresses(self, polled: bool) -> tuple[int, int, int]:
        """Where kernels write in the set that the CPU polls, or in the other one, in the order of a set."""
        base = self._address + (0 if polled else 4 * WORDS)
        return base, base + 4, base + 4 * OF_NODE

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


BARRIER_KERNELS = notify_dispatch, cached_notify_dispatch, cached_notify_combine


class NodeMemory(CommWork, SharedMemory):
    """One rank's share of a buffer. Construction is collective. `identity` is what handles remember.

    check_faults: a buffer raises the same on every later call
    zero_rdma: for messages of whole 16 bytes, which take bytes along that were never written

    Raises: RuntimeError on every rank if one cannot allocate, or cannot reach a peer; it names the rank
    """

    hides_trailer = False
    polled_bytes = NUM_BYTES
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
        self.compares_handles = sizes.check_calls  # notify kernels compare whose handles calls get
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
        self.counters = Counters(self.host_visible, ALIGNMENT_BYTES)
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
            undo.callback(self.low_latency.workspace.free)
        if self.num_nodes > 1 and self.num_nvl_bytes > 0:
            self.internode = InternodeMemory(rdma, self.num_nodes, self.num_nvl_peers)
            undo.callback(self.internode.workspace.free)
        return rdma.handle

    def _close_peers(self) -> None:
        with Undo() as undo:  # the one also if the other fails
            undo.callback(super()._close_peers)
            if self.rdma is not None:
                undo.callback(self.rdma.transport.close)

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
            self.direct.arrays.clear()
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
    def layout_workspace(self) -> LayoutWorkspace:
        return LayoutWorkspace(self.device.address + ALIGNMENT_BYTES, self.device.address + ALIGNMENT_BYTES // 2)

    def compare(self, call: Call, handle: Any = None) -> None:
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
        """Why a wait has timed out, where that is known: another rank has made another call."""
        if report.site == CALLS_DIFFER:  # the words of the others may be on their way
            has_come, timeout_ns = (lambda: self._received_error() is not None), int(self.timeout_ms * 1e6)
            self.runtime.wait_until(has_come, lambda: "the words of another call", timeout_ns)
        return self._late_error() or self._received_error()

    def _late_error(self) -> Exception | None:
        """What words of low-latency calls say that no kernel has come to compare: of the latest call of each half."""
        mode = self.low_latency
        if mode is None:
            return None
        for half, call in enumerate(mode.halves):
            for index, word in enumerate(call.words if call is not None and call.is_received else ()):
                row = word_offset(mode.num_rdma_bytes, mode.num_ranks, half, 0, index)
                for peer, value in enumerate(mode.symmetric.read(row, mode.num_ranks, np.int32).tolist()):
                    if value < 0 and number_of(value) != word:
                        report = FaultReport(1, LOW_LATENCY_CALLS_DIFFER, peer, word, number_of(value), 0, 0, index)
                        return causes.cause_of(self.rank, report)
        return None

    def _received_error(self) -> ValueError | None:
        """What the words say that ranks have sent since one of them met another call; see kernels.parts.calls."""
        symmetric, rows, num_ranks = self.symmetric, self.num_nvl_bytes + CALL_ROWS, self.num_ranks
        if self.internode is not None:
            symmetric, rows = self.internode.rdma.symmetric, call_offset(self.internode.rdma.cells, self.num_nodes, 0)
        elif self.elastic is not None and self.elastic.rdma is not None:
            symmetric, rows = self.elastic.symmetric, call_offset(self.elastic.nodes.cells, num_ranks, 0)
        elif num_ranks > self.num_nvl_peers:  # a buffer of the low-latency mode alone
            return None
        words = symmetric.read(rows, num_ranks * CALL_BYTES // 4, np.int32).reshape(num_ranks, -1)[:, :NUM_WORDS]
        sent = {rank: (row - 1).tolist() for rank, row in enumerate(words) if row.all()}
        of_node = range(self.first_in_node, self.first_in_node + self.num_nvl_peers)
        return received_error(self.rank, of_node, sent)

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

    def await_counts(self, num_local_experts: int, timeout_ms: float = 0, limit: str = "") -> Received:
        """What comes, as the counters of a notify kernel say, for which the CPU waits; limit: timeout_ms in words

        The kernel's own waits are to be over first: they say more.
        """
        timeout_ms = timeout_ms or 2 * self.timeout_ms

        def poll() -> Received | None:
            return self.counters.poll(num_local_experts, self.internode is not None)

        self.runtime.wait_until(
            lambda: self.report.is_there() or poll() is not None,
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


class OnMemory(OfThisProcess):
    """What a Buffer and an ElasticBuffer have in common: memory until it is destroyed, or they go away."""

    explicitly_destroy: bool
    _memory: NodeMemory | None
    _is_deep_eps = False  # see CommWork

    def get_comm_stream(self) -> Stream:
        """The stream that this buffer's kernels run on, unless a call runs on the caller's own."""
        return self._usable("get_comm_stream").comm_stream

    def _usable(self, verb: str) -> NodeMemory:
        if self._memory is None:
            raise ValueError(f"buffer: got a destroyed one; {verb} must come before destroy")
        if self._memory.runtime.num_forks != base.num_forks:
            self._memory.runtime.check_caller(verb)
        return self._memory

    def _give_back(self) -> None:
        """Collective. Raises: ValueError if it is destroyed already, and what closing the memory raises"""
        memory = self._memory
        if memory is None:
            refuse("buffer", "one that is destroyed already", "destroyed once")
        memory.runtime.check_caller("destroy")
        self._memory = None
        memory.close()

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)
        if memory is None:
            return
        with suppress(Exception):
            memory.report.warn()
        if self.explicitly_destroy:
            warnings.warn(f"{self!r} goes away without destroy()", RuntimeWarning, stacklevel=2)
        else:
            memory.runtime.dropped[memory.name] = memory
