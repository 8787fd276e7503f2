"""DeepEP's second interface: one dispatch and one combine, whose form each call chooses.

Life cycle: construct (compare arguments, allocate, exchange memory handles, open peers) -> use -> destroy.

Source: DeepEP deep_ep/buffers/elastic.py
"""

from __future__ import annotations

import math
from threading import Lock
from typing import Any, NoReturn

from nbep.device.layout.elastic import MAX_RANKS
from nbep.host import validate
from nbep.host.arguments import integer, refuse, switches
from nbep.host.config import Sizes
from nbep.host.elastic.memory import (
    BUFFER_ALIGNMENT,
    Areas,
    ElasticMemory,
    Group,
    SharedRows,
    divide,
    make_rows,
    size_hint,
    size_of,
)
from nbep.host.elastic.streams import barrier
from nbep.host.elastic.verbs import ElasticVerbs
from nbep.host.entry import in_turn, untraced
from nbep.host.events import EventHandle
from nbep.host.node import NodeMemory
from nbep.host.plans import Plans
from nbep.host.ranks.comm import Communicator, await_all
from nbep.host.ranks.timeouts import chosen_timeout_ms
from nbep.host.rdma_memory import rdma_trailer_bytes
from nbep.host.shared_memory import agreed
from nbep.host.target.base import Runtime
from nbep.host.target.process import connect
from nbep.host.transport import check_target, create_transport, mapped_transport
from nbep.host.transport.base import NetworkOptions, chosen_options

MIN_SMS = 4
MIN_SMS_ALONE = 64  # where no computation runs beside
MARGIN = 1.25  # of SMs
NVLINK_GBS = 405.0  # of an H100 or H200 in one direction, nine tenths of it
RDMA_GBS = 45.0  # of 400 Gbit/s, the same
EMULATED_SMS = 132  # as an H100 has
QPS_OF_HYBRID, QPS_OF_DIRECT = 129, 17  # that DeepEP allocates by default
QPS_OF_SM = 16
AREAS = "num_max_tokens_per_rank, hidden, num_topk and use_fp8_dispatch between nodes"  # what they are made of
USUAL_TOKENS, USUAL_HIDDEN = 4096, 7168  # for a buffer of which only the bytes are given


