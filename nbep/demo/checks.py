"""Compares what the ranks got with `nbep.reference`: routes, copies and sums bit for bit, the layer within rounding.

`check_all` is for a whole layer, `check_step` for a decoding step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nbep import reference
from nbep.demo.decode import BatchResult
from nbep.demo.layer import CONFIG, Model, RankResult, Settings

# The sums of the layer are added up in another order than the reference's; both round to bf16, whose step is 2**-8.
LAYER_TOLERANCE = 2**-7
# DeepEP's own limit for FP8, on its measure of difference.
FP8_LIMIT = 9e-4


@dataclass(frozen=True)
class Check:
    """One comparison over all ranks. error: the largest difference of two values, or nan where that means nothing."""

    name: str
    demand: str
    passed: bool
    error: float
    where: str = ""


def check_all(settings: Settings, model: Model, results: list[RankResult]) -> list[Check]:
    """All comparisons, in the order of the layer."""
    topk_idx = [result.topk_idx for result in results]
    topk_weights = [result.topk_weights for result in results]
    layouts = [reference.get_dispatch_layout(idx, settings.num_experts, settings.num_ranks) for idx in topk_idx]
    # The reference starts from the model, not from what the ranks sent.
    sent = [reference.per_token_cast_to_fp8(x) if settings.fp8 else x for x in model.x]
    dispatched = reference.dispatch(sent, layouts, CONFIG.num_channels, topk_idx=topk_idx, topk_weights=topk_weights)
    combined = reference.combine(
        [result.expert_output for result in results],
        dispatched,
        topk_weights=[result.recv_topk_weights for result in results],
    )
    checks = []
    if settings.fp8:
        checks.append(same("FP8 cast", [result.sent[0] for result in results], [pair[0] for pair in sent]))
        checks.append(same("FP8 scales", [result.sent[1] for result in results], [pair[1] for pair in sent]))
    checks += [
        same(name, [getattr(result.layout, name) for result in results], [getattr(layout, name) for layout in layouts])
        for name in reference.Layout._fields
    ]
    for i, name in enumerate(["recv_x", "recv_x scales"] if settings.fp8 else ["recv_x"]):
        got = [result.recv_x[i] if settings.fp8 else result.recv_x for result in results]
        want = [(item.recv_x, item.recv_x_scales)[i] for item in dispatched]
        checks.append(same(name, got, want))
    checks += [
        same("recv_topk_idx", [r.recv_topk_idx for r in results], [d.recv_topk_idx for d in dispatched]),
        same("recv_topk_weights", [r.recv_topk_weights for r in results], [d.recv_topk_weights for d in dispatched]),
        same(
            "num_recv_tokens_per_expert_list",
            [np.array(r.num_recv_tokens_per_expert_list) for r in results],
            [np.array(d.num_recv_tokens_per_expert_list) for d in dispatched],
        ),
        same("combined_x", [r.combined_x for r in results], [x for x, _ in combined]),
        same("combined_topk_weights", [r.combined_topk_weights for r in results], topk_weights),
    ]
    combined_x = [result.combined_x for result in results]
    return checks + check_layer(settings, model, model.x, topk_idx, topk_weights, combined_x)


def check_layer(
    settings: Settings,
    model: Model,
    x: list[np.ndarray],
    topk_idx: list[np.ndarray],
    topk_weights: list[np.ndarray],
    combined_x: list[np.ndarray],
    suffix: str = "",
) -> list[Check]:
    """The sums beside the same layer without ranks: of what FP8 has left of the inputs, then of the inputs."""

    def layers(inputs: list[np.ndarray]) -> list[np.ndarray]:
        tokens = zip(inputs, topk_idx, topk_weights, strict=True)
        return [reference.moe_layer(*of_rank, model.expert_weight, settings.num_ranks) for of_rank in tokens]

    if not settings.fp8:
        return [close("MoE layer" + suffix, combined_x, layers(x))]
    rounded = [reference.per_token_cast_back(*reference.per_token_cast_to_fp8(item)) for item in x]
    return [
        close("MoE layer" + suffix, combined_x, layers(rounded)),
        similar("MoE layer without FP8" + suffix, combined_x, layers(x)),
    ]


def check_step(settings: Settings, model: Model, results: list[list[BatchResult]], deduplicate: bool) -> list[Check]:
    """All comparisons, batch by batch. results[rank][batch]"""
    checks = []
    for number, batch in enumerate(zip(*results, strict=True)):
        checks += _check_batch(f", batch {'ab'[number]}", settings, model, list(batch), deduplicate)
    return checks


def _check_batch(
    suffix: str, settings: Settings, model: Model, results: list[BatchResult], deduplicate: bool
) -> list[Check]:
    x = [result.x for result in results]
    topk_idx = [result.topk_idx for result in results]
    topk_weights = [result.topk_weights for result in results]
    num_max_tokens = results[0].handle.num_max_dispatch_tokens_per_rank
    expected = reference.low_latency_dispatch(x, topk_idx, num_max_tokens, settings.num_experts, use_fp8=settings.fp8)
    got = [_in_order(result, settings.fp8) for result in results]
    names = ["recv_count", "layout_range", "src_info", "recv_x"] + (["recv_x_scales"] if settings.fp8 else [])
    checks = [
        same(name + suffix, [_rows_of(d, name) for d in got], [_rows_of(d, name) for d in expected]) for name in names
    ]
    # The sums start from the rows as they came, in whatever order.
    dispatched = [_dispatched(result, settings.fp8) for result in results]
    outputs = [result.expert_output for result in results]
    combined = reference.low_latency_combine(outputs, topk_idx, topk_weights, dispatched, deduplicate=deduplicate)
    combined_x = [result.combined_x for result in results]
    checks.append(same("combined_x" + suffix, combined_x, combined))
    return checks + check_layer(settings, model, x, topk_idx, topk_weights, combined_x, suffix)


def _dispatched(result: BatchResult, fp8: bool) -> reference.LowLatencyDispatched:
    values, scales = result.recv_x if fp8 else (result.recv_x, None)
    handle = result.handle
    return reference.LowLatencyDispatched(values, scales, result.recv_count, handle.src_info, handle.layout_range)


def _in_order(result: BatchResult, fp8: bool) -> reference.LowLatencyDispatched:
    """What one rank received, with the rows of each source in the order of its tokens."""
    return _dispatched(result, fp8).in_order()


def _rows_of(dispatched: reference.LowLatencyDispatched, name: str) -> np.ndarray:
    """An array of what was received; of those with rows only the rows that mean something, one after the other."""
    array = getattr(dispatched, name)
    if name in ("recv_count", "layout_range"):
        return array
    return np.concatenate([rows[:count] for rows, count in zip(array, dispatched.recv_count, strict=True)])


def same(name: str, got: list, want: list) -> Check:
    """Bit for bit, on every rank."""
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape:
            return Check(name, "bitwise", False, float("nan"), f"rank {rank}: shape {a.shape}, expected {b.shape}")
    error = max(_largest_difference(a, b) for a, b in zip(got, want, strict=True))
    for rank, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.tobytes() != b.tobytes():
            wrong = [i for i in range(len(b)) if a[i].tobytes() != b[i].tobytes()]
            return Check(name, "bitwise", False, error, f"rank {rank}: {len(wrong)} of {len(b)} rows, first {wrong[0]}")
    return Check(name, "bitwise", True, error)


def close(name: str, got: list[np.ndarray], want: list[np.ndarray]) -> Check:
    """Within rounding of the largest value."""
    scale = max([float(np.abs(b.astype(np.float32)).max()) for b in want if b.size], default=0.0)
    limit = LAYER_TOLERANCE * scale
    errors = [_largest_difference(a, b) for a, b in zip(got, want, strict=True)]
    worst = int(np.argmax(np.nan_to_num(errors, nan=np.inf)))
    passed = errors[worst] <= limit
    return Check(name, f"error <= {limit:.2g}", passed, errors[worst], "" if passed else f"rank {worst}")


def similar(name: str, got: list[np.ndarray], want: list[np.ndarray]) -> Check:
    """By DeepEP's measure."""
    difference = reference.calc_diff(*(np.concatenate([one.ravel() for one in arrays]) for arrays in (got, want)))
    return Check(name, f"calc_diff <= {FP8_LIMIT:g}", difference <= FP8_LIMIT, difference)


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    if not a.size:
        return 0.0
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
