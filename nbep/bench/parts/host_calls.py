"""What `nbep bench host` measures: the calls of all verbs, as programs make them, on one buffer of any front."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from nbep.workloads.cases import routes_of

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


def routed(buffer: Any, topk_idx: Any, weights: Any, num_experts: int) -> dict[str, Any]:
    """What a dispatch takes besides x."""
    routes = routes_of(buffer.get_dispatch_layout(topk_idx, num_experts)[:4])
    given = {name: array for name, array in routes.items() if array is not None}
    return {**given, "topk_idx": topk_idx, "topk_weights": weights}


def low_latency_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those of the low-latency mode, which all fronts have."""
    num_tokens, num_experts = sizes.low_latency_tokens, sizes.low_latency_experts
    x, topk_idx, weights = inputs(torch, sizes, num_tokens, num_experts, device)
    shape = num_experts // buffer.group_size, buffer.group_size * num_tokens, sizes.hidden
    rows = torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def dispatch(**options: Any) -> Any:
        return buffer.low_latency_dispatch(x, topk_idx, num_tokens, num_experts, use_fp8=True, **options)

    def combine(handle: Any) -> Any:
        return buffer.low_latency_combine(rows, topk_idx, weights, handle)

    def with_hook() -> Any:
        received = dispatch(return_recv_hook=True)
        received[-1]()
        return received

    held = dispatch()[2]
    return {
        PAIR: lambda: combine(dispatch()[2]),
        "low-latency dispatch": dispatch,
        "low-latency dispatch and hook": with_hook,
        "low-latency combine": lambda: combine(held),
    }


def normal_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str, between_nodes: bool = False) -> Verbs:
    """Those of the normal mode, which all fronts have."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    routes, most = routed(buffer, topk_idx, weights, sizes.experts), sizes.tokens * buffer.group_size
    # Where no counts come because nothing is launched, none must be waited for.
    most_of_first = 0 if device == "cuda" else most
    received, _, received_weights, _, handle, _ = buffer.dispatch(x, **routes, num_worst_tokens=most_of_first)
    where = " between nodes" if between_nodes else ""
    return {
        f"layout{where}": lambda: buffer.get_dispatch_layout(topk_idx, sizes.experts),
        f"dispatch, num_worst_tokens{where}": lambda: buffer.dispatch(x, **routes, num_worst_tokens=most),
        f"cached dispatch{where}": lambda: buffer.dispatch(x, handle=handle),
        f"combine{where}": lambda: buffer.combine(received, handle, topk_weights=received_weights),
    }


def events_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """A cached dispatch and a combine behind an event, as programs make them that overlap."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    received, _, _, _, handle, _ = buffer.dispatch(x, **routed(buffer, topk_idx, weights, sizes.experts))

    def behind_an_event(verb: Callable[..., Any], *args: Any, **options: Any) -> Any:
        options |= {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}
        made = verb(*args, **options)
        made[-1].current_stream_wait()
        return made

    return {
        "cached dispatch behind an event": lambda: behind_an_event(buffer.dispatch, x, handle=handle),
        "combine behind an event": lambda: behind_an_event(buffer.combine, received, handle),
    }


def zero_copy_verbs(buffer: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those without rings, which DeepEP has not."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.tokens, sizes.experts, device)
    routes, most = routed(buffer, topk_idx, weights, sizes.experts), sizes.tokens * buffer.group_size
    received, _, _, _, handle, _ = buffer.dispatch(x, **routes, num_worst_tokens=most, zero_copy=True)
    return {
        "cached dispatch, zero copy": lambda: buffer.dispatch(x, handle=handle, zero_copy=True),
        "combine, zero copy": lambda: buffer.combine(received, handle, zero_copy=True),
    }


def elastic_verbs(elastic: Any, torch: Any, sizes: Sizes, device: str) -> Verbs:
    """Those of an ElasticBuffer: a decoding step's, and along the routes of a handle."""
    x, topk_idx, weights = inputs(torch, sizes, sizes.low_latency_tokens, sizes.experts, device)

    dispatch = partial(elastic.dispatch, x, topk_idx, weights, num_experts=sizes.experts, do_cpu_sync=False)
    received, _, received_weights, handle, _ = dispatch()
    return {
        "elastic dispatch, no CPU sync": dispatch,
        "elastic dispatch, cached": lambda: elastic.dispatch(x, handle=handle),
        "elastic combine": lambda: elastic.combine(received, handle, topk_weights=received_weights),
    }


def all_verbs(
    fronts: dict[str, str],
    torch: Any,
    sizes: Sizes,
    device: str,
    num_ranks: int,
    create: Callable[..., Any],
    create_elastic: Callable[[Any], Any],
) -> dict[str, Verbs]:
    """The calls of each front, by its name.

    Args: fronts: the module of each. One that is not nbep's is like DeepEP: without zero_copy, virtual nodes and such
          create(class, num_rdma_bytes, **options) makes a Buffer, create_elastic(class) an ElasticBuffer
    """
    verbs = {}
    for front, name in fronts.items():
        module, num_experts = import_module(name), sizes.low_latency_experts
        cls = module.Buffer
        hint = cls.get_low_latency_rdma_size_hint(sizes.low_latency_tokens, sizes.hidden, num_ranks, num_experts)
        more = {"low_latency_mode": True, "num_qps_per_rank": num_experts // num_ranks}
        given = torch, sizes, device
        is_nbeps = name.startswith("nbep")
        if is_nbeps:
            more["num_zero_copy_bytes"] = cls.get_zero_copy_size_hint(sizes.tokens, sizes.hidden, num_ranks, sizes.topk)
        buffer = create(cls, hint, **more)
        verbs[front] = low_latency_verbs(buffer, *given) | normal_verbs(buffer, *given)
        if device == "cuda":
            verbs[front] |= events_verbs(buffer, *given)
        if is_nbeps:
            nodes = create(cls, NVL_BYTES, low_latency_mode=False, num_nvl_peers=1)  # each rank is a node
            verbs[front] |= zero_copy_verbs(buffer, *given) | normal_verbs(nodes, *given, between_nodes=True)
            verbs[f"{name}.ElasticBuffer"] = elastic_verbs(create_elastic(module.ElasticBuffer), *given)
    return verbs
