"""What travels in the normal mode, inside a node or between nodes, and what is known of it before: checks and counters.

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch, Buffer::internode_dispatch
"""

from __future__ import annotations

from typing import Any, NamedTuple

from nbep.host import validate
from nbep.host.counters import Received
from nbep.host.node import Empty, Node
from nbep.host.target.base import Array, MaybeArray, Runtime

BF16_BYTES = 2
MAX_ROWS = (1 << 31) - 1


class Counts(NamedTuple):
    """What get_dispatch_layout found out."""

    num_tokens_per_rank: Array
    is_token_in_rank: Array
    num_tokens_per_expert: Array


NO_COUNTS = Counts(None, None, None)  # a handle knows them


class Tokens(NamedTuple):
    """What travels, as DispatchInputs begins. scales, topk_idx and topk_weights may be None."""

    x: Array
    scales: MaybeArray
    topk_idx: MaybeArray
    topk_weights: MaybeArray

    @property
    def num_tokens(self) -> int:
        return self.x.shape[0]

    @property
    def hidden_bytes(self) -> int:
        return self.x.shape[1] * self.x.dtype.itemsize

    @property
    def num_topk(self) -> int:
        return 0 if self.topk_idx is None else self.topk_idx.shape[1]

    @property
    def num_scales(self) -> int:
        return 0 if self.scales is None else self.scales.shape[1]


def empty_rows(runtime: Runtime, empty: Empty, tokens: Tokens, num_rows: int) -> dict[str, MaybeArray]:
    """Arrays for received rows, by the names that outputs have for them; None for what the tokens do not have."""
    given = {
        "recv_x": tokens.x,
        "recv_x_scales": tokens.scales,
        "recv_topk_idx": tokens.topk_idx,
        "recv_topk_weights": tokens.topk_weights,
    }
    return {
        name: None if array is None else empty((num_rows, array.shape[1]), runtime.dtype_name(array))
        for name, array in given.items()
    }


def check_counts(memory: Node, tokens: Tokens, counts: Counts, num_worst_tokens: int, may_read: bool) -> None:
    """What get_dispatch_layout found out, and top-k, fit to the tokens. may_read: see validate.may_read"""
    runtime, num_ranks = memory.runtime, memory.num_ranks
    for name, value in counts._asdict().items():
        if value is None:
            validate.refuse(name, "None", "given unless there is a handle; get_dispatch_layout returns it")
    validate.array(runtime, "num_tokens_per_rank", counts.num_tokens_per_rank, "int32", (num_ranks,))
    validate.array(runtime, "is_token_in_rank", counts.is_token_in_rank, "bool", (tokens.num_tokens, num_ranks))
    validate.array(runtime, "num_tokens_per_expert", counts.num_tokens_per_expert, "int32", ("num_experts",))
    num_experts = counts.num_tokens_per_expert.shape[0]
    validate.num_experts(num_ranks, num_experts, "size of num_tokens_per_expert")
    if (tokens.topk_idx is None) != (tokens.topk_weights is None):
        missing, given = ("topk_idx", "topk_weights") if tokens.topk_idx is None else ("topk_weights", "topk_idx")
        validate.refuse(missing, "None", f"given together with {given}")
    if tokens.topk_idx is not None:
        validate.array(runtime, "topk_idx", tokens.topk_idx, "int64", (tokens.num_tokens, "num_topk"))
        validate.topk_size("topk_idx", tokens.num_topk)
        validate.array(runtime, "topk_weights", tokens.topk_weights, "float32", (tokens.num_tokens, tokens.num_topk))
        # Kernels number rows by int32; the emulator's addresses hold less.
        most = min(MAX_ROWS, (runtime.max_symmetric_bytes or MAX_ROWS * tokens.hidden_bytes) // tokens.hidden_bytes)
        if num_worst_tokens > most:
            validate.refuse("num_worst_tokens", num_worst_tokens, f"at most {most}")
    elif num_worst_tokens > 0:
        validate.refuse("num_worst_tokens", num_worst_tokens, "0 without topk_idx and topk_weights")
    if num_worst_tokens == 0 and runtime.is_capturing:
        validate.refuse("num_worst_tokens", 0, "positive in a CUDA graph, or a handle given: the CPU cannot wait there")
    if may_read:
        found = Counts(*map(runtime.contents, counts))
        validate.token_counts(found.num_tokens_per_rank, found.is_token_in_rank)
        if tokens.topk_idx is not None:
            topk_idx = runtime.contents(tokens.topk_idx)
            validate.expert_indices(topk_idx, num_experts)
            validate.routing(topk_idx, found.is_token_in_rank, found.num_tokens_per_expert)
        # What the peers send is not known yet; the kernel reports if it does not fit.
        num_own = int(counts.num_tokens_per_rank[memory.rank])
        if 0 < num_worst_tokens < num_own:
            allowed = f"at least {num_own}, the tokens that this rank sends to itself, and more for what peers send"
            validate.refuse("num_worst_tokens", num_worst_tokens, allowed)


def wait_counters(memory: Node, num_local_experts: int) -> Received:
    """Block the CPU until the counters have arrived that a notify kernel writes."""

    def poll() -> Received | None:
        return memory.counters.poll(num_local_experts, memory.internode is not None)

    # The kernel's own waits are over first, and say more.
    timeout_ns = int(2 * memory.timeout_ms * 1e6)
    memory.runtime.wait_until(
        lambda: memory.has_fault or poll() is not None,
        lambda: "moe_recv_counter: the counts of received tokens",
        timeout_ns,
    )
    memory.check_faults()
    received = poll()
    if received is None:
        gone = memory.who_is_gone()
        raise RuntimeError(
            f"rank {memory.rank}: the counts of received tokens did not arrive in {timeout_ns / 1e6:g} ms"
            + (f"; {gone}" if gone else "")
        )
    return received


def pair(recv_x: Array, recv_x_scales: MaybeArray) -> Any:
    """What dispatch returns first."""
    return recv_x if recv_x_scales is None else (recv_x, recv_x_scales)


# Combine


class CombineGiven(NamedTuple):
    """What combine was given, besides the rows."""

    hidden_bytes: int
    num_topk: int
    bias_0: MaybeArray
    bias_1: MaybeArray


def check_combine_inputs(
    runtime: Runtime, x: Array, topk_weights: MaybeArray, bias: Any, num_tokens: int, num_combined_tokens: int
) -> CombineGiven:
    """Rows, weights and biases fit each other, and the handle's numbers of tokens."""
    validate.array(runtime, "x", x, "bfloat16", (num_tokens, "hidden"))
    hidden = x.shape[1]
    validate.hidden_size("x", hidden, 8)
    validate.row_alignment(runtime, "x", x)
    num_topk = 0
    if topk_weights is not None:
        validate.array(runtime, "topk_weights", topk_weights, "float32", (num_tokens, "num_topk"))
        num_topk = topk_weights.shape[1]
        validate.topk_size("topk_weights", num_topk)
    biases = unpack_bias(bias)
    for name, value in zip(("bias_0", "bias_1"), biases, strict=True):
        if value is not None:
            validate.array(runtime, name, value, "bfloat16", (num_combined_tokens, hidden))
            validate.row_alignment(runtime, name, value)
    return CombineGiven(hidden * BF16_BYTES, num_topk, *biases)


def unpack_bias(bias: Any) -> tuple[MaybeArray, MaybeArray]:
    """No bias, one, or a tuple of two."""
    if not isinstance(bias, tuple):
        return bias, None
    if len(bias) != 2:
        raise ValueError(f"bias: got a tuple of {len(bias)}; must be an array, a tuple of two, or None")
    return bias
