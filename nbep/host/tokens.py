"""What travels in the normal mode, inside a node or between nodes, and what is known of it before: checks and counters.

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch, Buffer::internode_dispatch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from nbep.host import validate
from nbep.host.counters import Received
from nbep.host.handles import ArraysHandle
from nbep.host.node import Node
from nbep.host.request import CombineRequest, Counts, DispatchRequest
from nbep.host.target.base import Array, MaybeArray
from nbep.host.target.new_arrays import ROWS, Wanted
from nbep.host.target.views import View

BF16_BYTES = 2
MAX_ROWS = (1 << 31) - 1


class Tokens(NamedTuple):
    """What travels. scales, topk_idx and topk_weights may be NO_ARRAY."""

    x: View
    scales: View
    topk_idx: View
    topk_weights: View

    @classmethod
    def look_at(cls, memory: Node, request: DispatchRequest) -> Tokens:
        """Those of a request; its top-k is not checked."""
        runtime = memory.runtime
        topk = runtime.view(request.topk_idx), runtime.view(request.topk_weights)
        tokens = cls(*validate.payload(runtime, request.x), *topk)
        if not request.zero_copy:
            validate.outside_rings(memory, tokens._asdict())
        return tokens

    @property
    def arrays(self) -> tuple[Array, MaybeArray, MaybeArray, MaybeArray]:
        """As DispatchInputs begins."""
        return self.x.array, self.scales.array, self.topk_idx.array, self.topk_weights.array

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def hidden(self) -> int:
        return self.x.shape[1]

    @property
    def hidden_bytes(self) -> int:
        return self.hidden * self.x.itemsize

    @property
    def num_topk(self) -> int:
        return self.topk_idx.shape[1] if self.topk_idx.is_array else 0

    @property
    def num_scales(self) -> int:
        return self.scales.shape[1] if self.scales.is_array else 0

    def ring_sizes(self, num_src_idx: int) -> tuple[int, int, int, int]:
        """The last arguments of Config.ring_shape. num_src_idx: 0 with a handle, which knows where the tokens were"""
        return self.hidden_bytes, self.num_topk, self.num_scales, num_src_idx

    @property
    def scale_strides(self) -> tuple[int, int]:
        """From token to token and from column to column, in elements."""
        if not self.scales.is_array:
            return 0, 0
        token_stride, hidden_stride = self.scales.strides
        return token_stride, hidden_stride


def check_counts(memory: Node, tokens: Tokens, request: DispatchRequest, may_read: bool) -> None:
    """What get_dispatch_layout found out, and top-k, fit to the tokens. may_read: see validate.may_read"""
    runtime, num_ranks, num_worst_tokens = memory.runtime, memory.num_ranks, request.num_worst_tokens
    counts = request.counts
    for name, value in counts._asdict().items():
        if value is None:
            validate.refuse(name, "None", "given unless there is a handle; get_dispatch_layout returns it")
    of_ranks, in_rank, of_experts = map(runtime.view, counts)
    validate.array("num_tokens_per_rank", of_ranks, "int32", (num_ranks,))
    validate.array("is_token_in_rank", in_rank, "bool", (tokens.num_tokens, num_ranks))
    validate.array("num_tokens_per_expert", of_experts, "int32", ("num_experts",))
    num_experts = of_experts.shape[0]
    validate.num_experts(num_ranks, num_experts, "size of num_tokens_per_expert")
    if (request.topk_idx is None) != (request.topk_weights is None):
        missing, given = ("topk_idx", "topk_weights") if request.topk_idx is None else ("topk_weights", "topk_idx")
        validate.refuse(missing, "None", f"given together with {given}")
    if request.topk_idx is not None:
        validate.array("topk_idx", tokens.topk_idx, "int64", (tokens.num_tokens, "num_topk"))
        validate.topk_size("topk_idx", tokens.num_topk)
        validate.array("topk_weights", tokens.topk_weights, "float32", (tokens.num_tokens, tokens.num_topk))
        # Kernels number rows by int32; the emulator's addresses hold less.
        most = min(MAX_ROWS, (runtime.max_symmetric_bytes or MAX_ROWS * tokens.hidden_bytes) // tokens.hidden_bytes)
        if num_worst_tokens > most:
            validate.refuse("num_worst_tokens", num_worst_tokens, f"at most {most}")
    elif num_worst_tokens > 0:
        validate.refuse("num_worst_tokens", num_worst_tokens, "0 without topk_idx and topk_weights")
    if may_read:
        found = Counts(*map(runtime.contents, counts))
        validate.token_counts(found.num_tokens_per_rank, found.is_token_in_rank)
        if request.topk_idx is not None:
            topk_idx = runtime.contents(request.topk_idx)
            validate.expert_indices(topk_idx, num_experts)
            validate.routing(topk_idx, found.is_token_in_rank, found.num_tokens_per_expert)
        # What the peers send is not known yet; the kernel reports if it does not fit.
        num_own = int(counts.num_tokens_per_rank[memory.rank])
        if 0 < num_worst_tokens < num_own:
            allowed = f"at least {num_own}, the tokens that this rank sends to itself, and more for what peers send"
            validate.refuse("num_worst_tokens", num_worst_tokens, allowed)


def check_wait(memory: Node, request: DispatchRequest) -> None:
    """Raises: ValueError where the CPU cannot wait for counts"""
    if request.num_worst_tokens == 0 and memory.runtime.is_capturing:
        validate.refuse("num_worst_tokens", 0, "positive in a CUDA graph, or a handle given: the CPU cannot wait there")


def find_counted(memory: Node, request: DispatchRequest) -> tuple[Any, Any, list[Any]]:
    """As Plans.find, of a dispatch without a handle, whose arrays are

    x, scales, topk_idx, topk_weights, is_token_in_rank, num_tokens_per_rank, num_tokens_per_expert, and between nodes
    num_tokens_per_rdma_rank
    """
    is_pair = isinstance(request.x, tuple)
    x = request.x if is_pair else (request.x, None)
    counts: tuple[Any, ...] = request.is_token_in_rank, request.num_tokens_per_rank, request.num_tokens_per_expert
    if memory.internode is not None:
        counts += (request.num_tokens_per_rdma_rank,)
    if len(x) != 2:
        return None, None, []
    options: tuple[Any, ...] = (
        request.expert_alignment,
        request.num_worst_tokens,
        request.config,
        request.num_sms,
        is_pair,
        request.zero_copy,
    )
    return memory.counted_plans.find((*x, request.topk_idx, request.topk_weights, *counts), options)


def rows_of(*views: View) -> tuple[Wanted | None, ...]:
    """Arrays for received rows of each of these that is there."""
    return tuple(((ROWS, view.shape[1]), view.dtype_name) if view.is_array else None for view in views)


def await_counts(memory: Node, request: DispatchRequest) -> Received:
    """What comes: at most num_worst_tokens, or what the counters of a notify kernel say, for which the CPU waits."""
    num_worst_tokens, num_local_experts = request.num_worst_tokens, request.num_experts // memory.num_ranks
    if num_worst_tokens > 0:
        # Each token that passes through this rank is one of those that come to a rank of its node.
        return Received(num_worst_tokens, [], num_worst_tokens * memory.num_nvl_peers)

    return await_counters(memory, num_local_experts, 2 * memory.timeout_ms, f"{2 * memory.timeout_ms:g} ms")


def await_counters(memory: Node, num_local_experts: int, timeout_ms: float, limit: str) -> Received:
    """What the counters of a notify kernel say, for which the CPU waits; limit: timeout_ms in words

    The kernel's own waits are to be over first: they say more.
    """

    def poll() -> Received | None:
        return memory.counters.poll(num_local_experts, memory.internode is not None)

    memory.runtime.wait_until(
        lambda: memory.has_fault or poll() is not None,
        lambda: "moe_recv_counter: the counts of received tokens",
        int(1e6 * timeout_ms),
    )
    memory.check_faults()
    received = poll()
    if received is None:
        gone = memory.who_is_gone()
        raise RuntimeError(
            f"rank {memory.rank}: the counts of received tokens did not arrive in {limit}"
            + (f"; {gone}" if gone else "")
        )
    return received


def pair(recv_x: Array, recv_x_scales: MaybeArray) -> Any:
    """What dispatch returns first."""
    return recv_x if recv_x_scales is None else (recv_x, recv_x_scales)


# Combine


def has_rows(arrays: Sequence[MaybeArray], num_rows: int) -> bool:
    """Whether those that are given have so many rows, as the handle says."""
    for array in arrays:  # noqa: SIM110 - a generator costs more than what it asks
        if array is not None and array.shape[0] != num_rows:
            return False
    return True


class CombineGiven(NamedTuple):
    """What combine was given, besides the rows."""

    hidden: int
    num_topk: int
    bias_0: MaybeArray
    bias_1: MaybeArray

    @property
    def hidden_bytes(self) -> int:
        return self.hidden * BF16_BYTES


def check_combine_inputs(
    memory: Node, request: CombineRequest, handle: ArraysHandle, num_tokens: int, num_combined_tokens: int
) -> CombineGiven:
    """Rows, weights and biases fit each other and the handle, whose numbers of tokens come behind it."""
    runtime = memory.runtime
    x, topk_weights, *of_biases = map(runtime.view, request.arrays)
    if len(of_biases) != 2:
        raise ValueError(f"bias: got a tuple of {len(of_biases)}; must be an array, a tuple of two, or None")
    validate.array("x", x, "bfloat16", (num_tokens, "hidden"))
    hidden = x.shape[1]
    validate.hidden_size("x", hidden, 8)
    validate.row_alignment("x", x)
    num_topk = 0
    if request.topk_weights is not None:
        validate.array("topk_weights", topk_weights, "float32", (num_tokens, "num_topk"))
        num_topk = topk_weights.shape[1]
        validate.topk_size("topk_weights", num_topk)
    bias_0, bias_1 = of_biases
    for name, view in (("bias_0", bias_0), ("bias_1", bias_1)):
        if view.array is not None:
            validate.array(name, view, "bfloat16", (num_combined_tokens, hidden))
            validate.row_alignment(name, view)
    if not request.zero_copy and (runtime.host_reads_arrays or not handle.is_as_made):
        inputs = {"x": x, "topk_weights": topk_weights, "bias_0": bias_0, "bias_1": bias_1}
        validate.outside_rings(memory, inputs)
        of_handle = {f"handle.{name}": runtime.view(array) for name, array in handle.arrays.items()}
        outputs = {name: of_handle.pop(name) for name in [f"handle.{name}" for name in handle.rewritten]}
        validate.apart(outputs, inputs | of_handle)
    return CombineGiven(hidden, num_topk, bias_0.array, bias_1.array)
