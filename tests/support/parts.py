"""The tests come in two parts: a short one, for the README's set-up line, and a thorough one, `pytest -m thorough`.

A test that has more to try than the short part has time for takes its seeds or shapes from a parameter of `both_parts`;
its body does not know which part it is in.
"""

from collections.abc import Sequence
from typing import Any

import pytest


def both_parts(short: Sequence[Any], thorough: Sequence[Any]) -> list:
    """Values for `pytest.mark.parametrize` or a fixture's params: some for each part. Several of a test are a tuple."""
    marked = [(value, ()) for value in short] + [(value, pytest.mark.thorough) for value in thorough]
    params = []
    for value, marks in marked:
        values = value if isinstance(value, tuple) else (value,)
        params.append(pytest.param(*values, marks=marks, id="-".join(map(text, values))))
    return params


def text(value: Any) -> str:
    """How a value is named in a test's id: seeds by the first and the last."""
    return f"{value.start}..{value.stop - 1}" if isinstance(value, range) else str(value)
