"""What the normal mode is passed, inside a node or between nodes, and the checks of it.

A call is one object: what the caller passed, in the order of Buffer's signature.

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch, Buffer::internode_dispatch
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nbep.device.kernels.parts.calls import Call
from nbep.device.protocols.staging import VEC_BYTES
from nbep.host import handle_contents, validate
from nbep.host.arguments import ROW_DTYPES, refuse
from nbep.host.calls import COMBINE, DISPATCH, HAS_HANDLE, SCALES_DTYPES, make_call
from nbep.host.config import Config
from nbep.host.events import EventOverlap
from nbep.host.handles import ArraysHandle, DispatchHandle, InternodeHandle, Taken
from nbep.host.node import NodeMemory
from nbep.host.target.arrays import NO_ARRAY, ROWS, View, Wanted
from nbep.host.target.base import Array, MaybeArray

BF16_BYTES = 2
MAX_ROWS = (1 << 31) - 1
MAX_SCALES = 1024


A_PAIR = "an array, or a tuple of an array and its scales"


class DispatchRequest(NamedTuple):
    """See Buffer.dispatch. num_sms: of the default config"""

    x: Any
    handle: Any
    num_tokens_per_rank: MaybeArray
    num_tokens_per_rdma_rank: MaybeArray
    is_token_in_rank: MaybeArray
    num_tokens_per_expert: MaybeArray
    topk_idx: MaybeArray
    topk_weights: MaybeArray
    expert_alignment: int
    num_worst_tokens: int
    config: Config | None
    previous_event: EventOverlap | None
    async_finish: bool
    allocate_on_comm_stream: bool
    zero_copy: bool
    num_sms: int


# What Buffer.dispatch returns
Dispatched = tuple[Any, MaybeArray, MaybeArray, list[int] | None, Any, EventOverlap]


class CombineRequest(NamedTuple):
    """See Buffer.combine."""

    x: Array
    handle: Any
    topk_weights: MaybeArray
    bias: Any
    config: Config | None
    previous_event: EventOverlap | None
    async_finish: bool
    allocate_on_comm_stream: bool
    zero_copy: bool


class Tokens(NamedTuple):
    """What travels, once all is checked.

    num_experts: 0 with a handle, whose dispatch knew it
    received, received_topk: arrays for received rows and their scales, and for choices and weights; None where none are
    scale_strides: from token to token and from column to column, in elements
    """

    x: View
    scales: View
    num_tokens: int
    hidden: int
    hidden_bytes: int
    num_topk: int
    num_scales: int
    scale_strides: tuple[int, int]
    received: tuple[Wanted | None, ...]
    received_topk: tuple[Wanted | None, ...]
    num_experts: int

    @classmethod
    def of(cls, x: View, scales: View, topk_idx: View, topk_weights: View, num_experts: int = 0) -> Tokens:
        """Of arrays of two dimensions, or NO_ARRAY but for x."""
        views = x, scales, topk_idx, topk_weights
        rows: list[Wanted | None] = [None] * 4
        for i, each in enumerate(views):
            if each.is_array:
                rows[i] = (ROWS, each.shape[1]), each.dtype_name
        num_scales, num_topk = (each.shape[1] if each.is_array else 0 for each in (scales, topk_idx))
        (num_tokens, hidden), (token_stride, hidden_stride) = x.shape, scales.strides or (0, 0)
        sizes = num_tokens, hidden, hidden * x.itemsize, num_topk, num_scales
        return cls(x, scales, *sizes, (token_stride, hidden_stride), tuple(rows[:2]), tuple(rows[2:]), num_experts)


def check_rows(x: View, scales: View, is_pair: bool) -> None:
    """The tokens, and their scales if they came as a pair."""
    name = "x[0]" if is_pair else "x"
    validate.array(name, x, ROW_DTYPES, ("num_tokens", "hidden"), aligned=True)
    num_tokens, hidden = x.shape
    validate.hidden_size(name, hidden, VEC_BYTES // x.itemsize)
    if not is_pair:
        return
    validate.array("x[1]", scales, ("float32", "int32"), (num_tokens, "num_scales"), contiguous=False)
    if not 1 <= scales.shape[1] <= MAX_SCALES:
        allowed = f"1 to {MAX_SCALES} scales a token: a warp's stage holds them"
        refuse("x[1]", f"{scales.shape[1]} scales a token", allowed)
    if min(scales.strides) < 0:
        refuse("x[1]", f"strides {scales.strides}", "of strides that are not negative")


def outside_rings(memory: NodeMemory, views: Mapping[str, View]) -> None:
    """No array that a call reads or writes lies in the rings."""
    validate.outside(memory, views, memory.symmetric, memory.num_nvl_bytes)
    if memory.internode is not None:
        validate.outside(memory, views, memory.internode.rdma.symmetric, memory.internode.rdma.num_rdma_bytes)


def check_dispatch(
    memory: NodeMemory, request: DispatchRequest, handle: DispatchHandle | InternodeHandle | None, views: Sequence[View]
) -> Tokens:
    """What travels in a dispatch. Its arrays fit each other, and the handle, which is checked. views: of the arrays"""
    x, scales, *more = views
    check_rows(x, scales, isinstance(request.x, tuple))
    num_tokens = x.shape[0]
    if handle is not None:
        known = handle.is_token_in_rank.shape[0]
        if num_tokens != known:
            refuse("x", f"{num_tokens} tokens", f"{known} tokens, as in the dispatch of the handle")
        return Tokens.of(x, scales, NO_ARRAY, NO_ARRAY)
    num_ranks, num_worst_tokens = memory.num_ranks, request.num_worst_tokens
    topk_idx, topk_weights, in_rank, of_ranks, of_experts, *of_nodes = more
    for name in ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"):
        if getattr(request, name) is None:
            refuse(name, "None", "given unless there is a handle; get_dispatch_layout returns it")
    validate.array("num_tokens_per_rank", of_ranks, "int32", (num_ranks,))
    validate.array("is_token_in_rank", in_rank, "bool", (num_tokens, num_ranks))
    validate.array("num_tokens_per_expert", of_experts, "int32", ("num_experts",))
    num_experts = validate.num_experts(num_ranks, of_experts.shape[0], "size of num_tokens_per_expert")
    if (request.topk_idx is None) != (request.topk_weights is None):
        missing, given = ("topk_idx", "topk_weights") if request.topk_idx is None else ("topk_weights", "topk_idx")
        refuse(missing, "None", f"given together with {given}")
    if request.topk_idx is not None:
        validate.array("topk_idx", topk_idx, "int64", (num_tokens, "num_topk"))
        validate.topk_size("topk_idx", topk_idx.shape[1])
        validate.array("topk_weights", topk_weights, "float32", topk_idx.shape)
    tokens = Tokens.of(x, scales, topk_idx, topk_weights, num_experts)
    if num_worst_tokens > 0:
        if request.topk_idx is None:
            refuse("num_worst_tokens", num_worst_tokens, "0 without topk_idx and topk_weights")
        # Kernels number rows by int32; the emulator's addresses hold less.
        bound = memory.runtime.max_symmetric_bytes or MAX_ROWS * tokens.hidden_bytes
        most = min(MAX_ROWS, bound // tokens.hidden_bytes)
        if num_worst_tokens > most:
            refuse("num_worst_tokens", num_worst_tokens, f"at most {most}")
    if memory.internode is not None:
        if request.num_tokens_per_rdma_rank is None:
            refuse("num_tokens_per_rdma_rank", "None", "given between nodes; get_dispatch_layout returns it")
        validate.array("num_tokens_per_rdma_rank", of_nodes[0], "int32", (memory.internode.num_rdma_ranks,))
    return tokens


def check_counts(memory: NodeMemory, request: DispatchRequest) -> None:
    """What get_dispatch_layout found out agrees with itself, and with top-k; where the host can read them."""
    counts = request.num_tokens_per_rank, request.is_token_in_rank, request.num_tokens_per_expert
    contents, num_worst_tokens, internode = memory.runtime.contents, request.num_worst_tokens, memory.internode
    per_rank, goes, per_expert = map(contents, counts)
    handle_contents.membership("is_token_in_rank", goes)
    counted = goes.sum(axis=0)
    if (counted != per_rank).any():
        refuse("num_tokens_per_rank", per_rank.tolist(), f"{counted.tolist()}, as is_token_in_rank says")
    if request.topk_idx is not None:
        topk_idx = contents(request.topk_idx)
        validate.expert_indices(topk_idx, len(per_expert))
        check_routing(topk_idx, goes, per_expert)
    # What the peers send is not known yet; the kernel reports if it does not fit.
    num_own = int(per_rank[memory.rank])
    if 0 < num_worst_tokens < num_own:
        allowed = f"at least {num_own}, the tokens that this rank sends to itself, and more for what peers send"
        refuse("num_worst_tokens", num_worst_tokens, allowed)
    if internode is not None:
        of_nodes: Any = request.num_tokens_per_rdma_rank
        counted = goes.reshape(-1, internode.num_rdma_ranks, memory.num_nvl_peers).any(axis=2).sum(axis=0)
        if (counted != contents(of_nodes)).any():
            refuse("num_tokens_per_rdma_rank", of_nodes.tolist(), f"{counted.tolist()}, as is_token_in_rank says")


def check_routing(topk_idx: Array, is_token_in_rank: Array, num_tokens_per_expert: Array) -> None:
    """Membership and counts agree with the choices, which are `expert_indices`."""
    num_ranks, num_experts = is_token_in_rank.shape[1], len(num_tokens_per_expert)
    owners = topk_idx // (num_experts // num_ranks)  # -1 where unused
    chosen = (owners[:, :, None] == np.arange(num_ranks)).any(axis=1)
    wrong = chosen != is_token_in_rank
    if wrong.any():
        token, rank = (int(i[0]) for i in wrong.nonzero())
        refuse(
            f"is_token_in_rank[{token}, {rank}]",
            is_token_in_rank[token, rank],
            f"{chosen[token, rank]}, as topk_idx[{token}] says: {topk_idx[token].tolist()}",
        )
    counted = np.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    wrong = counted != num_tokens_per_expert
    if wrong.any():
        expert = int(wrong.nonzero()[0][0])
        refuse(
            f"num_tokens_per_expert[{expert}]",
            num_tokens_per_expert[expert],
            f"{counted[expert]}, the choices of topk_idx that are {expert}",
        )


def pair(recv_x: Array, recv_x_scales: MaybeArray) -> Any:
    """What dispatch returns first."""
    return recv_x if recv_x_scales is None else (recv_x, recv_x_scales)


# Combine


class CombineGiven(NamedTuple):
    """What combine was given, once it is checked."""

    x: View
    hidden: int
    hidden_bytes: int
    num_topk: int
    num_combined_tokens: int


def check_combine(request: CombineRequest, views: Sequence[View], of_handle: Taken) -> CombineGiven:
    """Rows, weights and biases fit each other and the handle. views: of them"""
    x, topk_weights, *of_biases = views
    num_tokens, num_combined_tokens = of_handle.numbers[0], of_handle.sizes[0]
    validate.array("x", x, "bfloat16", (num_tokens, "hidden"), aligned=True)
    hidden = x.shape[1]
    validate.hidden_size("x", hidden, 8)
    num_topk = 0
    if request.topk_weights is not None:
        validate.array("topk_weights", topk_weights, "float32", (num_tokens, "num_topk"))
        num_topk = topk_weights.shape[1]
        validate.topk_size("topk_weights", num_topk)
    for name, view in zip(("bias_0", "bias_1"), of_biases, strict=True):
        if view.array is not None:
            validate.array(name, view, "bfloat16", (num_combined_tokens, hidden), aligned=True)
    return CombineGiven(x, hidden, hidden * BF16_BYTES, num_topk, num_combined_tokens)


def check_overlaps(memory: NodeMemory, handle: ArraysHandle, views: Sequence[View]) -> None:
    """What combine rewrites, if it goes through rings, lies nowhere else."""
    inputs = dict(zip(("x", "topk_weights", "bias_0", "bias_1"), views, strict=False))
    outside_rings(memory, inputs)
    of_handle = {f"handle.{name}": memory.runtime.view(array) for name, array in handle.arrays.items()}
    outputs = {name: of_handle.pop(name) for name in [f"handle.{name}" for name in handle.rewritten]}
    validate.apart(outputs, inputs | of_handle)


# What all ranks must pass alike


def dispatch_call(
    memory: NodeMemory,
    tokens: Tokens,
    config: Config,
    handle: ArraysHandle | None = None,
    between_nodes: bool = False,
    zero_copy: bool = False,
) -> Call:
    """What peers read out of this rank's rings, and how they take part in its barriers; see Buffer.dispatch."""
    sizes = *words_of_x(tokens), tokens.num_topk, tokens.num_experts
    of_handle = handle_word(memory, handle)
    return make_call(DISPATCH, of_handle, int(zero_copy), *sizes, *_of_config(config, between_nodes, zero_copy))


