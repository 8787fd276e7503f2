"""The memory of one `Buffer`, or of a user's own kernels: what peers write into, and what kernels and CPU share.

construct: allocate -> handles to all ranks -> open peers, fill the pointer tables; use; close. A rank that fails there
is known to all ranks, and all give back what they have made.

symmetric memory  num_nvl_bytes of rings | barrier signals | pointer tables | calls; see layout.intranode
                  | num_zero_copy_bytes for calls without rings; see layout.direct
counters          moe_recv_counter, moe_recv_expert_counter: kernels write, the CPU polls
report            FaultReport: kernels write, the CPU reads
claim, workspace  this rank's kernels only
"""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from nbep.device.jit import over
from nbep.device.kernels.intranode.cached_notify_combine import cached_notify_combine
from nbep.device.kernels.intranode.cached_notify_dispatch import cached_notify_dispatch
from nbep.device.kernels.intranode.notify_dispatch import notify_dispatch
from nbep.device.kernels.parts.calls import Call
from nbep.device.layout.intranode import (
    ALIGNMENT_BYTES,
    BARRIER_SIGNAL_BYTES,
    MAX_LOCAL_EXPERTS,
    MAX_NVL_PEERS,
    POINTER_TABLE_BYTES,
    TRAILER_BYTES,
    RingShape,
)
from nbep.device.layout.names import describe_nvl_offset, describe_offset
from nbep.device.protocols.peers import Bounds, HostPeers, Peers
from nbep.host import counters, validate
from nbep.host.arguments import integer, refuse
from nbep.host.calls import DIGESTS, DISPATCH, ELASTIC_DISPATCH, VERBS, arguments_of
from nbep.host.causes import REPORT_WORDS, KernelReport
from nbep.host.comm_work import CommWork
from nbep.host.config import Sizes
from nbep.host.connect import connect
from nbep.host.dropped import KeptMemory, Name, give_back_dropped, idle_names, keep_dropped
from nbep.host.elastic.memory import ElasticMemory
from nbep.host.faults import destroy_error, destroyed_without
from nbep.host.handles import Identity, Numbered
from nbep.host.internode.memory import InternodeMemory
from nbep.host.intranode.direct import DirectMemory
from nbep.host.low_latency.memory import LowLatencyMemory
from nbep.host.plans import Plans
from nbep.host.ranks.await_ranks import end_without_mpi
from nbep.host.ranks.call_log import Arguments, CallLog
from nbep.host.ranks.comm import DESTROY, Communicator, await_all, gather_results, is_mpi_comm
from nbep.host.ranks.hosts import hosts_of
from nbep.host.ranks.processes import Gone, Process, who_is_gone
from nbep.host.ranks.roll_call import RollCall
from nbep.host.ranks.undo import Undo
from nbep.host.ranks.who_waits import explain
from nbep.host.rdma_memory import RdmaMemory
from nbep.host.target.base import Kernel, Runtime
from nbep.host.target.memory import HandleType, Memory, SymmetricMemory, WantedMemory
from nbep.host.transport import check_target, create_transport
from nbep.host.transport.base import NetworkOptions, NicOptions, Transport, TransportName

MAX_PLANS = 1024
BARRIER_KERNELS = notify_dispatch, cached_notify_dispatch, cached_notify_combine
AnyMemory = TypeVar("AnyMemory", bound=Memory)


def _describe_workspace(offset: int) -> str:
    """Name the cell at an offset of the claim and layout workspace, for reports."""
    if offset >= ALIGNMENT_BYTES:
        return f"layout totals[{(offset - ALIGNMENT_BYTES) // 4}]"
    return "claim" if offset < ALIGNMENT_BYTES // 2 else "layout arrivals"


