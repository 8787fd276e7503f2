"""Memory that the kernels of all ranks share, and nothing of what they say in it.

construct: allocate -> handles to all ranks -> open peers, fill the pointer tables; use; close. A rank that fails there
is known to all ranks, and all give back what they have made.

symmetric memory  num_bytes of the caller | barrier signals | pointer tables; see protocols.peers
report            FaultReport: kernels write, the CPU reads
claim             this rank's kernels only
"""

from __future__ import annotations

import bisect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, get_args

import numpy as np

from nbep.device.alignment import ALIGNMENT_BYTES
from nbep.device.jit import over
from nbep.device.protocols.peers import (
    BARRIER_SIGNAL_BYTES,
    BARRIER_SIGNAL_PTRS,
    BUFFER_PTRS,
    MAX_NVL_PEERS,
    PEERS_BYTES,
    Bounds,
    HostPeers,
    Peers,
    describe_peers,
)
from nbep.device.protocols.waits import FaultReport
from nbep.host.arguments import integer, refuse
from nbep.host.faults import destroy_error
from nbep.host.ranks.await_ranks import end_without_mpi
from nbep.host.ranks.comm import DESTROY, Communicator, await_all, gather_results, is_mpi_comm
from nbep.host.ranks.hosts import hosts_of
from nbep.host.ranks.roll_call import RollCall
from nbep.host.ranks.timeouts import Gone, Process, Undo, join_ranks, who_is_gone
from nbep.host.ranks.timeouts import timeout_ms as checked_timeout_ms
from nbep.host.ranks.who_waits import explain
from nbep.host.reports import REPORT_WORDS, KernelReport
from nbep.host.target.base import Kernel, Runtime
from nbep.host.target.memory import HandleType, Memory, SymmetricMemory, WantedMemory
from nbep.host.target.process import connect
from nbep.host.transport import check_target, create_transport
from nbep.host.transport.base import NetworkOptions, NicOptions, Transport, TransportName

AnyMemory = TypeVar("AnyMemory", bound=Memory)
Own = TypeVar("Own")


class Opened(NamedTuple):
    """What a rank tells the others of its memory. more: of what a derived class adds"""

    handle: Any
    more: Any
    process: Process


def symmetric_bytes(
    runtime: Runtime, name: str, num_bytes: Any, fewest: int, handle_type: object, trailer_bytes: int = PEERS_BYTES
) -> int:
    """The bytes of a rank as an int, behind which come trailer_bytes.

    Raises:
        ValueError: if they cannot be allocated so
    """
    num_bytes = integer(name, num_bytes, fewest)
    if num_bytes % ALIGNMENT_BYTES != 0:
        refuse(name, num_bytes, f"a multiple of {ALIGNMENT_BYTES}")
    if runtime.max_symmetric_bytes is not None and num_bytes + trailer_bytes > runtime.max_symmetric_bytes:
        most = (runtime.max_symmetric_bytes - trailer_bytes) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        refuse(name, num_bytes, f"at most {most} on the {runtime.target}")
    if not isinstance(handle_type, str) or handle_type not in get_args(HandleType):
        refuse("handle_type", repr(handle_type), f"one of {', '.join(get_args(HandleType))}")
    return num_bytes


