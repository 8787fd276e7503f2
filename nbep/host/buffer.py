"""The expert-parallel communication buffer, with DeepEP's interface.

Life cycle: construct (compare arguments, allocate, exchange memory handles, open peers) -> use -> destroy.

Source: DeepEP deep_ep/buffer.py
"""

from __future__ import annotations

import math
import os
from threading import Lock
from typing import Any

from nbep.device.layout.intranode import MAX_TOPK
from nbep.host import validate
from nbep.host.arguments import flags, integer, refuse
from nbep.host.config import COMBINE_TABLE, DISPATCH_TABLE, Config, Sizes, table_config
from nbep.host.entry import in_turn, untraced
from nbep.host.events import EventHandle, EventOverlap
from nbep.host.intranode.direct import size_hint
from nbep.host.low_latency.verbs import LowLatencyVerbs
from nbep.host.node import NodeMemory
from nbep.host.normal_verbs import NormalVerbs
from nbep.host.ranks.hosts import hosts_of
from nbep.host.ranks.timeouts import chosen_timeout_ms
from nbep.host.rdma_memory import rdma_trailer_bytes
from nbep.host.shared_memory import agreed
from nbep.host.target.base import Array
from nbep.host.target.memory import HandleType
from nbep.host.target.process import connect
from nbep.host.transport import check_target, create_transport, mapped_transport
from nbep.host.transport.base import NetworkOptions, NicOptions, TransportName, chosen_options

ARGUMENTS = {"num_qps": "num_qps_per_rank", "use_nvlink": "allow_nvlink_for_low_latency_mode"}  # of NetworkOptions