class NodeMemory(CommWork):
    """One rank's share of a buffer. Construction is collective. `identity` is what handles remember.

    Kernels of one's own get theirs from `create`, and use

        runtime               launch, and what else a target gives; see Runtime
        comm_stream           the stream to launch on
        symmetric             the symmetric memory: its address here, array(dtype, offset, count), write(offset, values)
        peers, bounds         arguments for kernels: see protocols.peers; their type depends on handle_type
        network               another one, for the functions of nbep.device.network; its type depends on the transport
        wait(), close()
        check_faults          raise what a kernel has reported, if one has; a buffer raises the same on every later call

    Raises: RuntimeError on every rank if one cannot allocate, or cannot reach a peer; it names the rank
    """

    @classmethod
    def create(
        cls,
        comm: Any,
        num_bytes: int,
        *,
        timeout_ms: float = 100_000,
        handle_type: HandleType = "ipc",
        cells: Mapping[str, int] | None = None,
        transport: TransportName = "direct",
        num_nvl_peers: int = MAX_NVL_PEERS,
        num_qps: int = 1,
        nic: NicOptions | None = None,
    ) -> NodeMemory:
        """Symmetric memory for kernels of one's own. It is all zeros on all ranks when this returns. Collective.

        Args:   comm         what nbep.spawn passes, a communicator of mpi4py, or a process group of torch.distributed;
                             at most 8 ranks, those of a node on one host
                num_bytes    of each rank, a multiple of 128; the same on all ranks
                timeout_ms   longest time that one wait of a kernel may take, above 0; see Bounds
                handle_type  as Buffer's
                cells        name -> byte offset where it begins: what reports and traces call the memory from there up
                             to the next name; at an offset within it, `name + bytes`
                transport    what is behind `network`: "direct", and all peers are mapped, or "ibgda"
                num_nvl_peers  with "ibgda": ranks of a node, whose memory is mapped; 1 to 8
                num_qps, nic   with "ibgda": queue pairs for each peer of another node; see Buffer, NicOptions
        Raises: ValueError on every rank if an argument is wrong on one; RuntimeError as the constructor
        Blocks: until all ranks of comm are here
        """
        communicator, runtime = connect(None, comm)

        def check() -> tuple[tuple[int, HandleType, NetworkOptions], float, list[tuple[int, str]], int, list[Name]]:
            if communicator.size > MAX_NVL_PEERS:
                refuse("comm", f"{communicator.size} ranks", f"at most {MAX_NVL_PEERS} ranks")
            if cells is not None and not isinstance(cells, Mapping):
                refuse("cells", type(cells).__name__, "a mapping from names to offsets, or None")
            offsets = sorted((integer(f"cells[{name!r}]", at, 0), str(name)) for name, at in (cells or {}).items())
            size = validate.symmetric_memory(runtime, "num_bytes", num_bytes, 1, handle_type)
            node_size = min(integer("num_nvl_peers", num_nvl_peers, 1), communicator.size)
            qps = integer("num_qps", num_qps, 1)
            options = NetworkOptions.check(transport, node_size, qps, True, nic or NicOptions(), communicator.size)
            check_target(runtime, options)
            validate.host_memory(Sizes(size, handle_type), options.transport, 1)
            longest_ms = validate.timeout_ms("timeout_ms", timeout_ms)
            return (size, handle_type, options), longest_ms, offsets, next(runtime.buffer_numbers), idle_names(runtime)

        every_alike, timeouts_ms, every_offsets, numbers, held = zip(*gather_results(communicator, check), strict=True)
        names = "num_bytes", "handle_type", "transport and its options"
        for name, values in zip(names, zip(*every_alike, strict=True), strict=True):
            validate.same_on_all_ranks(name, list(values))
        give_back_dropped(runtime, held)
        (size, _, options), longest_ms = every_alike[communicator.rank], timeouts_ms[communicator.rank]
        end = create_transport(runtime, communicator, options, size + TRAILER_BYTES, handle_type)
        memory = cls(communicator, runtime, Sizes(size, handle_type), longest_ms, end, zero=True)
        memory._cells, memory.name = every_offsets[communicator.rank], numbers
        await_all(communicator)
        return memory

    def __init__(
        self,
        comm: Communicator,
        runtime: Runtime,
        sizes: Sizes,
        timeout_ms: float,
        transport: Transport,
        *,
        zero: bool = False,
        rdma_transport: Transport | None = None,
        num_nvl_peers: int = 0,
    ):
        self.runtime = runtime
        self.comm = comm
        self.rank = comm.rank
        self.num_ranks = comm.size
        self.num_nvl_peers = num_nvl_peers or comm.size  # ranks of a node
        self.num_nvl_bytes = sizes.num_nvl_bytes
        self.timeout_ms = timeout_ms
        self.transport = transport
        self.identity = Identity()
        self.name: tuple[int, ...] = ()  # see host.dropped
        self.ring_shape: RingShape | None = None  # of the latest launch
        self._cells: list[tuple[int, str]] = []
        self.plans: Plans[Any] = Plans(MAX_PLANS)
        self.rdma: RdmaMemory | None = None
        self.low_latency: LowLatencyMemory | None = None  # unless the buffer has no low-latency mode
        self.direct: DirectMemory | None = None  # unless the buffer has no room for it
        self.internode: InternodeMemory | None = None  # where the normal mode goes between nodes
        self.elastic: ElasticMemory | None = None  # of an ElasticBuffer
        self._is_open = True
        self._kept: list[SymmetricMemory] | None = None  # what is shown when all else is given back
        # A rank that was masked has missed calls of the others.
        self._call_log = None if sizes.enable_shrink else CallLog.shared(comm)
        self.has_verbs = not zero  # kernels of one's own are launched without any
        if self._call_log is not None and self.has_verbs and comm.rank == 0:
            runtime.tell_calls(self._call_log.so_far)
        self.compares_handles = sizes.check_calls
        self.num_dispatches = 0  # that made a handle
        self._num_calls, self._last_call = 0, ""  # collective ones; a replay of a CUDA graph counts for none
        with Undo() as undo:
            undo.callback(transport.end)
            if rdma_transport is not None:
                undo.callback(rdma_transport.end)
            self._roll_call = RollCall(comm, sizes.enable_shrink)
            undo.callback(self._roll_call.close)
            handles = gather_results(comm, lambda: self._allocate(sizes, zero, rdma_transport, undo))
            self._processes = [process for _, _, process in handles]
            # CUDA: memory must not be freed while another process has it open.
            undo.callback(lambda: await_all(comm, DESTROY))
            undo.callback(self._close_peers)
            gather_results(comm, lambda: self._open_peers(handles))
            self._undo = undo.pop_all()

    def _allocate(
        self, sizes: Sizes, zero: bool, rdma_transport: Transport | None, undo: Undo
    ) -> tuple[Any, Any, Process]:
        """Make everything that is this rank's; what peers need to open the symmetric memories."""

        def owned(memory: AnyMemory) -> AnyMemory:
            undo.callback(memory.free)
            return memory

        runtime, handle_type = self.runtime, sizes.handle_type
        self.stream = self.comm_stream = runtime.create_stream("comm")
        undo.callback(self.comm_stream.close)
        num_bytes = self.num_nvl_bytes + TRAILER_BYTES + sizes.num_zero_copy_bytes
        self._signal_table: Memory | None = None  # in the symmetric memory, unless that is the host's
        if handle_type == "host":
            self._signal_table = owned(runtime.allocate(8 * self.num_ranks, "table of barrier signals"))
        wanted = WantedMemory(num_bytes, "nvl_buffer", self._describe, handle_type, zero)
        self.symmetric = self.transport.allocate(self.comm, wanted)
        undo.callback(self._free, self.symmetric)
        if sizes.num_zero_copy_bytes > 0:
            start = self.num_nvl_bytes + TRAILER_BYTES
            self.direct = DirectMemory(runtime, self.symmetric, start, sizes.num_zero_copy_bytes, self.num_ranks)
        self.symmetric.write(self.num_nvl_bytes, np.zeros(BARRIER_SIGNAL_BYTES // 4, np.int32))
        self.device = owned(
            runtime.allocate(
                ALIGNMENT_BYTES + 4 * self._num_layout_counters, "claim and layout workspace", _describe_workspace
            )
        )
        self.host_visible = owned(
            runtime.allocate_host_visible(ALIGNMENT_BYTES + counters.NUM_BYTES, "fault report and counters")
        )
        self.report = KernelReport(self, self.host_visible.words(0, REPORT_WORDS))
        self.check_faults = self.report.check
        self.counters = counters.Counters(self.host_visible, ALIGNMENT_BYTES)
        assert 4 * REPORT_WORDS <= ALIGNMENT_BYTES
        if rdma_transport is None:
            return self.transport.handle, None, Process.own()
        rdma = RdmaMemory(
            runtime, self.comm, sizes.num_rdma_bytes, self.num_ranks, self.num_nodes, handle_type, rdma_transport
        )
        undo.callback(self._free, rdma.symmetric)
        self.rdma = rdma
        if sizes.low_latency_mode:
            self.low_latency = LowLatencyMemory(rdma, self.rank, self.num_ranks, sizes)
            undo.callback(self.low_latency.free)
        if self.num_nodes > 1 and self.num_nvl_bytes > 0:
            self.internode = InternodeMemory(rdma, self.num_nodes, self.num_nvl_peers)
            undo.callback(self.internode.free)
        return self.transport.handle, rdma.handle, Process.own()

    def _close_peers(self) -> None:
        with Undo() as undo:  # the one also if the other fails
            undo.callback(self.transport.close)
            if self.rdma is not None:
                undo.callback(self.rdma.close_peers)

    def _open_peers(self, handles: list[tuple[Any, Any, Process]]) -> None:
        """Open the peers' memory and write their addresses where kernels find them."""
        if self.rdma is not None:
            kernels = self.internode.kernels if self.internode else ()
            if self.low_latency is not None:
                kernels += self.low_latency.kernels()
            memories = self.rdma.open([rdma for _, rdma, _ in handles], self.bounds, kernels)
            if self.low_latency is not None:
                self.low_latency.open(memories)
        buffer_ptrs = self.num_nvl_bytes + BARRIER_SIGNAL_BYTES
        signal_ptrs = buffer_ptrs + POINTER_TABLE_BYTES
        self.network = self.transport.open([nvl for nvl, _, _ in handles], buffer_ptrs, self.bounds)
        bases = self.symmetric.read(buffer_ptrs, self.num_ranks, np.int64)
        self.symmetric.write(signal_ptrs, np.where(bases != 0, bases + self.num_nvl_bytes, 0))
        if (
            not self.has_verbs
        ):  # nbep's own cells, behind the caller's bytes, are out of bounds for the caller's kernels
            buffers = np.array(self.symmetric.cut(bases.tolist(), self.num_nvl_bytes), np.int64)
            self.network = self.transport.show(self.network, buffer_ptrs, buffers)
        first = self.first_in_node
        here = self.rank - first, self.num_nvl_peers
        if self._signal_table is None:
            tables = self.symmetric.address + 8 * first
            self.peers = Peers(tables + buffer_ptrs, tables + signal_ptrs, *here)
        else:
            self._signal_table.write(0, self.symmetric.read(signal_ptrs, self.num_ranks, np.int64))
            self.peers = HostPeers(self.network.buffer_ptrs + 8 * first, self._signal_table.address + 8 * first, *here)
            for kernel in BARRIER_KERNELS:  # before one of them waits for other ranks: see Runtime.load
                self.runtime.load(self.kernel(kernel))
        if self.direct is not None:
            self.direct.open(bases, self.peers)

    def close(self) -> None:
        """Wait for the peers, then for the work of all, then give everything back. Collective.

        Ranks that are masked are not waited for. They may be dead, or use the memory still: nothing is given back then,
        and a RuntimeWarning says so.

        Raises: on every rank if the work of one failed; it names the rank, and what can be given back is
                PeerTimeout if a peer does not come, twice as late as any kernel's wait for it; nothing is given back
                what a kernel of this rank has reported and no call has raised yet; all is given back
        """
        with self.report.raised_at_last():
            self._close()

    def _close(self) -> None:
        masked: list[int] = []
        if self.low_latency is not None:
            with suppress(Exception):  # all ranks are told of it below
                masked = self.low_latency.masked_ranks()
        # A kernel that waits for this rank times out first, and says more.
        timeout_ms = 2 * self.timeout_ms
        missing, masked = self._roll_call.meet(int(timeout_ms * 1e6), masked)
        if missing:
            gone = self.who_is_gone()
            if gone.hosts and is_mpi_comm(self.comm):
                end_without_mpi()  # whether a process of another host has ended cannot be seen
            error = destroy_error(self.rank, missing, timeout_ms, gone)
            self.add_reports(error)
            raise error
        if masked:
            self._synchronize()
            self._leave()
            if is_mpi_comm(self.comm) and who_is_gone(self._processes):
                end_without_mpi(0)
            warnings.warn(destroyed_without(self.rank, masked), RuntimeWarning, stacklevel=3)
            return
        try:
            is_shown = any(gather_results(self.comm, self._synchronize, DESTROY))
        except Exception:
            with suppress(Exception):  # a context that has failed frees nothing; the first error says why
                self._give_back()
            raise
        self._kept = [] if is_shown else None
        self._give_back()
        if is_shown:
            keep_dropped(KeptMemory(self.name, self.runtime, self._kept or ()))

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
        return self.symmetric.is_shown or (self.rdma is not None and self.rdma.symmetric.is_shown)

    def _free(self, memory: SymmetricMemory) -> None:
        """Give symmetric memory back, or keep it if it is shown on any rank."""
        if self._kept is None:
            memory.free()
        else:
            memory.is_kept = True
            self._kept.append(memory)

    def check_open(self) -> None:
        """Raises: ValueError if the memory has been given back"""
        if not self._is_open:
            refuse("buffer", "one that is destroyed", "used before destroy")

    def _leave(self) -> None:
        """Let nobody use it any more."""
        self._is_open = False
        self.report.keep()

    def _give_back(self) -> None:
        self._leave()
        self._undo.close()

    @cached_property
    def bounds(self) -> Bounds:
        """How the waits of a launch are bounded."""
        return Bounds(int(self.timeout_ms * 1e6), self.device.address, self.host_visible.address)

    def kernel(self, kernel: Kernel) -> Kernel:
        """One of nbep's kernels that meet the peers, for where these have their memory."""
        kind: Any = type(self.peers)
        return over(kernel, kind, "peers")

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.num_nvl_peers

    @property
    def first_in_node(self) -> int:
        return self.rank // self.num_nvl_peers * self.num_nvl_peers

    @property
    def _num_layout_counters(self) -> int:
        """Counters of get_dispatch_layout, at most: of ranks, of nodes and of experts."""
        return self.num_ranks + self.num_nodes + self.num_ranks * MAX_LOCAL_EXPERTS

    @property
    def layout_arrivals(self) -> int:
        return self.device.address + ALIGNMENT_BYTES // 2

    @property
    def layout_totals(self) -> int:
        return self.device.address + ALIGNMENT_BYTES

    def compare(self, call: Call, handle: Numbered | None = None) -> None:
        """As compare_call, of a call whose notify kernel compares it, too. handle: that it is given"""
        self.compare_call(VERBS[call.verb], arguments_of, call, handle)
        if call.verb in (DISPATCH, ELASTIC_DISPATCH) and handle is None:
            self.num_dispatches = 1 + self.num_dispatches % (DIGESTS - 2)

    def compare_call(self, verb: str, arguments: Callable[..., Arguments], *of: Any) -> None:
        """Count a collective call, and compare what must be alike on all ranks, if they live in this process.

        arguments: what gives them for the values behind it
        It comes right before the first launch: a call that has failed until then may be made again.

        Raises: ValueError if this rank differs from one that was here before
        """
        if self._call_log is not None:
            if self.runtime.is_capturing:
                self._call_log.close()
            self._call_log.add(self.rank, verb, arguments(*of))
        self._num_calls, self._last_call = self._num_calls + 1, verb

    def add_reports(self, error: Exception) -> None:
        """Add to a time-out how many calls this rank has made, and on rank 0 who waits for whom on all ranks."""
        if self.has_verbs:
            error.add_note(self.calls)
        lines = self._roll_call.reports("\n".join([str(error), *getattr(error, "__notes__", ())]))
        if len(lines) > 1:
            error.add_note(explain("\n".join(lines).splitlines()))

    @property
    def calls(self) -> str:
        """How many collective calls this rank has made: a rank that has made fewer is the one that others wait for."""
        last = f", the last one {self._last_call}" if self._last_call else ""
        return f"rank {self.rank} has made {self._num_calls} collective call{'s' * (self._num_calls != 1)}{last}"

    @property
    def has_fault(self) -> bool:
        """Whether a kernel of this rank has reported something."""
        return self.report.is_there()

    def who_is_gone(self) -> Gone:
        """The ranks whose processes do nothing any more. If there are some, this process ends without MPI's own end."""
        gone = who_is_gone(self._processes)._replace(hosts=hosts_of(self.comm))
        if gone and is_mpi_comm(self.comm):
            end_without_mpi()
        return gone

    def _describe(self, offset: int) -> str:
        if self.direct is not None and offset >= self.direct.start:
            return self.direct.describe(offset)
        if self.elastic is not None and offset < self.num_nvl_bytes:
            return self.elastic.describe(offset)
        named = bisect.bisect(self._cells, offset, key=lambda cell: cell[0])
        if named and offset < self.num_nvl_bytes:
            start, name = self._cells[named - 1]
            return name if offset == start else f"{name} + {offset - start}"
        if self.internode is not None and offset < self.num_nvl_bytes:
            return describe_nvl_offset(self.ring_shape, self.num_nodes, self.num_nvl_peers, offset)
        return describe_offset(self.ring_shape, self.num_ranks, self.num_nvl_bytes, offset)
