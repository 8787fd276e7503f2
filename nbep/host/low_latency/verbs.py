"""The low-latency methods of `Buffer`: names and contracts. Each hands over to the module of its verb."""

from __future__ import annotations

from typing import Any

from nbep.host.entry import in_turn
from nbep.host.events import EventOverlap
from nbep.host.low_latency.combine import get_next_low_latency_combine_buffer, low_latency_combine
from nbep.host.low_latency.dispatch import low_latency_dispatch
from nbep.host.low_latency.handle import LowLatencyHandle
from nbep.host.low_latency.launch import (
    Hook,
    clean_low_latency_buffer,
    clean_mask_buffer,
    query_mask_buffer,
    update_mask_buffer,
)
from nbep.host.low_latency.memory import low_latency_rdma_size_hint
from nbep.host.node import OnMemory
from nbep.host.target.base import Array, MaybeArray


class LowLatencyVerbs(OnMemory):
    """Dispatch and combine of few tokens at a time, as decoding needs them. They take a Buffer of low_latency_mode.

    Calls under way:
        A call takes one half of the RDMA buffer, the next call the other one. With return_recv_hook two calls may be
        under way, one in each half; a third is refused until the hook of the first is called. All ranks make the same
        calls in the same order. What calls return lies in memory of its own, and stays for as long as it is held.
        What a call is given to write (out, stats) may not lie over its other arrays, nor in the RDMA buffer.
    Threads:
        Two threads of a process, each with a buffer of its own group, may call in any order if each has a current
        stream of its own. On a GPU that is for the caller to see to: calls on one stream wait for each other there.
    CUDA graphs:
        Calls can be captured and replayed with new contents of their inputs. A graph holds an even number of calls, so
        that each replay finds the halves as the capture did; otherwise the buffer fails with a ValueError that says so.
    """

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """num_rdma_bytes that serve low-latency calls of up to these sizes: DeepEP's number, or ours if larger."""
        return low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @in_turn
    def low_latency_dispatch(
        self,
        x: Array,
        topk_idx: Array,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: MaybeArray = None,
        dispatch_wait_recv_cost_stats: MaybeArray = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        deduplicate: bool = False,
        topk_weights: MaybeArray = None,
    ) -> tuple[Any, Array, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send each token to each of its experts, packed by expert. Collective; the CPU waits for nothing.

        Args:
            x: [num_tokens, hidden] bf16, hidden a multiple of 128; num_tokens may differ between ranks
            topk_idx: [num_tokens, num_topk] int64, -1 = unused; num_topk at most 32; an expert once in a token
            num_max_dispatch_tokens_per_rank: no rank has more tokens; the same on all ranks
            cumulative_local_expert_recv_stats: [num_local_experts] int32: the received tokens are added
            dispatch_wait_recv_cost_stats: [num_ranks] int64: the cycles that receivers waited are added
            use_fp8: cast to e4m3 on the way, 128 columns with a scale; otherwise bf16 travels
            round_scale: scales are powers of two
            use_ue8m0: and only their exponents are returned
            async_finish: return at once; the outputs are there after event.current_stream_wait()
            return_recv_hook: launch the send phase only; hook() launches the receive phase. No SM is held between
                them
            deduplicate: beyond DeepEP: a token with several experts on one rank goes there once, and takes its
                topk_weights along
            topk_weights: [num_tokens, num_topk] float32, with deduplicate: combine needs them where the experts are

        Returns:
            - recv_x [num_local_experts, T, hidden] bf16, T = num_ranks * num_max_dispatch_tokens_per_rank; with use_fp8
              a tuple: e4m3, and scales [num_local_experts, T, hidden / 128] float32, with use_ue8m0 [num_local_experts,
              T, hidden / 512] int32, four exponents a word; both are transposed views, so that the scales of
              neighbouring rows lie side by side. Rows past recv_count hold anything
            - recv_count [num_local_experts] int32; rows of an expert run by source rank, and of one rank in any order
            - handle for low_latency_combine
            - event, empty unless async_finish
            - hook, None unless return_recv_hook; it is to be called once

        Alike:
            on all ranks: all but the contents and number of tokens, the stats, async_finish and the streams. Ranks of
            one process are compared before; of others a message or a row of another call is reported, and the call
            raises, on a GPU the buffer's next one. Who waits for what the other call does not send: PeerTimeout

        Raises:
            ValueError: for wrong arguments, before anything is launched, and if a third call would be under way
            PeerTimeout: if a peer does not come, unless the buffer shrinks

        Source:
            DeepEP deep_ep/buffer.py, Buffer.low_latency_dispatch
        """
        alike = num_max_dispatch_tokens_per_rank, num_experts, use_fp8, round_scale, use_ue8m0, deduplicate
        return low_latency_dispatch(
            self._usable("low_latency_dispatch"),
            (x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats),
            (*alike, async_finish, return_recv_hook),
        )

    @in_turn
    def low_latency_combine(
        self,
        x: Array,
        topk_idx: Array,
        topk_weights: Array,
        handle: LowLatencyHandle | tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: MaybeArray = None,
        combine_wait_recv_cost_stats: MaybeArray = None,
    ) -> tuple[Array, EventOverlap, Hook | None]:
        """Bring the rows of experts back to their tokens and add them up with the tokens' weights. Collective.

        Args:
            x: [num_local_experts, T, hidden] bf16, in the order of recv_x; rows past recv_count are not read
            topk_idx, topk_weights: [num_tokens, num_topk] int64 and float32, as in the dispatch
            handle: that low_latency_dispatch returned
            use_logfmt: send ten bits a value where the values allow it; see kernels.parts.logfmt
            zero_copy: take the rows from get_next_low_latency_combine_buffer, which was got since the last call;
                x is then not read
            async_finish, return_recv_hook: as in low_latency_dispatch
            out: [num_tokens, hidden] bf16 to write to
            combine_wait_recv_cost_stats: [num_ranks] int64: the cycles that receivers waited are added; without
                check_calls nothing for a rank whose experts have no rows for this one

        Returns:
            - combined_x [num_tokens, hidden] bf16: products and sums in float32, in the order of the choices, without
              those that are -1. After a dispatch with deduplicate each rank adds up its own experts' rows first and
              rounds that to bf16; those sums are added in the order of the ranks' first choices
            - event, hook as low_latency_dispatch

          Alike, Raises: as low_latency_dispatch

        Source:
            DeepEP deep_ep/buffer.py, Buffer.low_latency_combine
        """
        return low_latency_combine(
            self._usable("low_latency_combine"),
            (x, topk_idx, topk_weights, out, combine_wait_recv_cost_stats),
            (use_logfmt, zero_copy, async_finish, return_recv_hook),
            handle,
        )

    @in_turn
    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle | tuple[Any, ...]) -> Array:
        """The part of the RDMA buffer that the next call, a low_latency_combine with zero_copy, sends from.

        Returns:
            [num_local_experts, num_ranks * num_max_dispatch_tokens_per_rank, hidden] bf16

        Raises:
            PeerTimeout: after an earlier one, or if a NIC does not come so far

        Blocks:
            over a NIC the CPU, until all that this rank has sent has been read

        Source:
            DeepEP deep_ep/buffer.py, Buffer.get_next_low_latency_combine_buffer
        """
        return get_next_low_latency_combine_buffer(self._usable("get_next_low_latency_combine_buffer"), handle)

    @in_turn
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Put the cells of the low-latency mode back to their beginning. Collective, behind all earlier calls.

        It must come between a dispatch or combine between nodes and the next low-latency call: they share the RDMA
        buffer, and a rank may still need there what it got in the former. The low-latency verbs are refused until
        then. A dispatch or combine after low-latency calls needs nothing but that their hooks have been called.
        The cells lie outside of what users write, so else it is needed only after masks were taken off, and then the
        next verb does it: a rank that was masked may have left half a call behind. Calls that have not been received
        are forgotten. All ranks call it equally often, those that are masked too.

        Args, Source: as DeepEP deep_ep/buffer.py, Buffer.clean_low_latency_buffer; the sizes are only checked
        """
        memory = self._usable("clean_low_latency_buffer")
        clean_low_latency_buffer(memory, num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @in_turn
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Go on without another rank (mask=True) in later low-latency calls, or with it again. Needs enable_shrink.

        With it again: as after low_latency_clean_mask_buffer.
        """
        update_mask_buffer(self._usable("low_latency_update_mask_buffer"), rank_to_mask, mask)

    @in_turn
    def low_latency_query_mask_buffer(self, mask_status: Array) -> None:
        """Write into mask_status [num_ranks] int32 which ranks are masked: 1, else 0. Needs enable_shrink."""
        query_mask_buffer(self._usable("low_latency_query_mask_buffer"), mask_status)

    @in_turn
    def low_latency_clean_mask_buffer(self) -> None:
        """Take all masks off. Needs enable_shrink.

        The ranks are out of step then. So the next low-latency verb of this rank begins as clean_low_latency_buffer
        does: all ranks take masks off, or all call clean_low_latency_buffer themselves. A CUDA graph that was captured
        before cannot begin so: the call after its replay raises a ValueError.
        """
        clean_mask_buffer(self._usable("low_latency_clean_mask_buffer"))
