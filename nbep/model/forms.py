"""Counts as exact linear forms of features, found from runs and proved by them.

A form is found from some runs and must give the count of every run exactly, also of those that it was not found from.
Its coefficients are whole numbers or fractions with small denominators; what cannot be written so is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from nbep.model.features import Features

LARGEST_DENOMINATOR = 64

Form = dict[str, Fraction]  # feature -> how much of it


class Sample(NamedTuple):
    """One run: what it was made of, and one of its counts."""

    features: Features
    number: int


class NotLinear(ValueError):
    """A count is no linear form of these features, or the runs do not tell which."""


def find_form(names: Sequence[str], samples: Sequence[Sample]) -> Form:
    """The form of these features that gives the counts of all samples. Of features that are always equal it takes
    the first, and none that are always 0.

    Raises: NotLinear if there is none, or more than one
    """
    matrix = np.array([[sample.features[name] for name in names] for sample in samples], float)
    scale = np.abs(matrix).max(axis=0, initial=0)
    columns = [tuple(column) for column in matrix.T]
    used = [i for i, column in enumerate(columns) if scale[i] > 0 and column not in columns[:i]]
    names, matrix = [names[i] for i in used], matrix[:, used] / scale[used]
    if np.linalg.matrix_rank(matrix) < len(names):
        raise NotLinear(f"{len(samples)} runs do not tell {', '.join(names)} apart")
    solution = np.linalg.lstsq(matrix, np.array([sample.number for sample in samples], float), rcond=None)[0]
    form = {
        name: Fraction(float(value)).limit_denominator(LARGEST_DENOMINATOR)
        for name, value in zip(names, solution / scale[used], strict=True)
    }
    form = {name: value for name, value in form.items() if value}
    for sample in samples:
        if evaluate_exactly(form, sample.features) != sample.number:
            raise NotLinear(
                f"{show(form)} is {evaluate_exactly(form, sample.features)}, but a run has counted {sample.number}"
            )
    return form


def find_bound(names: Sequence[str], samples: Sequence[Sample]) -> Form:
    """The least whole multiple that no count exceeds, of the first of these features that can bound them.

    Raises: NotLinear if with each feature there is a count where it is 0
    """
    for name in names:
        pairs = [(int(sample.features[name]), sample.number) for sample in samples if sample.number]
        if all(feature > 0 for feature, _ in pairs):
            return {name: Fraction(max(-(-number // feature) for feature, number in pairs))}
    raise NotLinear(f"no bound among {', '.join(names)}")


def evaluate_exactly(form: Form, features: Features) -> Fraction:
    """Of whole features."""
    return sum((value * int(features[name]) for name, value in form.items()), Fraction(0))


def evaluate(form: Form, features: Features) -> float:
    """Of features that are means."""
    return sum(float(value) * features[name] for name, value in form.items())


def show(form: Form) -> str:
    """`rows.network + 4 chunks.network`; `0` where nothing is counted."""
    terms = [name if value == 1 else f"{value} {name}" for name, value in form.items()]
    return " + ".join(terms).replace("+ -", "- ") or "0"
