"""What travels in the normal mode, inside a node or between nodes, and the checks of it.

Source: DeepEP csrc/deep_ep.cpp, Buffer::intranode_dispatch, Buffer::internode_dispatch
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from nbep.device.protocols.staging import VEC_BYTES
from nbep.host import handle_contents, validate
from nbep.host.arguments import ROW_DTYPES, refuse
from nbep.host.handles import ArraysHandle
from nbep.host.internode.handle import InternodeHandle
from nbep.host.intranode.handle import DispatchHandle
from nbep.host.node import Node
from nbep.host.request import CombineRequest, DispatchRequest
from nbep.host.target.base import Array, MaybeArray, Runtime
from nbep.host.target.new_arrays import ROWS, Wanted
from nbep.host.target.views import NO_ARRAY, View

BF16_BYTES = 2
MAX_ROWS = (1 << 31) - 1
MAX_SCALES = 1024


class Tokens(NamedTuple):
    """What travels. scales, topk_idx and topk_weights may be NO_ARRAY."""

    x: View
    scales: View
    topk_idx: View
    topk_weights: View

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

    @property
    def received(self) -> tuple[Wanted | None, Wanted | None]:
        """Arrays for received rows, and for their scales if there are some."""
        return _rows_of(self.x), _rows_of(self.scales)

    @property
    def received_topk(self) -> tuple[Wanted | None, Wanted | None]:
        """The same for choices and weights."""
        return _rows_of(self.topk_idx), _rows_of(self.topk_weights)

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


def _rows_of(view: View) -> Wanted | None:
    return ((ROWS, view.shape[1]), view.dtype_name) if view.is_array else None


def payload(runtime: Runtime, x: Any) -> tuple[View, View]:
    """The tokens and their scales, NO_ARRAY without."""
    if not isinstance(x, tuple):
        tokens = runtime.view(x)
        validate.array("x", tokens, ROW_DTYPES, ("num_tokens", "hidden"))
        validate.hidden_size("x", tokens.shape[1], VEC_BYTES // tokens.itemsize)
        validate.row_alignment("x", tokens)
        return tokens, NO_ARRAY
    if len(x) != 2:
        refuse("x", f"a tuple of {len(x)}", "an array, or a tuple of an FP8 array and its scales")
    tokens, scales = map(runtime.view, x)
    validate.array("x[0]", tokens, "float8_e4m3fn", ("num_tokens", "hidden"))
    num_tokens, hidden = tokens.shape
    validate.hidden_size("x[0]", hidden, VEC_BYTES)
    validate.row_alignment("x[0]", tokens)
    validate.array("x[1]", scales, ("float32", "int32"), (num_tokens, "num_scales"), contiguous=False)
    if not 1 <= scales.shape[1] <= MAX_SCALES:
        allowed = f"1 to {MAX_SCALES} scales a token: a warp's stage holds them"
        refuse("x[1]", f"{scales.shape[1]} scales a token", allowed)
    if min(scales.strides) < 0:
        refuse("x[1]", f"strides {scales.strides}", "of strides that are not negative")
    return tokens, scales


def outside_rings(memory: Node, views: Mapping[str, View]) -> None:
    """No array that a call reads or writes lies in the rings."""
    validate.outside(memory, views, memory.symmetric, memory.num_nvl_bytes)
    if memory.internode is not None:
        validate.outside(memory, views, memory.internode.rdma.symmetric, memory.internode.rdma.num_rdma_bytes)


def check_dispatch(memory: Node, request: DispatchRequest, handle: DispatchHandle | InternodeHandle | None) -> Tokens:
    """What travels in a dispatch. Its arrays fit each other, and the handle, which is checked."""
    runtime = memory.runtime
    topk = runtime.view(request.topk_idx), runtime.view(request.topk_weights)
    tokens = Tokens(*payload(runtime, request.x), *topk)
    if not request.zero_copy:
        outside_rings(memory, tokens._asdict())
    if handle is None:
        _check_counts(memory, tokens, request)
        return tokens
    num_tokens = handle.is_token_in_rank.shape[0]
    if tokens.num_tokens != num_tokens:
        refuse("x", f"{tokens.num_tokens} tokens", f"{num_tokens} tokens, as in the dispatch of the handle")
    return tokens


def _check_counts(memory: Node, tokens: Tokens, request: DispatchRequest) -> None:
    """What get_dispatch_layout found out, and top-k, fit to the tokens."""
    runtime, num_ranks, num_worst_tokens = memory.runtime, memory.num_ranks, request.num_worst_tokens
    counts = request.counts
    for name, value in counts._asdict().items():
        if value is None:
            refuse(name, "None", "given unless there is a handle; get_dispatch_layout returns it")
    of_ranks, in_rank, of_experts = map(runtime.view, counts)
    validate.array("num_tokens_per_rank", of_ranks, "int32", (num_ranks,))
    validate.array("is_token_in_rank", in_rank, "bool", (tokens.num_tokens, num_ranks))
    validate.array("num_tokens_per_expert", of_experts, "int32", ("num_experts",))
    num_experts = of_experts.shape[0]
    validate.num_experts(num_ranks, num_experts, "size of num_tokens_per_expert")
    if (request.topk_idx is None) != (request.topk_weights is None):
        missing, given = ("topk_idx", "topk_weights") if request.topk_idx is None else ("topk_weights", "topk_idx")
        refuse(missing, "None", f"given together with {given}")
    if request.topk_idx is not None:
        validate.array("topk_idx", tokens.topk_idx, "int64", (tokens.num_tokens, "num_topk"))
        validate.topk_size("topk_idx", tokens.num_topk)
        validate.array("topk_weights", tokens.topk_weights, "float32", (tokens.num_tokens, tokens.num_topk))
        # Kernels number rows by int32; the emulator's addresses hold less.
        most = min(MAX_ROWS, (runtime.max_symmetric_bytes or MAX_ROWS * tokens.hidden_bytes) // tokens.hidden_bytes)
        if num_worst_tokens > most:
            refuse("num_worst_tokens", num_worst_tokens, f"at most {most}")
    elif num_worst_tokens > 0:
        refuse("num_worst_tokens", num_worst_tokens, "0 without topk_idx and topk_weights")
    internode, of_nodes = memory.internode, request.num_tokens_per_rdma_rank
    if internode is not None:
        if of_nodes is None:
            refuse("num_tokens_per_rdma_rank", "None", "given between nodes; get_dispatch_layout returns it")
        validate.array("num_tokens_per_rdma_rank", runtime.view(of_nodes), "int32", (internode.num_rdma_ranks,))
    if not validate.may_read(memory, request.previous_event):
        return
    per_rank, goes, per_expert = map(runtime.contents, counts)
    check_membership(goes, per_rank)
    if request.topk_idx is not None:
        topk_idx = runtime.contents(request.topk_idx)
        validate.expert_indices(topk_idx, num_experts)
        check_routing(topk_idx, goes, per_expert)
    # What the peers send is not known yet; the kernel reports if it does not fit.
    num_own = int(per_rank[memory.rank])
    if 0 < num_worst_tokens < num_own:
        allowed = f"at least {num_own}, the tokens that this rank sends to itself, and more for what peers send"
        refuse("num_worst_tokens", num_worst_tokens, allowed)
    if internode is not None:
        counted = goes.reshape(-1, internode.num_rdma_ranks, memory.num_nvl_peers).any(axis=2).sum(axis=0)
        if (counted != runtime.contents(of_nodes)).any():
            refuse("num_tokens_per_rdma_rank", of_nodes.tolist(), f"{counted.tolist()}, as is_token_in_rank says")


def check_membership(is_token_in_rank: Array, num_tokens_per_rank: Array) -> None:
    """The counts agree with the membership that they sum up."""
    handle_contents.membership("is_token_in_rank", is_token_in_rank)
    counted = is_token_in_rank.sum(axis=0)
    if (counted != num_tokens_per_rank).any():
        refuse("num_tokens_per_rank", num_tokens_per_rank.tolist(), f"{counted.tolist()}, as is_token_in_rank says")


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
        outside_rings(memory, inputs)
        of_handle = {f"handle.{name}": runtime.view(array) for name, array in handle.arrays.items()}
        outputs = {name: of_handle.pop(name) for name in [f"handle.{name}" for name in handle.rewritten]}
        validate.apart(outputs, inputs | of_handle)
    return CombineGiven(hidden, num_topk, bias_0.array, bias_1.array)
