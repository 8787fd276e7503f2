"""The verbs of the normal mode: names and contracts of `Buffer`. Each hands a request over to its module."""

from __future__ import annotations

from typing import Any

from nbep.host import validate
from nbep.host.arguments import flags, integer
from nbep.host.config import Config
from nbep.host.entry import in_turn
from nbep.host.events import EventOverlap
from nbep.host.handles import DispatchHandle, InternodeHandle
from nbep.host.internode import checks as nodes_checks
from nbep.host.internode import combine as nodes_combine
from nbep.host.internode import dispatch as nodes_dispatch
from nbep.host.intranode import checks as node_checks
from nbep.host.intranode import combine as node_combine
from nbep.host.intranode import dispatch as node_dispatch
from nbep.host.low_latency.launch import check_turn
from nbep.host.node import NodeMemory, OnMemory
from nbep.host.normal_calls import Mode, combine, dispatch, get_dispatch_layout
from nbep.host.normal_checks import CombineRequest, DispatchRequest
from nbep.host.target.arrays import new_tuple
from nbep.host.target.base import Array

INSIDE_A_NODE = Mode(DispatchHandle, node_checks, node_dispatch, node_combine)
BETWEEN_NODES = Mode(InternodeHandle, nodes_checks, nodes_dispatch, nodes_combine)