def combine_call(
    memory: NodeMemory,
    hidden: int,
    num_topk: int,
    config: Config,
    handle: ArraysHandle,
    between_nodes: bool = False,
    zero_copy: bool = False,
) -> Call:
    """What peers read out of this rank's rings, and how they take part in its barriers; see Buffer.combine."""
    words = handle_word(memory, handle), int(zero_copy), hidden, num_topk
    return make_call(COMBINE, *words, *(() if zero_copy else _of_config(config, between_nodes, zero_copy)))


def handle_word(memory: NodeMemory, handle: Any) -> int:
    """Which dispatch it is of, if the buffer has check_calls: a replay of a CUDA graph counts no calls."""
    if handle is None:
        return 0
    return HAS_HANDLE + (handle.number if memory.compares_handles else 0)


def words_of_x(tokens: Tokens) -> tuple[int, int, int]:
    scales = 0
    if tokens.scales.is_array:
        scales = 2 * tokens.num_scales + SCALES_DTYPES.index(tokens.scales.dtype_name)
    return ROW_DTYPES.index(tokens.x.dtype_name), tokens.hidden, scales


def _of_config(config: Config, between_nodes: bool, zero_copy: bool) -> tuple[int, ...]:
    """What both ends of a ring must know alike: how many there are, their slots, between nodes also their chunks.

    Without rings: how many blocks there are, and which rows land together.
    """
    if zero_copy:
        return config.num_sms, config.num_max_nvl_chunked_send_tokens
    of_node = config.num_sms, 0, config.num_max_nvl_chunked_recv_tokens
    if not between_nodes:
        return of_node
    return *of_node, config.num_max_rdma_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens
