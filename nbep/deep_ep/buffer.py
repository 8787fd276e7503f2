"""`nbep.Buffer` as programs know DeepEP's.

 what a program does             nbep.Buffer                                this Buffer
 Buffer(..., False, comm)        the ninth argument is enable_shrink        a communicator there is taken as comm
 buffer.get_comm_stream()        nbep's stream                              torch.cuda.Stream, where torch is in use
 blocking call -> event          is done: event.current_stream_wait() goes  event.event is None
 topk_idx                        int64                                      int32, too
 handle                          has arrays for attributes                  is a tuple, too
 a config whose rings are        refused                                    gets the slots that there is room for
 larger than DeepEP's
 Buffer(..., use_fabric)         handle_type                                the same, see __init__
 buffer.runtime                  none                                       answers what DeepEP's tells of itself

Source: DeepEP deep_ep/buffer.py
"""

from __future__ import annotations

from typing import Any

from nbep.deep_ep.calls import refuse_forks, taken_as_deep_ep, torch_stream
from nbep.host.buffer import Buffer as NbepBuffer
from nbep.host.config import Config
from nbep.host.events import EventHandle, EventOverlap
from nbep.host.node import NodeMemory

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]


class Buffer(NbepBuffer):
    """See nbep.Buffer. Memory of a buffer that is dropped is given back when its ranks make their next one.

    Attributes: runtime: see Runtime; None after destroy
    """

    runtime: Runtime | None = None
    _is_deep_eps = True

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
        enable_shrink: Any = False,
        comm: Any = None,
        *last: Any,
        use_fabric: bool = False,
        **options: Any,
    ) -> None:
        """As nbep.Buffer, which also says what options there are.

        Args:
            enable_shrink: in DeepEP v1.2.1 comm has this place. What has a size is one
            use_fabric: handle_type "fabric". From 2025-11 to 2026-04 it stood before explicitly_destroy, which is
                clear from a tenth argument that is no communicator, or from an eleventh
        """
        refuse_forks(options)
        if last or isinstance(comm, bool):
            use_fabric, explicitly_destroy, enable_shrink = explicitly_destroy, enable_shrink, comm
            (comm,) = last or (None,)
        if use_fabric:
            options["handle_type"] = "fabric"
        if comm is None and (enable_shrink is None or hasattr(enable_shrink, "Get_size")):
            enable_shrink, comm = False, enable_shrink
        super().__init__(
            group,
            num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode,
            num_qps_per_rank,
            allow_nvlink_for_low_latency_mode,
            allow_mnnvl,
            explicitly_destroy,
            enable_shrink,
            comm,
            **options,
        )
        self.runtime = Runtime(self._usable("runtime"))

    def destroy(self) -> None:
        super().destroy()
        self.runtime = None

    def get_comm_stream(self) -> Any:
        """The stream that this buffer's kernels run on; for torch one of its own class, which record_stream takes."""
        return torch_stream(super().get_comm_stream())

    get_dispatch_layout = taken_as_deep_ep(NbepBuffer.get_dispatch_layout)
    dispatch = taken_as_deep_ep(NbepBuffer.dispatch)
    combine = taken_as_deep_ep(NbepBuffer.combine)
    low_latency_dispatch = taken_as_deep_ep(NbepBuffer.low_latency_dispatch)
    low_latency_combine = taken_as_deep_ep(NbepBuffer.low_latency_combine)
    internode_dispatch, internode_combine = dispatch, combine


class Runtime:
    """What DeepEP's deep_ep_cpp.Buffer tells of itself."""

    def __init__(self, memory: NodeMemory):
        self._memory = memory

    def is_available(self) -> bool:
        return True

    def is_internode_available(self) -> bool:
        return self._memory.num_nodes > 1

    def get_num_rdma_ranks(self) -> int:
        return self._memory.num_nodes

    def get_rdma_rank(self) -> int:
        return self._memory.rank // self._memory.num_nvl_peers

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """The first node, or with is_global its rank that has the place of this one."""
        return self._memory.rank % self._memory.num_nvl_peers if is_global else 0

    def get_local_device_id(self) -> int:
        """The GPU's number in this process; -1 on the emulator."""
        device = getattr(self._memory.runtime, "device", None)
        return -1 if device is None else device.ordinal
