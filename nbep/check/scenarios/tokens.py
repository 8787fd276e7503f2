"""Dispatch and combine through `nbep.Buffer`, with everything that comes out: inside a node and between nodes.

Names of results: what `Buffer` calls them, with the number of the round in front.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import nbep
from nbep import reference
from nbep.workloads.cases import Case

# What the experts of each rank multiply by. 1, -2, tiny, 1 cancel: another order, or rounding in between, shows.
FACTORS = np.array([1, -2, 1.5 * 2**-18, 1, 0.5, -4, 1.25 * 2**-17, 4], np.float32)


class Plan(NamedTuple):
    """What a run calls, and how.

    last: the verb that ends a round: "layout", "dispatch" or "combine"
    is_cached: dispatch is called again with its handle
    is_direct: without rings
    """

    last: str
    is_cached: bool
    is_fp8: bool
    config: nbep.Config
    is_direct: bool = False


def counts_of(tokens: int, num_ranks: int, uneven: bool) -> list[int]:
    """The tokens of each rank; uneven: one has none, others a few."""
    return [(tokens, 0, tokens // 2 + 1, tokens // 3)[rank % 4] if uneven else tokens for rank in range(num_ranks)]


def sent_by(case: Case, plan: Plan, rank: int) -> Any:
    """x of a rank as dispatch takes it. Without rings scales go two ways: those of odd ranks are column-major."""
    if not plan.is_fp8:
        return case.x[rank]
    x, scales = reference.per_token_cast_to_fp8(case.x[rank])
    return x, np.asfortranarray(scales) if plan.is_direct and rank % 2 == 1 else scales


def apply_experts(recv_x: Any, rank: int) -> np.ndarray:
    """What the experts of a rank make of its tokens: something that differs from rank to rank."""
    values = reference.per_token_cast_back(*recv_x) if isinstance(recv_x, tuple) else recv_x
    columns = FACTORS[(rank + np.arange(values.shape[1]) % 3) % len(FACTORS)]
    return (values.astype(np.float32) * columns).astype(reference.BF16)


def call_round(buffer: nbep.Buffer, case: Case, plan: Plan) -> dict[str, Any]:
    """One round on one rank."""
    rank = buffer.rank
    per_rank, per_node, per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
        case.topk_idx[rank], case.num_experts
    )
    got = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": is_token_in_rank,
    }
    if plan.last == "layout":
        return got
    x = sent_by(case, plan, rank)
    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, _ = buffer.dispatch(
        x,
        topk_idx=case.topk_idx[rank],
        topk_weights=case.topk_weights[rank],
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=per_expert,
        config=plan.config,
        zero_copy=plan.is_direct,
    )
    # Without rings it is a kernel that first reads what peers have written into this rank's memory.
    values = nbep.per_token_cast_back(*recv_x) if plan.is_direct and plan.is_fp8 else recv_x
    got |= {
        **received("", recv_x),
        "recv_topk_idx": np.array(recv_topk_idx),
        "recv_topk_weights": np.array(recv_topk_weights),
        "num_recv_tokens_per_expert_list": np.array(counts),
    }
    if plan.is_cached:
        got |= received("cached ", buffer.dispatch(x, handle=handle, config=plan.config, zero_copy=plan.is_direct)[0])
    if plan.last == "combine":
        assert handle is not None
        got["combined_x"], got["combined_topk_weights"], _ = buffer.combine(
            apply_experts(values, rank),
            handle,
            topk_weights=recv_topk_weights,
            config=plan.config,
            zero_copy=plan.is_direct,
        )
    return got


def received(name: str, recv_x: Any) -> dict[str, np.ndarray]:
    """A copy of recv_x with a name, and of its scales: without rings they are the caller's for a while only."""
    values, scales = recv_x if isinstance(recv_x, tuple) else (recv_x, None)
    arrays = {f"{name}recv_x": values, **({} if scales is None else {f"{name}recv_x_scales": scales})}
    return {key: np.array(array) for key, array in arrays.items()}


def expected_round(case: Case, plan: Plan) -> list[dict[str, Any]]:
    """The same of all ranks, from the reference."""
    ranks = range(case.num_ranks)
    wanted: list[dict[str, Any]] = [dict(layout._asdict()) for layout in case.layouts]
    if plan.last == "layout":
        return wanted
    arguments = [sent_by(case, plan, rank) for rank in ranks], case.layouts, plan.config.num_channels
    choices: dict[str, Any] = {"topk_idx": case.topk_idx, "topk_weights": case.topk_weights}
    is_internode = case.num_nodes > 1
    nodes = (case.num_nvl_peers,) if is_internode else ()
    dispatch: Any = reference.internode_dispatch if is_internode else reference.dispatch
    combine: Any = reference.internode_combine if is_internode else reference.combine
    dispatched = dispatch(*arguments, *nodes, **choices)
    outputs = []
    for rank, (want, there) in enumerate(zip(wanted, dispatched, strict=True)):
        recv_x = there.recv_x if there.recv_x_scales is None else (there.recv_x, there.recv_x_scales)
        outputs.append(apply_experts(recv_x, rank))
        want |= {
            **received("", recv_x),
            "recv_topk_idx": there.recv_topk_idx,
            "recv_topk_weights": there.recv_topk_weights,
            "num_recv_tokens_per_expert_list": np.array(there.num_recv_tokens_per_expert_list),
            **(received("cached ", recv_x) if plan.is_cached else {}),
        }
    if plan.last == "combine":
        weights = [there.recv_topk_weights for there in dispatched]
        combined = combine(outputs, dispatched, *nodes, topk_weights=weights)
        for want, (x, sums) in zip(wanted, combined, strict=True):
            want |= {"combined_x": x, "combined_topk_weights": sums}
    return wanted
