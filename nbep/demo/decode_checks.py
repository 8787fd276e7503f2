"""Compares what the ranks got in a decoding step with `nbep.reference`."""

from __future__ import annotations

import numpy as np

from nbep import reference
from nbep.demo.checks import Check, close, same, similar
from nbep.demo.decode import BatchResult
from nbep.demo.layer import Model, Settings

FIRST_LETTER = ord("a")


def check_step(settings: Settings, model: Model, results: list[list[BatchResult]], deduplicate: bool) -> list[Check]:
    """All comparisons, batch by batch. results[rank][batch]"""
    checks = []
    for number, batch in enumerate(zip(*results, strict=True)):
        checks += _check_batch(f", batch {chr(FIRST_LETTER + number)}", settings, model, list(batch), deduplicate)
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
    inputs = x
    if settings.fp8:
        inputs = [reference.per_token_cast_back(*reference.per_token_cast_to_fp8(item)) for item in x]
    layers = [
        reference.moe_layer(item, idx, weights, model.expert_weight, settings.num_ranks)
        for item, idx, weights in zip(inputs, topk_idx, topk_weights, strict=True)
    ]
    checks.append(close("MoE layer" + suffix, combined_x, layers))
    if settings.fp8:
        exact = [
            reference.moe_layer(item, idx, weights, model.expert_weight, settings.num_ranks)
            for item, idx, weights in zip(x, topk_idx, topk_weights, strict=True)
        ]
        checks.append(similar("MoE layer without FP8" + suffix, combined_x, exact))
    return checks


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