class NormalVerbs(OnMemory):
    """Layout, dispatch and combine of many tokens, as training and prefill need them: in a node and between nodes."""

    num_sms: int

    @in_turn
    def get_dispatch_layout(
        self,
        topk_idx: Array,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Array, Array | None, Array, Array, EventOverlap]:
        """Count how many tokens go to each rank and expert. Every rank counts its own: no rank waits for another.

        Args:
            topk_idx: [num_tokens, num_topk] int64, -1 = unused
            num_experts: of all ranks; the dispatch that follows takes the same number on every rank
            previous_event: an EventOverlap, or anything with such an event: the kernel starts after it, and else
                after the current stream's work; see Buffer
            async_finish: return at once; the outputs are there after event.current_stream_wait()
            allocate_on_comm_stream: the outputs belong to the comm stream (needs both of the former)

        Returns:
            num_tokens_per_rank [num_ranks] int32; num_tokens_per_rdma_rank [num_nodes] int32, None inside a node;
            num_tokens_per_expert [num_experts] int32; is_token_in_rank [num_tokens, num_ranks] bool; event

        Raises:
            ValueError: for wrong arguments
            PeerTimeout: after an earlier one

        Blocks:
            the current stream, unless async_finish

        Source:
            DeepEP deep_ep/buffer.py, Buffer.get_dispatch_layout
        """
        memory = self._usable("get_dispatch_layout")
        return get_dispatch_layout(memory, topk_idx, num_experts, previous_event, async_finish, allocate_on_comm_stream)

    @in_turn
    def dispatch(
        self,
        x: Array | tuple[Array, Array],
        handle: DispatchHandle | InternodeHandle | tuple[Array, ...] | None = None,
        num_tokens_per_rank: Array | None = None,
        num_tokens_per_rdma_rank: Array | None = None,
        is_token_in_rank: Array | None = None,
        num_tokens_per_expert: Array | None = None,
        topk_idx: Array | None = None,
        topk_weights: Array | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        zero_copy: bool = False,
    ) -> tuple[
        Array | tuple[Array, Array],
        Array | None,
        Array | None,
        list[int] | None,
        DispatchHandle | InternodeHandle | None,
        EventOverlap,
    ]:
        """Send each token once to every rank that owns one of its experts. Collective.

        Args:
            x: [num_tokens, hidden] bf16, float16, float32, e4m3, e5m2, uint8 or int8, or (such an x, scales
                [num_tokens, num_scales] float32 or int32, any strides); a row is a multiple of 16 bytes, num_scales
                at most 1024
            handle: of an earlier dispatch: send along the same routes, without counting and without top-k
            num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert: as get_dispatch_layout returns them; not
                looked at with a handle, nor is num_worst_tokens. The emulator refuses what contradicts them or
                topk_idx
            num_tokens_per_rdma_rank: the same, between nodes
            topk_idx: [num_tokens, num_topk] int64, given together with topk_weights or not at all
            topk_weights: [num_tokens, num_topk] float32
            expert_alignment: rounds the counts of num_recv_tokens_per_expert_list up
            num_worst_tokens: rows of the outputs, at least as many as tokens come: the CPU does not wait to know
            config: None: get_dispatch_config, with as many ring slots as the buffer holds (with a handle: of its
                num_sms)
            previous_event, async_finish, allocate_on_comm_stream: as in get_dispatch_layout
            zero_copy: inside a node: no rings. recv_x, its scales, recv_topk_idx, recv_topk_weights and the
                handle's recv_src_idx lie in the symmetric memory, and are the caller's until the second dispatch
                with zero_copy from here: that starts after the current stream's work, with allocate_on_comm_stream
                after previous_event alone, and then they are other tokens'. On the emulator a later use is an
                error. The rest of the handle stays, and serves calls of both kinds

        Returns:
            - recv_x as x: [num_recv_tokens, hidden], scales row-major; by source rank, then in the order of x
            - recv_topk_idx [num_recv_tokens, num_topk] int64, this rank's experts from 0 on, or -1
            - recv_topk_weights [num_recv_tokens, num_topk] float32, 0 where the index is -1
            - num_recv_tokens_per_expert_list, one int for each local expert; [] with num_worst_tokens
            - handle, for combine and for cached dispatches
            - event
            - With a handle: (recv_x, None, None, None, None, event)

        Alike:
            on all ranks must be: whether there is a handle, and of which dispatch; hidden size and dtype of x, the
            number and dtype of its scales; num_topk, or that there is no top-k; num_experts; num_sms and
            num_max_nvl_chunked_recv_tokens of config, between nodes also num_max_rdma_chunked_send_tokens and
            num_max_rdma_chunked_recv_tokens; with zero_copy num_max_nvl_chunked_send_tokens in place of the slots. All
            else may differ. Verbs and zero_copy are compared, too

        Raises:
            ValueError: for wrong arguments, before anything is launched; if ranks pass something else, before it on
                the later one of a process, else after it on all (between nodes, with a handle, on those of its node
                and place); after it if num_worst_tokens is too small
            PeerTimeout: if a peer does not come

        Blocks:
            the CPU until the counts arrive, unless handle or num_worst_tokens is given; the current stream, unless
            async_finish

        Source:
            DeepEP deep_ep/buffer.py, Buffer.dispatch
        """
        memory = self._usable_normal("dispatch", zero_copy, previous_event, async_finish, allocate_on_comm_stream)
        return dispatch(
            memory,
            new_tuple(
                DispatchRequest,
                (
                    x,
                    handle,
                    num_tokens_per_rank,
                    num_tokens_per_rdma_rank,
                    is_token_in_rank,
                    num_tokens_per_expert,
                    topk_idx,
                    topk_weights,
                    integer("expert_alignment", expert_alignment, 1),
                    integer("num_worst_tokens", num_worst_tokens, 0),
                    config,
                    previous_event,
                    async_finish,
                    allocate_on_comm_stream,
                    zero_copy,
                    type(self).num_sms,
                ),
            ),
            INSIDE_A_NODE if memory.internode is None else BETWEEN_NODES,
        )

    @in_turn
    def combine(
        self,
        x: Array,
        handle: DispatchHandle | InternodeHandle | tuple[Array, ...],
        topk_weights: Array | None = None,
        bias: Array | tuple[Array | None, Array | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        *,
        zero_copy: bool = False,
    ) -> tuple[Array, Array | None, EventOverlap]:
        """Bring tokens back to where they came from and add them up, without weights. Collective.

        Args:
            x: [num_recv_tokens, hidden] bf16, in the order of recv_x; hidden a multiple of 8
            handle: that dispatch returned; its send_head is rewritten in place, which changes no later use
            topk_weights: [num_recv_tokens, num_topk] float32, added up the same way
            bias: [num_tokens, hidden] bf16, or a tuple of two: added first
            config: None: get_combine_config of the handle's num_sms, with as many ring slots as the buffer holds
            previous_event, async_finish, allocate_on_comm_stream: as in get_dispatch_layout
            zero_copy: inside a node: rows go straight to their source's symmetric memory, without rings;
                x may lie anywhere. The handle is not rewritten

        Returns:
            - combined_x [num_tokens, hidden] bf16, added in float32: bias, then ranks ascending
            - combined_topk_weights [num_tokens, num_topk] float32, None without topk_weights
            - event

        Alike:
            on all ranks must be: the hidden size of x; num_topk, or that there are no topk_weights; of config what
            dispatch says; the dispatch that the handle is of. All is compared, as in dispatch, the last only between
            ranks of one process and with check_calls

        Raises:
            ValueError: for wrong arguments, before anything is launched, and if ranks pass something else, as a
                dispatch with a handle. PeerTimeout if a peer does not come

        Blocks:
            the current stream, unless async_finish

        Source:
            DeepEP deep_ep/buffer.py, Buffer.combine
        """
        memory = self._usable_normal("combine", zero_copy, previous_event, async_finish, allocate_on_comm_stream)
        return combine(
            memory,
            new_tuple(
                CombineRequest,
                (
                    x,
                    handle,
                    topk_weights,
                    bias,
                    config,
                    previous_event,
                    async_finish,
                    allocate_on_comm_stream,
                    zero_copy,
                ),
            ),
            INSIDE_A_NODE if memory.internode is None else BETWEEN_NODES,
        )

    def _usable_normal(
        self, verb: str, zero_copy: Any, previous_event: Any, async_finish: Any, allocate_on_comm_stream: Any
    ) -> NodeMemory:
        """The memory, if it serves the verb with these options. No module of a mode asks for them again."""
        memory = self._usable(verb)
        if memory.internode is None:
            if memory.num_nodes > 1:
                validate.refuse("num_nvl_bytes", 0, f"positive at construction for {verb}")
            if memory.num_ranks not in validate.INTRANODE_RANKS:
                validate.refuse("group", f"{memory.num_ranks} ranks", f"2, 4 or 8 ranks for {verb} inside a node")
        if zero_copy.__class__ is not bool:
            flags(zero_copy=zero_copy)
        memory.check_faults()
        validate.stream_options(previous_event, async_finish, allocate_on_comm_stream)
        if zero_copy and memory.direct is None:
            is_in_node = memory.internode is None
            why = ": num_zero_copy_bytes was 0 at construction" if is_in_node else " between nodes"
            validate.refuse("zero_copy", True, f"False{why}")
        if memory.internode is not None:
            check_turn(memory, verb)
        return memory