class ElasticBuffer(ElasticVerbs):
    """One rank's end of a group that exchanges tokens. Every rank of the group makes one, with the same arguments.

    Args:
        group: the communicator: the one that nbep.spawn passes, mpi4py's, or a process group of torch.distributed,
            whose ranks must have set their own current GPU. 1 to 32 ranks in nodes of at most 8; NBEP_NUM_NVL_PEERS
            and NBEP_TRANSPORT say how many are a node and what is between nodes, as arguments of Buffer do
        num_bytes: size of the symmetric buffer, a multiple of 2 MiB; None: what num_max_tokens_per_rank, hidden and
            num_topk need; see get_buffer_size_hint
        num_cpu_bytes: only 0: it is for Engram
        num_max_tokens_per_rank: the most tokens of a rank in a call, unless the call says another number
        hidden, num_topk: values of a token, choices of a token; 0 choices: room for 32
        use_fp8_dispatch: dispatch sends FP8 only, which needs less room
        deterministic: changes nothing: the order of rows never depends on timing
        allow_hybrid_mode: between nodes a dispatch sends a row once to each node that it goes to, and the ranks there
            share it; False: once to each rank. In combine a node adds up what its ranks have of a token, and sends one
            sum, if it may
        allow_multiple_reduction: a rank may add up the rows of an expanded token and send the sum, rounded to bf16, and
            in hybrid mode a node, too; False: they send all, and there is one rounding
        prefer_overlap_with_compute: fewer SMs, see get_theoretical_num_sms
        sl_idx, num_allocated_qps: change nothing: there is one queue pair for each peer of another node
        num_cpu_timeout_secs: longest time that the CPU waits for counts
        num_gpu_timeout_secs: longest time that a wait inside a kernel may take, unless the environment variable
            NBEP_TIMEOUT_MS says another. The emulator in one process counts primitive calls instead of nanoseconds
        explicitly_destroy: a RuntimeWarning if the buffer goes away without `destroy`

    Raises:
        ValueError: if an argument is wrong or differs between ranks, if the group has more than 32 ranks, or while
            the current stream captures a CUDA graph
        RuntimeError: if a rank has not enough memory, or cannot reach a peer; nothing stays allocated

    Blocks:
        until all ranks of the group construct theirs

    Source:
        DeepEP deep_ep/buffers/elastic.py, ElasticBuffer.__init__

    Attributes:
        group: what was given
        rank_idx, num_ranks: this rank, and how many there are
        num_bytes, num_max_tokens_per_rank, num_allocated_qps and the switches: as constructed
        num_scaleout_ranks, num_scaleup_ranks: as get_logical_domain_size; scaleout_rank_idx, scaleup_rank_idx: this
            rank's place in them
        num_rdma_ranks, num_nvlink_ranks: nodes, and ranks of each

    What calls return is the caller's: ordinary arrays, which no later call overwrites. Streams, events and threads: as
    Buffer says. After a PeerTimeout every call but destroy raises the same again.
    """

    # transport, num_nvl_peers and nic, as arguments of Buffer: DeepEP's signature has none. None: the environment's
    _network: tuple[Any, Any, Any] = (None, None, None)

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ):
        self._memory: NodeMemory | None = None
        self._turn = Lock()
        communicator, runtime = connect(group, None)

        def check() -> tuple[dict[str, Any], tuple[Areas, NetworkOptions, float]]:
            if runtime.is_capturing:
                raise ValueError(
                    "ElasticBuffer: got made while a CUDA graph is captured; must be made before: memory of peers "
                    "cannot be opened there"
                )
            switches(
                use_fp8_dispatch=use_fp8_dispatch,
                deterministic=deterministic,
                allow_hybrid_mode=allow_hybrid_mode,
                allow_multiple_reduction=allow_multiple_reduction,
                prefer_overlap_with_compute=prefer_overlap_with_compute,
                explicitly_destroy=explicitly_destroy,
            )
            if integer("num_cpu_bytes", num_cpu_bytes, 0) > 0:
                refuse("num_cpu_bytes", num_cpu_bytes, "0: Engram, which it is for, is not in nbep")
            if communicator.size > MAX_RANKS:
                refuse("group", f"{communicator.size} ranks", f"at most {MAX_RANKS} ranks; for more see Buffer")
            options = network_options(communicator.size, *self._network)
            check_target(runtime, options)
            most = integer("num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
            ranks = group_of(communicator.size, options, allow_hybrid_mode)
            switch = bool(use_fp8_dispatch), bool(allow_multiple_reduction)
            size = num_bytes
            if size is None:
                hint = size_hint(ranks, most, hidden, num_topk, *switch)
                size = hint.num_bytes
            else:
                if integer("num_bytes", size, 1) % BUFFER_ALIGNMENT != 0:
                    refuse("num_bytes", size, f"a multiple of {BUFFER_ALIGNMENT} (2 MiB), or None")
                hint = size_hint(ranks, most or USUAL_TOKENS, hidden or USUAL_HIDDEN, num_topk, *switch)
            areas = divide(size, hint)
            validate.symmetric_memory(runtime, "num_bytes", areas.total(ranks), 1, "ipc")
            alike = {
                "num_bytes": size,
                "allow_hybrid_mode": bool(allow_hybrid_mode),
                "allow_multiple_reduction": switch[1],
                AREAS: areas,
            }
            timeout_ms = chosen_timeout_ms("num_gpu_timeout_secs", num_gpu_timeout_secs)
            return alike | vars(options), (areas, options, timeout_ms)

        (areas, options, self.timeout_ms), name = agreed(communicator, runtime, check)
        rank = communicator.rank

        self.group = group
        self.rank_idx = rank
        self.num_ranks = communicator.size
        self.num_bytes = areas.num_bytes
        self.num_max_tokens_per_rank = int(num_max_tokens_per_rank)
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        default_qps = QPS_OF_HYBRID if allow_hybrid_mode else QPS_OF_DIRECT
        self.num_allocated_qps = integer("num_allocated_qps", num_allocated_qps, 0) or default_qps
        self.explicitly_destroy = explicitly_destroy
        self.num_cpu_timeout_secs = integer("num_cpu_timeout_secs", num_cpu_timeout_secs, 1)

        ranks = group_of(communicator.size, options, allow_hybrid_mode)
        memory = _make_memory(communicator, runtime, areas, options, ranks, self.timeout_ms)
        memory.name, memory.is_deep_eps = name, self._is_deep_eps
        self._memory = memory
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(rank, self.num_scaleup_ranks)
        assert memory.elastic is not None
        memory.elastic.num_scaleup_ranks = self.num_scaleup_ranks
        await_all(communicator)  # the cells of all ranks are 0 now

    @in_turn
    def destroy(self) -> None:
        """Give the memory back. Collective: blocks until all ranks of the group are here.

        Unlike DeepEP's it needs no explicitly_destroy. A buffer that goes away without it, and without
        explicitly_destroy, is given back when its ranks make their next one together: no destructor waits for anybody.

        Raises:
            as Buffer.destroy
        """
        self._give_back_rows("destroy")
        self._give_back()

    @in_turn
    def make_rows(self, num_rows: int, hidden: int) -> SharedRows:
        """Shared rows, which take the place of earlier ones: a dispatch or compact combine whose x lies there fetches.

        Collective. Each rank gives such an x then, or none does. It is inside a node alone. An expanded combine refuses
        such an x: each row of a token would cross to its rank, which gets one sum otherwise.

        Args:
            num_rows: that a rank may get at most; the same on all ranks, as hidden
            hidden: values of a row

        Returns:
            the rows; see SharedRows.like

        Raises:
            ValueError: between nodes, while a CUDA graph is captured, and for wrong arguments
            RuntimeError: if a rank has not enough memory

        Blocks:
            until all ranks of the group are here
        """
        memory = self._usable("make_rows")
        assert memory.elastic is not None
        if memory.runtime.is_capturing:
            refuse("make_rows", "called while a CUDA graph is captured", "called before: no memory is opened there")
        if memory.num_nodes > 1:
            refuse("make_rows", f"{memory.num_nodes} nodes", "called inside a node: no rank reads over a network")
        self._give_back_rows("make_rows")
        memory.elastic.rows = make_rows(self.group, num_rows, hidden, self.timeout_ms)
        return memory.elastic.rows

    def _give_back_rows(self, by: str) -> None:
        memory = self._memory
        if memory is not None and memory.elastic is not None and memory.elastic.rows is not None:
            memory.synchronize_calls()
            memory.elastic.rows.close(by)
            memory.elastic.rows = None
            memory.elastic_plans, memory.elastic_combine_plans = Plans(memory.runtime), Plans(memory.runtime)

    def __repr__(self) -> str:
        return f"<ElasticBuffer of rank {self.rank_idx} of {self.num_ranks}, {self.num_bytes} bytes>"

    # Sizes

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """num_bytes for calls of so many tokens of each rank, a multiple of 2 MiB.

        Dispatch needs room for the tokens of one rank, twice; combine for a row of each token from each rank that may
        send one. They share the memory. Between nodes they do not, and each rank of another node takes one row a token
        more, each inbox two: see docs/elastic.md. num_topk=0 stands for 32.
        """
        switches(
            use_fp8_dispatch=use_fp8_dispatch,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
        )
        sizes = num_max_tokens_per_rank, hidden, num_topk
        num_ranks = size_of(group)
        ranks = group_of(num_ranks, network_options(num_ranks), allow_hybrid_mode)
        return size_hint(ranks, *sizes, use_fp8_dispatch, allow_multiple_reduction).num_bytes

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of a node)"""
        memory = self._usable("get_physical_domain_size")
        return memory.num_nodes, memory.num_nvl_peers

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of a node) in hybrid mode between nodes, else (1, all ranks)"""
        return _logical(self.get_physical_domain_size(), self.allow_hybrid_mode)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """How many SMs keep the wire busy, if all experts are alike likely: even, at least 4 if there are so many.

        Args:
            num_scaleout_topk: only 0
            rdma_gbs: rate of the network in one direction, if nodes have one rank each; 0: that of 400 Gbit/s
            nvlink_gbs: rate of NVLink in one direction; 0: that of an H100
            sm_read_gbs, sm_write_gbs: of one SM

        Source:
            DeepEP deep_ep/buffers/elastic.py, ElasticBuffer.get_theoretical_num_sms
        """
        num_experts = validate.num_experts(self.num_ranks, num_experts)
        num_topk = integer("num_topk", num_topk, 1)
        if num_topk > num_experts:
            refuse("num_topk", num_topk, f"at most the {num_experts} experts")
        if num_scaleout_topk != 0:
            refuse("num_scaleout_topk", num_scaleout_topk, "0")
        memory = self._usable("get_theoretical_num_sms")
        num_nvl_ranks, device = memory.num_nvl_peers, getattr(memory.runtime, "device", None)
        device_sms = EMULATED_SMS if device is None else device.num_sms
        elsewhere = num_experts - num_experts // self.num_ranks
        # What is read, written and sent, counted in rows that arrive. A token's experts lie on 1 / reads ranks. SMs
        # write the rows for their node, and between nodes their own tokens once, from where they leave.
        reads = 1 / (self.num_ranks * (1 - math.comb(elsewhere, num_topk) / math.comb(num_experts, num_topk)))
        in_node = num_nvl_ranks / self.num_ranks
        writes = in_node + (reads if in_node < 1 else 0)
        # NVLink is the wire to keep busy, as in DeepEP, which counts nothing where nodes have one rank each: then it is
        # the network.
        on_wire, gbs = in_node * (1 - 1 / num_nvl_ranks), nvlink_gbs or NVLINK_GBS
        if num_nvl_ranks == 1:
            on_wire, gbs = 1 - in_node, rdma_gbs or RDMA_GBS
        num_sms: float = device_sms  # one rank alone: no wire to wait for
        if on_wire > 0:
            num_sms = gbs / on_wire * max(reads / sm_read_gbs, writes / sm_write_gbs)
        wanted = max(MIN_SMS, math.ceil(num_sms * MARGIN))
        wanted += wanted % 2
        return min(wanted if self.prefer_overlap_with_compute else max(wanted, MIN_SMS_ALONE), device_sms)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """DeepEP's number for a call with so many SMs. Here a call takes one for each peer of another node."""
        wanted = min(num_sms, 8 + 1)
        if self.allow_hybrid_mode:
            wanted = num_sms * QPS_OF_SM + 1
        return min(wanted, self.num_allocated_qps)

    # Streams and barriers

    @staticmethod
    @untraced
    def capture() -> EventHandle:
        """An event at the present end of the caller's current stream. There need be no buffer yet."""
        return EventHandle()

    @in_turn
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Let the current stream, and the comm stream, go on when all ranks have come here. Collective.

        Args:
            use_comm_stream: meet on the comm stream; False: on the current one
            with_cpu_sync: wait for the device before and after
            sequential: changes nothing
        """
        switches(use_comm_stream=use_comm_stream, with_cpu_sync=with_cpu_sync, sequential=sequential)
        barrier(self._usable("barrier"), use_comm_stream, with_cpu_sync)


def _make_memory(
    comm: Communicator, runtime: Runtime, areas: Areas, options: NetworkOptions, ranks: Group, timeout_ms: float
) -> NodeMemory:
    """One node: in memory that its ranks map. Several: in that which the network reaches."""
    checks = runtime.target == "emulator"
    num_bytes = areas.total(ranks)
    of_node = mapped_transport(runtime, comm.rank, options, "ipc")
    if ranks.num_outboxes == 0:
        memory = NodeMemory(comm, runtime, Sizes(num_bytes, check_calls=checks), timeout_ms, of_node)
        memory.elastic = ElasticMemory(memory.symmetric, areas, memory.peers)
        return memory
    trailer = rdma_trailer_bytes(comm.size, comm.size // ranks.num_nvl_ranks)
    network = create_transport(runtime, comm, options, num_bytes + trailer, "ipc")
    sizes = Sizes(0, num_rdma_bytes=num_bytes, check_calls=checks)
    memory = NodeMemory(
        comm,
        runtime,
        sizes,
        timeout_ms,
        of_node,
        rdma_transport=network,
        num_nvl_peers=ranks.num_nvl_ranks,
        zero_rdma=True,
    )
    assert memory.rdma is not None
    memory.elastic = ElasticMemory.between_nodes(memory.rdma, areas, ranks)
    return memory


def network_options(
    num_ranks: int, transport: Any = None, num_nvl_peers: Any = None, nic: Any = None
) -> NetworkOptions:
    """What is between nodes, and how large they are: as the environment says, where None is given."""
    return chosen_options(num_ranks, transport, num_nvl_peers, 1, True, nic)


def group_of(num_ranks: int, options: NetworkOptions, allow_hybrid_mode: bool) -> Group:
    """How many ranks of a node share what comes from another node: in hybrid mode all."""
    return Group(num_ranks, options.num_nvl_peers, options.num_nvl_peers if allow_hybrid_mode else 1)


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(nodes, ranks of a node) of a group, as its ElasticBuffer would have them."""
    num_ranks = size_of(group)
    num_nvl_ranks = network_options(num_ranks).num_nvl_peers
    return num_ranks // num_nvl_ranks, num_nvl_ranks


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """(nodes, ranks of a node) in hybrid mode between nodes, else (1, all ranks), as its ElasticBuffer has them."""
    return _logical(get_physical_domain_size(group), allow_hybrid_mode)


