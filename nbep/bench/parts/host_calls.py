"""What `nbep bench host` measures: the calls of all verbs, as programs make them, on one buffer of any front."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Verbs = dict[str, Callable[[], Any]]
PAIR = "low-latency pair"


class Sizes(NamedTuple):
    """Of a rank's calls. low_latency_tokens: of the low-latency mode, and tokens of the normal one"""

    low_latency_tokens: int
    tokens: int
    hidden: int
    topk: int
    low_latency_experts: int
    experts: int


FOR_GPUS = Sizes(128, 4096, 7168, 8, 288, 256)
FOR_THE_CPU = Sizes(4, 16, 512, 8, 16, 16)  # the memory of larger outputs costs a CPU more than a call does
NVL_BYTES = 1 << 30


def inputs(torch: Any, sizes: Sizes, num_tokens: int, num_experts: int, device: str) -> tuple[Any, Any, Any]:
    """x, topk_idx and topk_weights."""
    x = torch.zeros((num_tokens, sizes.hidden), dtype=torch.bfloat16, device=device)
    first = 7 * torch.arange(num_tokens, dtype=torch.int64, device=device)
    step = torch.arange(sizes.topk, dtype=torch.int64, device=device) * (num_experts // sizes.topk)
    weights = torch.ones((num_tokens, sizes.topk), dtype=torch.float32, device=device)
    return x, (first[:, None] + step[None]) % num_experts, weights


def low_latency_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those of the low-latency mode, which all fronts have."""
    num_tokens, num_experts = sizes.low_latency_tokens, sizes.low_latency_experts
    x, topk_idx, weights = inputs(torch, sizes, num_tokens, num_experts, device)
    shape = num_experts // buffer.group_size, buffer.group_size * num_tokens, sizes.hidden
    rows = torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def dispatch(**options: Any) -> Any:
        return buffer.low_latency_dispatch(x, topk_idx, num_tokens, num_experts, use_fp8=True, **options)

    def pair() -> Any:
        handle = dispatch()[2]
        return buffer.low_latency_combine(rows, topk_idx, weights, handle)

    def with_hook() -> Any:
        received = dispatch(return_recv_hook=True)
        received[-1]()
        return received

    held = dispatch()[2]

    def combine() -> Any:
        return buffer.low_latency_combine(rows, topk_idx, weights, held)

    return {
        PAIR: pair,
        "low-latency dispatch": dispatch,
        "low-latency dispatch and hook": with_hook,
        "low-latency combine": combine,
    }


def normal_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str, between_nodes: bool = False) -> Verbs:
    """Those of the normal mode, which all fronts have."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    most = sizes.tokens * buffer.group_size

    def layout() -> Any:
        return buffer.get_dispatch_layout(topk_idx, sizes.experts)

    per_rank, per_node, per_expert, in_rank, _ = layout()
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    if between_nodes:
        counts["num_tokens_per_rdma_rank"] = per_node
    choices = {"topk_idx": topk_idx, "topk_weights": weights}

    def dispatch() -> Any:
        return buffer.dispatch(x, **counts, **choices, num_worst_tokens=most)

    # Where no counts come because nothing is launched, none must be waited for.
    most_of_first = 0 if device == "cuda" else most
    received, _, received_weights, _, handle, _ = buffer.dispatch(
        x, **counts, **choices, num_worst_tokens=most_of_first
    )

    def cached_dispatch() -> Any:
        return buffer.dispatch(x, handle=handle)

    def combine() -> Any:
        return buffer.combine(received, handle, topk_weights=received_weights)

    names = "layout", "dispatch, num_worst_tokens", "cached dispatch", "combine"
    where = " between nodes" if between_nodes else ""
    return {name + where: call for name, call in zip(names, (layout, dispatch, cached_dispatch, combine), strict=True)}


def events_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """A cached dispatch and a combine behind an event, as programs make them that overlap."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, sizes.experts)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    received, _, _, _, handle, _ = buffer.dispatch(x, **counts, topk_idx=topk_idx, topk_weights=weights)

    def options() -> dict[str, Any]:
        return {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}

    def dispatch() -> Any:
        made = buffer.dispatch(x, handle=handle, **options())
        made[-1].current_stream_wait()
        return made

    def combine() -> Any:
        made = buffer.combine(received, handle, **options())
        made[-1].current_stream_wait()
        return made

    return {"cached dispatch behind an event": dispatch, "combine behind an event": combine}


def zero_copy_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those without rings, which DeepEP has not."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, sizes.experts)
    counts = {"num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank, "num_tokens_per_expert": per_expert}
    most = sizes.tokens * buffer.group_size
    received, _, _, _, handle, _ = buffer.dispatch(
        x, **counts, topk_idx=topk_idx, topk_weights=weights, num_worst_tokens=most, zero_copy=True
    )
    return {
        "cached dispatch, zero copy": lambda: buffer.dispatch(x, handle=handle, zero_copy=True),
        "combine, zero copy": lambda: buffer.combine(received, handle, zero_copy=True),
    }


def elastic_verbs(elastic: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those of an ElasticBuffer: a decoding step's, and along the routes of a handle."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.low_latency_tokens, sizes.experts, device)

    def dispatch() -> Any:
        return elastic.dispatch(x, topk_idx, weights, num_experts=sizes.experts, do_cpu_sync=False)

    received, _, received_weights, handle, _ = dispatch()
    return {
        "elastic dispatch, no CPU sync": dispatch,
        "elastic dispatch, cached": lambda: elastic.dispatch(x, handle=handle),
        "elastic combine": lambda: elastic.combine(received, handle, topk_weights=received_weights),
    }
