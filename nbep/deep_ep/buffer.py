"""`nbep.Buffer` as programs know DeepEP's.

 what a program does             nbep.Buffer                                this Buffer
 Buffer(..., False, comm)        the ninth argument is enable_shrink        a communicator there is taken as comm
 buffer.get_comm_stream()        nbep's stream                              torch.cuda.Stream, where torch is in use
 blocking call -> event          is done: event.current_stream_wait() goes  event.event is None
 a config whose rings are        refused                                    gets the slots that there is room for
 larger than DeepEP's
 handle                          has arrays for attributes                  is a tuple, too
 Buffer(..., use_fabric)         handle_type                                the same, see __init__
 buffer.runtime                  none                                       answers what DeepEP's tells of itself

Source: DeepEP deep_ep/buffer.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbep.deep_ep.calls import Handle, is_int32, made_of, refuse_forks, taken_as_deep_ep, widened
from nbep.deep_ep.streams import torch_stream
from nbep.device.layout.intranode import RingShape, num_nvl_bytes_needed
from nbep.host.buffer import Buffer as NbepBuffer
from nbep.host.config import Config, fit_config
from nbep.host.events import EventOverlap
from nbep.host.node import Node
from nbep.host.tokens import BF16_BYTES


class Buffer(NbepBuffer):
    """See nbep.Buffer. Memory of a buffer that is dropped is given back when its ranks make their next one.

    Attributes: runtime: see Runtime; None after destroy
    """

    runtime: Runtime | None = None

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

        Args: enable_shrink: in DeepEP v1.2.1 comm has this place. What has a size is one
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

    @taken_as_deep_ep(NbepBuffer.get_dispatch_layout)
    def get_dispatch_layout(
        self,
        topk_idx: Any,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        if is_int32(topk_idx):
            topk_idx, previous_event = widened(topk_idx, previous_event)
        order = previous_event, async_finish, allocate_on_comm_stream
        *layout, event = super().get_dispatch_layout(topk_idx, num_experts, *order)
        return (*layout, event if async_finish else EventOverlap())

    @taken_as_deep_ep(NbepBuffer.dispatch)
    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        zero_copy: bool = False,
    ) -> Any:
        if topk_idx is not None and is_int32(topk_idx):
            topk_idx, previous_event = widened(topk_idx, previous_event)
        if config is not None:
            config = self._with_room(config, lambda: _dispatch_rings(x, topk_idx, handle))
        recv_x, recv_topk_idx, recv_topk_weights, counts, made, event = super().dispatch(
            x,
            made_of(handle),
            num_tokens_per_rank,
            num_tokens_per_rdma_rank,
            is_token_in_rank,
            num_tokens_per_expert,
            topk_idx,
            topk_weights,
            expert_alignment,
            num_worst_tokens,
            config,
            previous_event,
            async_finish,
            allocate_on_comm_stream,
            zero_copy=zero_copy,
        )
        returned = None if made is None else Handle(made)
        return recv_x, recv_topk_idx, recv_topk_weights, counts, returned, event if async_finish else EventOverlap()

    @taken_as_deep_ep(NbepBuffer.combine)
    def combine(
        self,
        x: Any,
        handle: Any,
        topk_weights: Any = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        zero_copy: bool = False,
    ) -> Any:
        if config is not None:
            config = self._with_room(config, lambda: _combine_rings(x, topk_weights))
        order = previous_event, async_finish, allocate_on_comm_stream
        combined_x, combined_topk_weights, event = super().combine(
            x, made_of(handle), topk_weights, bias, config, *order, zero_copy=zero_copy
        )
        return combined_x, combined_topk_weights, event if async_finish else EventOverlap()

    internode_dispatch, internode_combine = dispatch, combine

    @taken_as_deep_ep(NbepBuffer.low_latency_dispatch)
    def low_latency_dispatch(self, x: Any, topk_idx: Any, *more: Any, **options: Any) -> Any:
        if is_int32(topk_idx):
            topk_idx, _ = widened(topk_idx)
        recv_x, recv_count, handle, event, hook = super().low_latency_dispatch(x, topk_idx, *more, **options)
        return recv_x, recv_count, Handle(handle), event, hook

    @taken_as_deep_ep(NbepBuffer.low_latency_combine)
    def low_latency_combine(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, *more: Any, **options: Any
    ) -> Any:
        if is_int32(topk_idx):
            topk_idx, _ = widened(topk_idx)
        return super().low_latency_combine(x, topk_idx, topk_weights, made_of(handle), *more, **options)

    @taken_as_deep_ep(NbepBuffer.get_next_low_latency_combine_buffer)
    def get_next_low_latency_combine_buffer(self, handle: Any) -> Any:
        return super().get_next_low_latency_combine_buffer(made_of(handle))

    def _with_room(self, config: Any, rings: Callable[[], tuple[int, int, int, int]]) -> Any:
        """The config, with fewer slots if DeepEP's rings would fit into the buffer and nbep's do not."""
        memory = self._memory
        if not isinstance(config, Config) or memory is None or memory.internode is not None:
            return config
        try:
            sizes = rings()
        except (AttributeError, IndexError, TypeError, ValueError):  # arguments that are soon refused
            return config
        shape = config.ring_shape(self.group_size, *sizes)
        if num_nvl_bytes_needed(shape) <= self.num_nvl_bytes or deep_ep_bytes(shape) > self.num_nvl_bytes:
            return config
        return fit_config(config, self.num_nvl_bytes, self.group_size, *sizes)


def _dispatch_rings(x: Any, topk_idx: Any, handle: Any) -> tuple[int, int, int, int]:
    tokens, scales = x if isinstance(x, tuple) else (x, None)
    num_scales = 0 if scales is None else scales.shape[1]
    return tokens.shape[1] * tokens.dtype.itemsize, _columns(topk_idx), num_scales, int(handle is None)


def _combine_rings(x: Any, topk_weights: Any) -> tuple[int, int, int, int]:
    return x.shape[1] * BF16_BYTES, _columns(topk_weights), 0, 0


def _columns(array: Any) -> int:
    return 0 if array is None else array.shape[1]


def deep_ep_bytes(shape: RingShape) -> int:
    """What DeepEP's rings of this shape take. Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch"""
    num_rings = shape.num_channels * shape.num_ranks
    slot = shape.hidden_bytes + 4 + 12 * shape.num_topk + 4 * shape.num_scales
    return 4 * shape.num_ranks**2 + num_rings * (4 * 4 + shape.num_slots * slot)


class Runtime:
    """What DeepEP's deep_ep_cpp.Buffer tells of itself."""

    def __init__(self, memory: Node):
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
