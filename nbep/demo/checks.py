"""Compares what the ranks got with `nbep.reference`: routes, copies and sums bit for bit, the layer within rounding.

What is compared bit for bit, `nbep.workloads` says: `check_all` is for a whole layer, `check_step` for a decoding step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from nbep import reference
from nbep.demo.decode import Batch
from nbep.demo.layer import AfterExperts, Model, Result, Settings, options_of
from nbep.workloads.cases import Case, Report
from nbep.workloads.intranode import Expected, dispatch_input
from nbep.workloads.low_latency import check_combined, check_dispatched, expected_dispatch

CASTS = "FP8 cast", "FP8 scales"
# A decoding step multiplies all rows of an expert at once, which adds up in another order than the reference does.
# Both round to bf16, whose step is 2**-8.
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


class Checks(Report):
    """Notes comparisons by name in place of raising, all ranks together. suffix: of the names"""

    def __init__(self, suffix: str = ""):
        super().__init__("")
        self.suffix = suffix
        self.found: dict[str, Check] = {}

    def same(self, name: str, got: np.ndarray, want: np.ndarray, rows: list[str] | None = None) -> None:
        """Bit for bit, on one rank, which `where` names."""
        error, where = float("nan"), ""
        if got.shape != want.shape:
            where = f"{self.where}: shape {got.shape}, expected {want.shape}"
        else:
            error = _largest_difference(got, want)
            if got.tobytes() != want.tobytes():
                wrong = [i for i in range(len(want)) if got[i].tobytes() != want[i].tobytes()]
                where = f"{self.where}: {len(wrong)} of {len(want)} rows, first {wrong[0]}"
        name = re.sub(r" of r\d+e\d+$", "", name)  # all experts together
        before = self.found.get(name + self.suffix)
        if before is not None:
            error, where = max(before.error, error), before.where or where
        self.note(name, "bitwise", not where, error, where)

    def note(self, name: str, demand: str, passed: bool, error: float, where: str = "") -> None:
        self.found[name + self.suffix] = Check(name + self.suffix, demand, passed, error, where)

    def same_layer(self, settings: Settings, model: Model, case: Case, combined_x: list[np.ndarray]) -> None:
        """The sums beside the same layer without ranks: of what FP8 has left of the inputs, then of the inputs."""

        def layers(inputs: list[np.ndarray]) -> list[np.ndarray]:
            tokens = zip(inputs, case.topk_idx, case.topk_weights, strict=True)
            return [reference.moe_layer(*of_rank, model.expert_weight, settings.num_ranks) for of_rank in tokens]

        if not settings.fp8:
            self.close("MoE layer", combined_x, layers(case.x))
            return
        casts = [reference.per_token_cast_to_fp8(x) for x in case.x]
        self.close("MoE layer", combined_x, layers([reference.per_token_cast_back(*pair) for pair in casts]))
        difference = reference.calc_diff(*(np.concatenate(arrays).ravel() for arrays in (combined_x, layers(case.x))))
        self.note("MoE layer without FP8", f"calc_diff <= {FP8_LIMIT:g}", difference <= FP8_LIMIT, difference)

    def close(self, name: str, got: list[np.ndarray], want: list[np.ndarray]) -> None:
        """Within rounding of the largest value, on every rank."""
        limit = LAYER_TOLERANCE * max([float(np.abs(b.astype(np.float32)).max()) for b in want if b.size], default=0.0)
        errors = [_largest_difference(a, b) for a, b in zip(got, want, strict=True)]
        worst = int(np.argmax(np.nan_to_num(errors, nan=np.inf)))
        passed = errors[worst] <= limit
        self.note(name, f"error <= {limit:.2g}", passed, errors[worst], "" if passed else f"rank {worst}")


def check_all(settings: Settings, model: Model, results: list[Result]) -> list[Check]:
    """All comparisons, in the order of the layer."""
    checks, case, options = Checks(), model.case, options_of(settings)
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in fields(options)}
    expected = Expected(case, AfterExperts(**given, outputs=tuple(result.expert_output for result in results)))
    for rank, result in enumerate(results):
        checks.where = f"rank {rank}"
        if settings.fp8:
            # The reference starts from the model, not from what the ranks sent.
            for name, got, want in zip(CASTS, result.sent, dispatch_input(case, options, rank), strict=True):
                checks.same(name, got, want)
        expected.compare(rank, result.outcome, checks)
    checks.same_layer(settings, model, case, [result.outcome.combined_x for result in results])
    return list(checks.found.values())


def check_step(settings: Settings, model: Model, results: list[list[Batch]]) -> list[Check]:
    """All comparisons, batch by batch. results[rank][batch]"""
    found: list[Check] = []
    for name, batches in zip("ab", zip(*results, strict=True), strict=True):
        checks, case, options = Checks(f", batch {name}"), batches[0].case, batches[0].options
        dispatched = expected_dispatch(case, options)
        # The sums start from the rows as they came, in whatever order.
        combined = reference.low_latency_combine(
            [batch.output for batch in batches],
            case.topk_idx,
            case.topk_weights,
            [batch.outcome.dispatched for batch in batches],
            deduplicate=options.deduplicate,
        )
        for rank, batch in enumerate(batches):
            checks.where = f"rank {rank}"
            check_dispatched(checks, case, options, rank, dispatched[rank], batch.outcome)
            check_combined(checks, case, options, rank, combined[rank], batch.outcome)
        checks.same_layer(settings, model, case, [batch.outcome.combined_x for batch in batches])
        found += checks.found.values()
    return found


def _largest_difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max()) if a.size else 0.0