class Buffer(NormalVerbs, LowLatencyVerbs):
    """One rank's end of a group that exchanges tokens. Every rank of the group makes one, with the same sizes.

    Two groups of verbs: get_dispatch_layout, dispatch and combine, and those that begin with low_latency. On which
    stream they run, and what few need to know of the options, is in docs/api.md.

    Args:
        group: the communicator: the one that nbep.spawn passes, mpi4py's, or a process group of torch.distributed,
            whose ranks must have set their own current GPU
        num_nvl_bytes: size of the symmetric buffer, a multiple of 128; see Config.get_nvl_buffer_size_hint
        num_rdma_bytes: size of the buffer that the network reaches, a multiple of 128: for the low-latency mode see
            get_low_latency_rdma_size_hint, for the others between nodes Config.get_rdma_buffer_size_hint
        low_latency_mode: the low-latency verbs can be used, beside the others if num_nvl_bytes is not 0
        num_qps_per_rank: queue pairs for each peer of another node, with transport "ibgda"
        allow_nvlink_for_low_latency_mode: False sends everything through the network, also inside a node
        allow_mnnvl: a permission to use NVLink between hosts; refused with ranks on several hosts
        explicitly_destroy: a RuntimeWarning if the buffer goes away without `destroy`
        enable_shrink: a low-latency call that waits too long for a rank goes on without it
        comm: another name for group
        handle_type: how a GPU's memory gets to other processes: "ipc", "posix_fd", "fabric" or "host"
        transport: what is behind the network: "direct", "ibgda" or "nvshmem"; None: NBEP_TRANSPORT, or "direct"
        num_nvl_peers: ranks of a node, which are consecutive: 1 to 8; None: NBEP_NUM_NVL_PEERS, or all
        nic: how the software NIC is made; None: NBEP_NIC, or NicOptions()
        num_zero_copy_bytes: more symmetric memory, for zero_copy inside a node; see get_zero_copy_size_hint
        check_calls: low-latency calls tell each other what they were called with; None: NBEP_CHECK_CALLS, or True on
            the emulator and False on GPUs
        low_latency_num_sms: most SMs that a low-latency call takes; 0: all of the card

    Raises:
        ValueError: for a wrong argument, one that differs between ranks, or a group of a size that nbep has not
        RuntimeError: if a rank has not enough memory, its driver does not offer handle_type, or it cannot reach a
            peer; nothing stays allocated
        PeerTimeout: under MPI if a rank has not come after twice NBEP_TIMEOUT_MS

    Blocks:
        until all ranks of the group construct theirs

    Source:
        DeepEP deep_ep/buffer.py, Buffer.__init__; csrc/utils/shared_memory.hpp

    Attributes:
        num_sms: SMs of the default configs, of all buffers; see set_num_sms
        group: what was given as group or as comm
        rank: this rank's number in the group
        group_size: ranks of the group
        num_nvl_bytes: size of the symmetric buffer
        timeout_ms: longest time that a wait inside a kernel may take; NBEP_TIMEOUT_MS, or 100 s

    After a PeerTimeout, or a num_worst_tokens that was too small, every call but destroy raises the same again.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        handle_type: HandleType = "ipc",
        transport: TransportName | None = None,
        num_nvl_peers: int | None = None,
        nic: NicOptions | None = None,
        num_zero_copy_bytes: int = 0,
        check_calls: bool | None = None,
        low_latency_num_sms: int = 0,
    ):
        self._memory: NodeMemory | None = None
        self._turn = Lock()
        communicator, runtime = connect(group, comm)

        def check() -> tuple[dict[str, Any], tuple[Sizes, NetworkOptions, float]]:
            flags(
                low_latency_mode=low_latency_mode,
                allow_nvlink_for_low_latency_mode=allow_nvlink_for_low_latency_mode,
                allow_mnnvl=allow_mnnvl,
                explicitly_destroy=explicitly_destroy,
                enable_shrink=enable_shrink,
            )
            if allow_mnnvl and (hosts := hosts_of(communicator)):
                got = f"True with ranks on several hosts ({', '.join(dict.fromkeys(hosts))})"
                allowed = "False there: nbep maps memory over NVLink inside a host only, and NICs connect hosts"
                refuse("allow_mnnvl", got, allowed)
            compares = _check_calls(runtime.target, check_calls)
            modes = bool(low_latency_mode), bool(enable_shrink), compares, low_latency_num_sms
            given = Sizes(num_nvl_bytes, handle_type, num_rdma_bytes, num_zero_copy_bytes, *modes)
            sizes = validate.sizes(runtime, given)
            options = chosen_options(
                communicator.size,
                transport,
                num_nvl_peers,
                num_qps_per_rank,
                allow_nvlink_for_low_latency_mode,
                nic,
            )
            check_target(runtime, options)
            validate.nodes(communicator, runtime, sizes, options.num_nvl_peers)
            validate.host_memory(sizes, options.transport, communicator.size // options.num_nvl_peers)
            alike = {**sizes._asdict(), **{ARGUMENTS.get(name, name): value for name, value in vars(options).items()}}
            return alike, (sizes, options, chosen_timeout_ms())

        (sizes, options, timeout_ms), name = agreed(communicator, runtime, check)
        rank = communicator.rank

        self.group = comm if group is None else group
        self.rank = rank
        self.group_size = communicator.size
        self.num_nvl_bytes = sizes.num_nvl_bytes
        self.timeout_ms = timeout_ms
        self.num_rdma_bytes = sizes.num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy

        rdma_transport = None
        if sizes.num_rdma_bytes > 0:
            num_nodes = communicator.size // options.num_nvl_peers
            num_bytes = sizes.num_rdma_bytes + rdma_trailer_bytes(communicator.size, num_nodes)
            rdma_transport = create_transport(runtime, communicator, options, num_bytes, handle_type)
        self._memory = NodeMemory(
            communicator,
            runtime,
            sizes,
            timeout_ms,
            mapped_transport(runtime, rank, options, handle_type),
            rdma_transport=rdma_transport,
            num_nvl_peers=options.num_nvl_peers,
        )
        self._memory.name, self._memory.is_deep_eps = name, self._is_deep_eps

    @in_turn
    def destroy(self) -> None:
        """Give the memory back. Collective: blocks until all ranks of the group are here.

        Unlike DeepEP's it needs no explicitly_destroy. A buffer that goes away without it, and without
        explicitly_destroy, is given back when its ranks make their next Buffer together. So is memory that an array
        of this buffer shows on any rank (of zero_copy, of get_local_buffer_tensor): the array stays as it is.

        Raises:
            ValueError: if it is destroyed already
            RuntimeError: on every rank if the work of one failed, and it names the rank; under MPI PeerTimeout if a
                peer has not come after twice timeout_ms, and the memory stays allocated until the process ends
        Warns:  RuntimeWarning if ranks are masked: they are not waited for, and the memory stays allocated too
        """
        self._give_back()

    def __repr__(self) -> str:
        return f"<Buffer of rank {self.rank} of {self.group_size}, {self.num_nvl_bytes} bytes>"

    # Settings

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set the SMs of the default configs, an even number."""
        new_num_sms = integer("new_num_sms", new_num_sms, 2)
        if new_num_sms % 2 != 0:
            validate.refuse("new_num_sms", new_num_sms, "even")
        cls.num_sms = new_num_sms

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """The recommended dispatch config: measured for 2, 4 and 8 ranks, DeepEP's for 16 to 160 in nodes of 8.

        Other nodes have no entry. A call without config takes that of the next larger number of nodes, and fewer ring
        slots if the buffer is too small.

        Raises:
            ValueError: if there is none for num_ranks
        """
        return table_config(DISPATCH_TABLE, cls.num_sms, num_ranks)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """The recommended combine config; as get_dispatch_config."""
        return table_config(COMBINE_TABLE, cls.num_sms, num_ranks)

    @staticmethod
    def get_zero_copy_size_hint(
        num_max_tokens_per_rank: int, hidden: int, num_ranks: int, num_topk: int = MAX_TOPK
    ) -> int:
        """num_zero_copy_bytes that serve any dispatch and combine with zero_copy, of so many tokens of each rank.

        Room for all tokens of all ranks twice, for two dispatches, and once for combine. Fewer bytes serve as well if
        fewer tokens come; a call for which they are too few says so.
        """
        return size_hint(num_max_tokens_per_rank, hidden, num_ranks, num_topk)

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: every kernel's one source has the paths of sm_90, and each device compiles those that it can run."""
        return True

    # Streams and memory

    @staticmethod
    @untraced
    def capture() -> EventOverlap:
        """An event at the present end of the caller's current stream. There need be no Buffer yet."""
        return EventOverlap(EventHandle())

    @in_turn
    def get_local_buffer_tensor(
        self, dtype: Any, size: tuple[int, ...] | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Array:
        """This rank's symmetric buffer as an array.

        Args:
            use_rdma_buffer: take the low-latency mode's buffer in place of that of the rings
            size: its shape, a tuple or torch.Size; None for all that follows
            offset: its first element (DeepEP's document says elements too, but its code takes bytes)

        Raises:
            ValueError: if size is no shape, or if it reaches past the buffer
        """
        memory = self._usable("get_local_buffer_tensor")
        symmetric, num_bytes = memory.symmetric, memory.num_nvl_bytes
        flags(use_rdma_buffer=use_rdma_buffer)
        if use_rdma_buffer:
            if memory.rdma is None:
                refuse("use_rdma_buffer", True, "False: num_rdma_bytes was 0 at construction")
            symmetric, num_bytes = memory.rdma.symmetric, memory.rdma.num_rdma_bytes
        offset = integer("offset", offset, 0)
        dtype = validate.dtype(memory.runtime, "dtype", dtype)
        itemsize = symmetric.array(dtype, 0, 0).dtype.itemsize
        num_elements = num_bytes // itemsize
        if offset > num_elements:
            refuse("offset", offset, f"at most {num_elements}, the elements of the buffer")
        shape = (num_elements - offset,) if size is None else validate.shape("size", size)
        count = math.prod(shape)
        if count > num_elements - offset:
            refuse("size", f"{shape} at offset {offset}", f"at most {num_elements - offset} elements")
        return symmetric.array(dtype, offset * itemsize, count).reshape(shape)


def _check_calls(target: str, given: bool | None) -> bool:
    """Whether low-latency kernels compare calls: as the argument says, or else the environment, or else the target."""
    if given is not None:
        flags(check_calls=given)
        return bool(given)
    text = os.environ.get("NBEP_CHECK_CALLS", "1" if target == "emulator" else "0")
    if text not in ("0", "1"):
        validate.refuse("NBEP_CHECK_CALLS", repr(text), "0 or 1")
    return text == "1"