class SharedMemory:
    """Memory of the same size on each rank, which the kernels of all ranks reach. `create` makes it.

    runtime               launch, and what else a target gives; see Runtime
    comm_stream           the stream to launch on
    symmetric             the memory: its address here, array(dtype, offset, count), write(offset, values)
    peers, bounds         arguments for kernels: see protocols.peers; their type depends on handle_type
    network               another one, for the functions of nbep.device.network; its type depends on the transport
    wait(), close()
    check_faults          raise what a kernel has reported, if one has

    Raises:
        RuntimeError: on every rank if one cannot allocate, or cannot reach a peer; it names the rank
    """

    trailer_bytes = PEERS_BYTES
    hides_trailer = True  # from kernels of the emulator that use `network`
    polled_bytes = 0  # behind the report, in memory that the CPU reads while kernels run
    own_bytes = 0  # behind the claim, in memory of this rank's kernels
    own_name = "claim"

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
    ) -> SharedMemory:
        """Symmetric memory for kernels of one's own. It is all zeros on all ranks when this returns. Collective.

        Args:
            comm: what nbep.spawn passes, a communicator of mpi4py, or a process group of torch.distributed;
                at most 8 ranks, those of a node on one host
            num_bytes: of each rank, a multiple of 128; the same on all ranks
            timeout_ms: longest time that one wait of a kernel may take, above 0; see Bounds
            handle_type: as Buffer's
            cells: name -> byte offset where it begins: what reports and traces call the memory from there up
                to the next name; at an offset within it, `name + bytes`
            transport: what is behind `network`: "direct", and all peers are mapped, or "ibgda"
            num_nvl_peers: with "ibgda": ranks of a node, whose memory is mapped; 1 to 8
            num_qps, nic: with "ibgda": queue pairs for each peer of another node; see Buffer, NicOptions

        Raises:
            ValueError: on every rank if an argument is wrong on one
            RuntimeError: as the constructor

        Blocks:
            until all ranks of comm are here
        """
        communicator, runtime = connect(None, comm, cls.__name__)

        def check() -> tuple[dict[str, Any], tuple[int, NetworkOptions, float, list[tuple[int, str]]]]:
            if communicator.size > MAX_NVL_PEERS:
                refuse("comm", f"{communicator.size} ranks", f"at most {MAX_NVL_PEERS} ranks")
            if cells is not None and not isinstance(cells, Mapping):
                refuse("cells", type(cells).__name__, "a mapping from names to offsets, or None")
            offsets = sorted((integer(f"cells[{name!r}]", at, 0), str(name)) for name, at in (cells or {}).items())
            size = symmetric_bytes(runtime, "num_bytes", num_bytes, 1, handle_type)
            node_size = min(integer("num_nvl_peers", num_nvl_peers, 1), communicator.size)
            qps = integer("num_qps", num_qps, 1)
            options = NetworkOptions.check(transport, node_size, qps, True, nic or NicOptions(), communicator.size)
            check_target(runtime, options)
            if handle_type == "host" and options.transport != "direct":  # it has no atomics between GPUs
                refuse("transport", options.transport, 'direct with handle_type="host"')
            longest_ms = checked_timeout_ms("timeout_ms", timeout_ms)
            alike = {"num_bytes": size, "handle_type": handle_type, "transport and its options": options}
            return alike, (size, options, longest_ms, offsets)

        (size, options, longest_ms, offsets), name = agreed(communicator, runtime, check)
        end = create_transport(runtime, communicator, options, size + PEERS_BYTES, handle_type)
        memory = SharedMemory(communicator, runtime, size, longest_ms, end, handle_type=handle_type, zero=True)
        memory._cells, memory.name = offsets, name
        await_all(communicator)
        return memory

    def __init__(
        self,
        comm: Communicator,
        runtime: Runtime,
        num_bytes: int,
        timeout_ms: float,
        transport: Transport,
        *,
        handle_type: HandleType = "ipc",
        zero: bool = False,
        num_nvl_peers: int = 0,
        others: Sequence[Transport] = (),
        lets_ranks_go: bool = False,
    ):
        """others: transports that end with this one; lets_ranks_go: a rank may be masked, see RollCall"""
        self.runtime = runtime
        self.comm = comm
        self.rank = int(comm.rank)
        self.num_ranks = int(comm.size)
        self.num_nvl_peers = num_nvl_peers or self.num_ranks  # ranks of a node
        self.num_bytes = num_bytes
        self.handle_type: HandleType = handle_type
        self.timeout_ms = timeout_ms
        self.transport = transport
        self.name: tuple[int, ...] = ()  # see Runtime.dropped
        self._cells: list[tuple[int, str]] = []
        self._is_open = True
        self._kept: list[SymmetricMemory] | None = None  # what is shown when all else is given back
        with Undo() as undo:
            for end in (transport, *others):
                undo.callback(end.end)
            self._roll_call = RollCall(comm, lets_ranks_go)
            undo.callback(self._roll_call.close)
            opened = gather_results(comm, lambda: self._allocate(zero, undo))
            self._processes = [each.process for each in opened]
            # CUDA: memory must not be freed while another process has it open.
            undo.callback(lambda: await_all(comm, DESTROY))
            undo.callback(self._close_peers)
            gather_results(comm, lambda: self._open_peers(opened))
            self._undo = undo.pop_all()

    def _allocate(self, zero: bool, undo: Undo) -> Opened:
        """Make everything that is this rank's; what peers need to open the symmetric memories."""

        def owned(memory: AnyMemory) -> AnyMemory:
            undo.callback(memory.free)
            return memory

        runtime = self.runtime
        self.comm_stream = runtime.create_stream("comm")
        undo.callback(self.comm_stream.close)
        self._signal_table: Memory | None = None  # in the symmetric memory, unless that is the host's
        if self.handle_type == "host":
            self._signal_table = owned(runtime.allocate(8 * self.num_ranks, "table of barrier signals"))
        num_bytes = self.num_bytes + self.trailer_bytes
        wanted = WantedMemory(num_bytes, "nvl_buffer", self._describe, self.handle_type, zero)
        self.symmetric = self.transport.allocate(self.comm, wanted)
        undo.callback(self._free, self.symmetric)
        self.symmetric.write(self.num_bytes, np.zeros(BARRIER_SIGNAL_BYTES // 4, np.int32))
        self.device = owned(runtime.allocate(ALIGNMENT_BYTES + self.own_bytes, self.own_name, self._describe_own))
        assert 4 * REPORT_WORDS <= ALIGNMENT_BYTES
        self.host_visible = owned(
            runtime.allocate_host_visible(ALIGNMENT_BYTES + self.polled_bytes, "fault report and counters")
        )
        self.report = KernelReport(self, self.host_visible.words(0, REPORT_WORDS))
        self.check_faults = self.report.check
        return Opened(self.transport.handle, self._allocate_more(undo), Process.own())

    def _allocate_more(self, undo: Undo) -> Any:
        """What a derived class adds; what its peers need of that."""

    def _open_peers(self, opened: list[Opened]) -> None:
        """Open the peers' memory and write their addresses where kernels find them."""
        buffer_ptrs, signal_ptrs = self.num_bytes + BUFFER_PTRS, self.num_bytes + BARRIER_SIGNAL_PTRS
        self.network = self.transport.open([each.handle for each in opened], buffer_ptrs, self.bounds)
        bases = self.symmetric.read(buffer_ptrs, self.num_ranks, np.int64)
        self.symmetric.write(signal_ptrs, np.where(bases != 0, bases + self.num_bytes, 0))
        if self.hides_trailer:
            buffers = np.array(self.symmetric.cut(bases.tolist(), self.num_bytes), np.int64)
            self.network = self.transport.show(self.network, buffer_ptrs, buffers)
        first = self.first_in_node
        here = self.rank - first, self.num_nvl_peers
        if self._signal_table is None:
            tables = self.symmetric.address + 8 * first
            self.peers = Peers(tables + buffer_ptrs, tables + signal_ptrs, *here)
        else:
            self._signal_table.write(0, self.symmetric.read(signal_ptrs, self.num_ranks, np.int64))
            self.peers = HostPeers(self.network.buffer_ptrs + 8 * first, self._signal_table.address + 8 * first, *here)

    def _close_peers(self) -> None:
        self.transport.close()

    def wait(self) -> None:
        """Block until all work of the comm stream is done.

        Raises:
            PeerTimeout: if a wait of this rank's kernels has timed out
        """
        end = self.comm_stream.record()
        self.runtime.wait_until(lambda: end.done, lambda: "the end of its comm stream")
        self.check_faults()

    def close(self) -> None:
        """Wait for the peers, then for the work of all, then give everything back. Collective.

        Ranks that are masked are not waited for. They may be dead, or use the memory still: nothing is given back then,
        and a RuntimeWarning says so.

        Raises:
            on every rank if the work of one failed; it names the rank, and what can be given back is
            PeerTimeout: if a peer does not come, twice as late as any kernel's wait for it; nothing is given back
                what a kernel of this rank has reported and no call has raised yet; all is given back
        """
        with self.report.raised_at_last():
            self._close()

    def _close(self) -> None:
        masked: list[int] = []
        with suppress(Exception):  # all ranks learn of it below
            masked = self._masked_ranks()
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
            others = [other for other in masked if other != self.rank]
            whom = "other ranks have masked this one"
            if others:
                whom = f"destroy does not wait for {join_ranks(others)}, masked"
            text = (
                f"rank {self.rank}: {whom}. Nothing is given back: the buffer's memory stays allocated until the "
                f"process ends, because a masked rank may still use it"
            )
            warnings.warn(text, RuntimeWarning, stacklevel=4)
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
            self.runtime.dropped[self.name] = KeptMemory(self._kept or ())

    def _masked_ranks(self) -> list[int]:
        """Ranks that this one does not wait for any more."""
        return []

    def _synchronize(self) -> bool:
        """Wait for the work of this rank. Returns `is_shown`."""
        self.comm_stream.synchronize()
        return self.is_shown

    @property
    def is_shown(self) -> bool:
        """As SymmetricMemory.is_shown."""
        return self.symmetric.is_shown

    def _free(self, memory: SymmetricMemory) -> None:
        """Give symmetric memory back, or keep it if it is shown on any rank."""
        if self._kept is None:
            memory.free()
        else:
            memory.is_kept = True
            self._kept.append(memory)

    def _leave(self) -> None:
        """Refuse all further use."""
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
        """A kernel that meets the peers, for where these have their memory."""
        kind: Any = type(self.peers)
        return over(kernel, kind, "peers")

    @property
    def first_in_node(self) -> int:
        return self.rank // self.num_nvl_peers * self.num_nvl_peers

    # What its report asks

    @property
    def network_of_waits(self) -> Transport:
        """The transport behind what its kernels' waits are for."""
        return self.transport

    def cause_of(self, report: FaultReport) -> Exception | None:
        """What a report of its own kernels means, if that is no time-out."""
        return None

    def known_cause(self, report: FaultReport) -> Exception | None:
        """Why a wait timed out, if the memory says more than the report."""
        return None

    def add_reports(self, error: Exception) -> None:
        """Add to a time-out who waits for whom on all ranks, on rank 0."""
        lines = self._roll_call.reports("\n".join([str(error), *getattr(error, "__notes__", ())]))
        if len(lines) > 1:
            error.add_note(explain("\n".join(lines).splitlines()))

    def who_is_gone(self) -> Gone:
        """The ranks whose processes do nothing any more. If there are some, this process ends without MPI's own end."""
        gone = who_is_gone(self._processes)._replace(hosts=hosts_of(self.comm))
        if gone and is_mpi_comm(self.comm):
            end_without_mpi()
        return gone

    # Names of cells, for reports

    def _describe(self, offset: int) -> str:
        if offset >= self.num_bytes:
            return describe_peers(offset - self.num_bytes)
        named = bisect.bisect(self._cells, offset, key=lambda cell: cell[0])
        if not named:
            return f"buffer + {offset}"
        start, name = self._cells[named - 1]
        return name if offset == start else f"{name} + {offset - start}"

    def _describe_own(self, offset: int) -> str:
        return "claim"


# --- What all ranks of new memory agree in, and what they give back together before they make it ---------------------
#
#  rank 0   drops buffer (4, 7)      makes a Buffer: "I hold (4, 7)" --+--> all ranks of (4, 7) hold it: they close it
#  rank 1   drops it later           makes a Buffer: "I hold (4, 7)" --+
#
# Runtime.dropped has the memory of Buffers that went away without `destroy`, and of those that were destroyed while
# somebody held an array of their memory. To give it back is collective, and Python drops an object when it likes: in
# one rank's garbage collector, while an exception travels in another. A destructor that waits for the other ranks, as
# DeepEP's does, then hangs. So what was dropped waits for the next Buffer that the same ranks make together, and for no
# rank in particular. A rank that still has an array of it does not name it.


class KeptMemory:
    """Memory of a destroyed Buffer that an array shows, on one rank at least."""

    def __init__(self, memories: Sequence[SymmetricMemory]):
        self._memories = memories

    @property
    def is_shown(self) -> bool:
        return any(memory.is_shown for memory in self._memories)

    def close(self) -> None:
        for memory in self._memories:
            memory.free()


def agreed(
    comm: Communicator, runtime: Runtime, check: Callable[[], tuple[Mapping[str, Any], Own]]
) -> tuple[Own, tuple[int, ...]]:
    """What check returns last; and the name of what is made: the number that each rank gives it. Collective.

    check: the arguments of this rank that must be the same on all, by name, and anything else

    Raises: on every rank if check raises something on one, ValueError if the ranks differ
    """

    def look() -> tuple[Mapping[str, Any], Own, int, list[tuple[int, ...]]]:
        idle = [name for name, memory in runtime.dropped.items() if not memory.is_shown]
        return *check(), next(runtime.buffer_numbers), idle

    every_alike, every_own, numbers, every_idle = zip(*gather_results(comm, look), strict=True)
    for name in every_alike[0]:
        values = [alike[name] for alike in every_alike]
        if any(value != values[0] for value in values):
            refuse(name, f"{values} on ranks 0 to {len(values) - 1}", "the same on all ranks")
    for name in sorted(set.intersection(*map(set, every_idle))):
        if len(name) != len(numbers):
            continue  # made by other ranks too, who are not here
        try:
            runtime.dropped.pop(name).close()
        except Exception as error:
            text = f"the end of a Buffer that was dropped without destroy() has failed: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
    return every_own[comm.rank], numbers