def _logical(physical: tuple[int, int], allow_hybrid_mode: bool) -> tuple[int, int]:
    num_nodes, num_nvl_ranks = physical
    return physical if allow_hybrid_mode else (1, num_nodes * num_nvl_ranks)


# What DeepEP's has besides, all marked experimental there, and no framework calls: the names, and what to use instead
REFUSED = {
    ("Engram (a remote key-value store)", "torch.distributed, or nbep.SharedMemory with kernels of your own"): (
        "get_engram_storage_size_hint engram_write engram_fetch"
    ),
    ("pipeline-parallel send and recv", "torch.distributed.batch_isend_irecv"): (
        "get_pp_buffer_size_hint pp_set_config pp_send pp_recv"
    ),
    ("all-gather and reduce-scatter (AGRS)", "torch.distributed.all_gather_into_tensor and reduce_scatter_tensor"): (
        "get_agrs_num_max_session_bytes get_agrs_buffer_size_hint create_agrs_session destroy_agrs_session "
        "agrs_new_session agrs_set_config agrs_get_inplace_tensor all_gather"
    ),
}


def _refuse(name: str, what: str, instead: str) -> Any:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"ElasticBuffer.{name}: {what} is not in nbep; use {instead}")

    refuse.__name__ = name
    return staticmethod(refuse)


for (what, instead), names in REFUSED.items():
    for name in names.split():
        setattr(ElasticBuffer, name, _refuse(name, what, instead))
