"""nbep's own scenarios, by the names that users type; and the steps of its kernels that their names alone tell."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import nbep
from nbep.lab.check.faults import ENDLESS, FALSE, NOTHING, TRUE, UNORDERED
from nbep.lab.check.scenario import Scenario
from nbep.specimens.scenarios import elastic, internode, intranode, low_latency, network
from nbep.specimens.workloads.cases import Case, make_case, make_low_latency_case, routes_of

# The last rank calls something else than the others: the kernels find it, and each rank reports what both have passed.
# Where the ranks live in one process, their calls are compared before they are launched: that is left out, so it is as
# in processes of their own.

# cached: the call that differs is one with a handle. dedup: as the argument deduplicate. 1 or 0 too:
# nic, everything between nodes, or between ranks of the low-latency mode, goes through the software NIC.
PARAMETERS = {"ranks": 2, "cached": 0, "inputs": 0}
OF_NODES = {"ranks": 4, "cached": 0, "nic": 0, "inputs": 0}
OF_LOW_LATENCY = {"ranks": 2, "dedup": 0, "nic": 0, "inputs": 0}
CONFIG, OTHER_CONFIG = nbep.Config(2, 2, 4, 2, 4), nbep.Config(2, 2, 5, 2, 4)
SLOTS = ("config.num_max_nvl_chunked_recv_tokens", "4", "5", "dispatch")
MOST, OTHER_MOST = 3, 5
TOKENS = ("num_max_dispatch_tokens_per_rank", str(MOST), str(OTHER_MOST), "low_latency_dispatch")
NUM_BYTES = 1 << 18  # enough for both


def make_buffer(comm: Any, nic: int, **sizes: Any) -> nbep.Buffer:
    network: dict[str, Any] = {"transport": "ibgda", "nic": nbep.NicOptions(seed=1)} if nic else {}
    buffer = nbep.Buffer(comm, **sizes, **network)
    buffer._memory._call_log = None  # type: ignore[union-attr]
    return buffer


def error_of(buffer: nbep.Buffer, call: Callable[[], object]) -> str:
    """The error that a rank gets, from the call or when its kernels have ended."""
    memory: Any = buffer._memory
    try:
        call()
        if memory.low_latency is not None:
            memory.low_latency.synchronize()
        memory.wait()
    except (ValueError, nbep.PeerTimeout) as error:
        return str(error)
    return ""


def dispatch(buffer: nbep.Buffer, case: Case, config: nbep.Config) -> Any:
    rank = buffer.rank
    layout = routes_of(buffer.get_dispatch_layout(case.topk_idx[rank], case.num_experts))
    choices: dict[str, Any] = {"topk_idx": case.topk_idx[rank], "topk_weights": case.topk_weights[rank]}
    return buffer.dispatch(case.x[rank], **choices, **layout, config=config)[4]


def main(comm: Any, num_nodes: int, **parameters: int) -> str:
    """One dispatch that is the same on all ranks, and one that is not."""
    num_nvl_peers = comm.size // num_nodes
    case = make_case(parameters["inputs"], num_ranks=comm.size, num_tokens=3, num_nodes=num_nodes)
    sizes = {"num_nvl_bytes": NUM_BYTES, "num_rdma_bytes": NUM_BYTES if num_nodes > 1 else 0}
    buffer = make_buffer(comm, parameters.get("nic", 0), num_nvl_peers=num_nvl_peers, **sizes)
    handle = dispatch(buffer, case, CONFIG)
    config = OTHER_CONFIG if comm.rank == comm.size - 1 else CONFIG
    if parameters["cached"]:
        return error_of(buffer, lambda: buffer.dispatch(case.x[comm.rank], handle=handle, config=config))
    return error_of(buffer, lambda: dispatch(buffer, case, config))


def main_low_latency(comm: Any, **parameters: int) -> str:
    """Two dispatches that are the same on all ranks, and one that is not."""
    case = make_low_latency_case(parameters["inputs"], num_ranks=comm.size, num_tokens=MOST)
    more = {"num_nvl_peers": 1} if parameters["nic"] else {}
    buffer = make_buffer(
        comm, parameters["nic"], num_rdma_bytes=NUM_BYTES, low_latency_mode=True, num_qps_per_rank=2, **more
    )
    x, topk_idx = case.x[comm.rank], case.topk_idx[comm.rank]
    once = {"deduplicate": True, "topk_weights": case.topk_weights[comm.rank]} if parameters["dedup"] else {}
    for most in (MOST, MOST):
        buffer.low_latency_dispatch(x, topk_idx, most, case.num_experts, **once)
    most = OTHER_MOST if comm.rank == comm.size - 1 else MOST
    return error_of(buffer, lambda: buffer.low_latency_dispatch(x, topk_idx, most, case.num_experts, **once))


def check(results: list[str], named: tuple[str, str, str, str], **_: int) -> None:
    """Each rank's error names its own value and the last rank's; the last rank's names any other's."""
    name, value, other, verb = named
    last = len(results) - 1
    for rank, text in enumerate(results):
        own, theirs, who = (value, other, str(last)) if rank < last else (other, value, rf"[^{last}]")
        pattern = rf"{name}: got {own} on rank {rank}, {theirs} on rank {who} in the same {verb}"
        assert re.match(pattern, text), f"rank {rank} reports {text!r}; expected {pattern!r}"


def make(mode: str, fn: Any, named: tuple, parameters: dict[str, int], variants: tuple, *kernels: str) -> Scenario:
    return Scenario(
        f"{mode}.differ",
        "the last rank calls something else, which only the kernels see: what each rank reports",
        fn,
        partial(check, named=named),
        parameters,
        {name: value if name == "ranks" else 0 for name, value in parameters.items()},
        kernels,
        variants,
        lets_time_pass=True,
    )


INTRANODE = make(
    "intranode",
    partial(main, num_nodes=1),
    SLOTS,
    PARAMETERS,
    ({}, {"cached": 1}, {"ranks": 4}),
    "intranode.notify_dispatch",
    "intranode.cached_notify",
)
INTERNODE = make(
    "internode",
    partial(main, num_nodes=2),
    SLOTS,
    OF_NODES,
    ({}, {"cached": 1}, {"nic": 1}),
    "internode.notify_dispatch",
    "internode.cached_notify",
)
LOW_LATENCY = make(
    "low_latency",
    main_low_latency,
    TOKENS,
    OF_LOW_LATENCY,
    ({}, {"dedup": 1}, {"nic": 1}),
    "low_latency.dispatch",
)


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenarios in (
        (*intranode.SCENARIOS, INTRANODE),
        elastic.SCENARIOS,
        (*low_latency.SCENARIOS, LOW_LATENCY),
        (*internode.SCENARIOS, INTERNODE),
        network.SCENARIOS,
    )
    for scenario in scenarios
}

# Steps that say by their name alone what they are: their kind, and what `nbep check` puts there.
STEPS = {
    "barrier_network": ("barrier", NOTHING),
    "meet_block": ("barrier", TRUE),
    "meet_ranks": ("barrier", TRUE),
    **dict.fromkeys(("add_to_arrival", "add_to_count"), ("network", UNORDERED)),
    "wait_credit": ("head", TRUE),
    "wait_total_free": ("head", ENDLESS),
    # Whether all went well, or whether a peer has come with another call.
    **dict.fromkeys(("wait_arrived", "wait_node", "wait_peer"), ("wait", FALSE)),
}
