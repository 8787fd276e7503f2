"""What all ranks must pass alike to an elastic dispatch or combine, as words; see nbep.host.calls."""

from __future__ import annotations

from nbep.device.kernels.parts.calls import Call
from nbep.host.arguments import ROW_DTYPES
from nbep.host.calls import ELASTIC_COMBINE, ELASTIC_DISPATCH, SCALES_DTYPES, handle_word, make_call
from nbep.host.elastic.handle import EPHandle
from nbep.host.node import Node
from nbep.host.tokens import Tokens


def dispatch_call(
    memory: Node, tokens: Tokens, num_experts: int, num_max_tokens: int, handle: EPHandle | None, has_weights: bool
) -> Call:
    """What the others read out of this rank's half. Whether and how rows are expanded is each rank's own affair."""
    scales = 0
    if tokens.scales.is_array:
        scales = 2 * tokens.num_scales + SCALES_DTYPES.index(tokens.scales.dtype_name)
    dtype = ROW_DTYPES.index(tokens.x.dtype_name)
    of_handle = 0 if handle is None else handle_word(memory, handle)
    words = ELASTIC_DISPATCH, of_handle, int(has_weights), dtype, tokens.hidden, scales, tokens.num_topk, num_experts
    return make_call(memory.rank, (*words, 0, num_max_tokens, 0, 0, 0))


def combine_call(memory: Node, hidden: int, num_topk: int, handle: EPHandle, one_each: bool, has_weights: bool) -> Call:
    """Where this rank's rows come to lie at the others. one_each: see kernels.elastic.combine"""
    words = ELASTIC_COMBINE, handle_word(memory, handle), int(has_weights), 0, hidden, 0, num_topk, handle.num_experts
    return make_call(memory.rank, (*words, 0, handle.num_max_tokens_per_rank, int(one_each), 0, 0))
