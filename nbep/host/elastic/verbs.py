"""dispatch and combine of `ElasticBuffer`: names and contracts. Each hands a request over to its module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nbep.host.arguments import integer, refuse
from nbep.host.elastic.checks import ElasticCombineRequest, ElasticDispatchRequest
from nbep.host.elastic.combine import combine
from nbep.host.elastic.dispatch import dispatch
from nbep.host.elastic.handle import EPHandle
from nbep.host.entry import in_turn
from nbep.host.events import EventHandle, EventOverlap
from nbep.host.node import OnMemory
from nbep.host.target.base import Array


class ElasticVerbs(OnMemory):
    num_max_tokens_per_rank: int
    num_cpu_timeout_secs: float
    num_allocated_qps: int
    allow_multiple_reduction: bool

    if TYPE_CHECKING:

        def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int: ...

    @in_turn
    def dispatch(
        self,
        x: Array | tuple[Array, Array],
        topk_idx: Array | None = None,
        topk_weights: Array | None = None,
        cumulative_local_expert_recv_stats: Array | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Array | tuple[Array, Array], Array | None, Array | None, EPHandle, EventOverlap]:
        """Send each token to every rank that owns one of its experts. Collective.

        Args:
            x: [num_tokens, hidden] bf16, float16, float32, e4m3, e5m2, uint8 or int8, or (such an x, scales
                [num_tokens, num_scales] float32 or int32, any strides); a row is a multiple of 16 bytes. No tokens
                are allowed
            topk_idx: [num_tokens, num_topk] int64, -1 = unused; None with a handle. A token may name an expert
                twice: then it counts as two
            topk_weights: [num_tokens, num_topk] float32, with a handle too; all ranks give them, or none
            cumulative_local_expert_recv_stats: [num_local_experts] int32: the rows of each expert are added
            num_experts: of all ranks; that of the handle if it is not given
            num_max_tokens_per_rank: the most tokens of any rank; if it is not given that of the handle, or the buffer's
            expert_alignment: the rows of an expert count as a multiple of it, default 1
            num_sms: blocks at most; 0: the handle's, or else get_theoretical_num_sms
            num_qps: ignored; at most num_allocated_qps
            previous_event, previous_event_before_epilogue: the kernels start after both, and after the current stream
                unless the first is given
            async_with_compute_stream: do not wait for the rows; they are there after event.current_stream_wait()
            allocate_on_comm_stream: the outputs are memory of the comm stream, on which a buffer's kernels run
            handle: of an earlier dispatch: send along the same routes, without counting. A rewritten one is refused
                with do_expand
            do_handle_copy: the handle keeps a copy of topk_idx; False: topk_idx itself, which must stay as it is
            do_cpu_sync: wait for the counts and return as many rows; False: as many as could come. Default True
                without a handle. It cannot be True with one, or in a CUDA graph
            do_expand: a row for each (token, expert), in groups by expert; False: one for each token that comes
            do_zero_padding: with do_expand: zeros in the rows that pad an expert
            use_tma_aligned_col_major_sf: scales come by column, each of which begins at a multiple of 16 bytes

        Returns:
            - recv_x, as x: [num_rows, hidden]. Compact: tokens by rank, then in their order there. Expanded: rows by
              expert, then by rank and token; an expert's first row is at a multiple of expert_alignment
            - recv_topk_idx [num_rows, num_topk] int64: experts counted from this rank's first, -1 for others and past
              the last token. None if expanded
            - recv_topk_weights [num_rows, num_topk] float32, 0 where recv_topk_idx is -1; expanded: [num_rows], 0 in
              rows of no token. None without topk_weights
            - handle for combine and later dispatches; that which was given
            - event

        Alike:
            on all ranks must be num_max_tokens_per_rank, num_experts, num_topk, whether there are topk_weights, the
            hidden size and dtype of x, its scales, and the dispatch that a handle is of. All is compared

        Raises:
            ValueError: for wrong arguments, before anything is launched, and if ranks pass something else
            PeerTimeout: if a peer does not come

        Blocks:
            the CPU until the counts arrive, with do_cpu_sync; the current stream, unless async_with_compute_stream

        Source:
            DeepEP deep_ep/buffers/elastic.py, ElasticBuffer.dispatch
        """
        memory = self._usable("dispatch")
        self._check_qps(num_qps)
        if handle is not None:
            if topk_idx is not None:
                refuse("topk_idx", type(topk_idx).__name__, "None together with a handle")
            if not isinstance(handle, EPHandle):
                refuse("handle", type(handle).__name__, "the EPHandle that dispatch returned")
            topk_idx = handle.topk_idx
            num_experts = _as_known("num_experts", num_experts, handle)
            num_max_tokens_per_rank = _as_known("num_max_tokens_per_rank", num_max_tokens_per_rank, handle)
            expert_alignment = _as_known("expert_alignment", expert_alignment, handle)
        num_sms = integer("num_sms", num_sms, 0) or (handle.num_sms if handle is not None else 0)
        if num_sms == 0:  # what cannot be said of wrong arguments, their checks say behind this
            num_sms = 1
            shape: Any = getattr(topk_idx, "shape", ())
            if num_experts is not None and len(shape) == 2 and 1 <= shape[1] <= num_experts:
                num_sms = self.get_theoretical_num_sms(num_experts, shape[1])
        request = ElasticDispatchRequest(
            x,
            topk_idx,
            topk_weights,
            cumulative_local_expert_recv_stats,
            handle,
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
            allocate_on_comm_stream,
            num_experts,
            self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank,
            1 if expert_alignment is None else expert_alignment,
            num_sms,
            do_handle_copy,
            handle is None if do_cpu_sync is None else do_cpu_sync,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
        )
        return dispatch(memory, request, self.num_cpu_timeout_secs)

    @in_turn
    def combine(
        self,
        x: Array,
        handle: EPHandle,
        topk_weights: Array | None = None,
        bias: Array | tuple[Array | None, Array | None] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | EventOverlap | None = None,
        previous_event_before_epilogue: EventHandle | EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Array, Array | None, EventOverlap]:
        """Bring tokens back to where they came from and add them up, without weights. Collective.

        Args:
            x: [num_rows, hidden] bf16, in the order of recv_x; hidden a multiple of 8. Rows of no token are not
                read. Expanded: handle.recv_src_metadata says which rows a token has, and may have been rewritten, such
                as to one row each that the caller has added up; as many rows as tokens came are taken, too.
                x may end behind the last row of a token
            handle: of the dispatch, which says whether x is expanded. A rewritten one is refused with topk_weights,
                and without allow_multiple_reduction; see docs/elastic.md
            topk_weights: [num_rows, num_topk] float32, expanded [num_rows]
            bias: [num_tokens, hidden] bf16, or a tuple of two: added first
            num_sms: blocks at most; 0: the handle's. The others as in dispatch

        Returns:
            - combined_x [num_tokens, hidden] bf16, added in float32: bias, then the ranks in the order of the last
              choice that a token has there. An expanded token's rows on one rank are added first, by choice, and
              rounded to bf16; in hybrid mode then the ranks of each node, too. Without allow_multiple_reduction all are
              added at once, by choice
            - combined_topk_weights [num_tokens, num_topk] float32: of each choice, from its expert's rank; 0 for unused
              choices. None without topk_weights
            - event

        Alike:
            on all ranks must be the hidden size of x, whether there are topk_weights, and the dispatch that the handle
            is of; without allow_multiple_reduction whether it is expanded. All is compared

        Raises:
            ValueError, PeerTimeout: as dispatch

        Blocks:
            the current stream, unless async_with_compute_stream

        Source:
            DeepEP deep_ep/buffers/elastic.py, ElasticBuffer.combine
        """
        memory = self._usable("combine")
        self._check_qps(num_qps)
        if not isinstance(handle, EPHandle):
            refuse("handle", type(handle).__name__, "the EPHandle that dispatch returned")
        request = ElasticCombineRequest(
            x,
            handle,
            topk_weights,
            bias,
            integer("num_sms", num_sms, 0) or handle.num_sms,
            previous_event,
            previous_event_before_epilogue,
            async_with_compute_stream,
            allocate_on_comm_stream,
        )
        return combine(memory, request, self.allow_multiple_reduction)

    def _check_qps(self, num_qps: Any) -> None:
        if integer("num_qps", num_qps, 0) > self.num_allocated_qps:
            refuse("num_qps", num_qps, f"at most num_allocated_qps={self.num_allocated_qps}")


def _as_known(name: str, given: Any, handle: EPHandle) -> Any:
    """What a handle knows, which may be given again."""
    known = getattr(handle, name)
    if given is not None and given != known:
        refuse(name, given, f"None or {known}, as in the dispatch that made the handle")
    return known
