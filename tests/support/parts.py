"""The tests come in two parts: a short one, for the README's set-up line, and a thorough one, `pytest -m thorough`.

A test that has more to try than the short part has time for takes its seeds or shapes from a parameter of `both_parts`;
its body does not know which part it is in.

Some of the thorough part has the mark `long` too: it takes minutes. CI leaves it out: -m 'thorough and not long'. A
module that has that mark is meant with its thorough part alone.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from target import TARGET


def both_parts(short: Sequence[Any], thorough: Sequence[Any], long: Sequence[Any] = ()) -> list:
    """Values for `pytest.mark.parametrize` or a fixture's params: some for each part. Several of a test are a tuple."""
    marked: list[tuple[Any, Any]] = [(value, ()) for value in short]
    marked += [(value, pytest.mark.thorough) for value in thorough]
    marked += [(value, (pytest.mark.thorough, pytest.mark.long)) for value in long]
    params = []
    for value, marks in marked:
        values = value if isinstance(value, tuple) else (value,)
        params.append(pytest.param(*values, marks=marks, id="-".join(map(text, values))))
    return params


def crossed(short: Sequence[tuple], *axes: Any) -> list:
    """As `both_parts`, for all of the product of axes: what is in `short` is for the short part."""
    return both_parts(short, thorough=[values for values in product(*axes) if values not in short])


def dear(test: Any) -> Any:
    """A test that the short part leaves out on the emulator: another one there asks its question with others."""
    return pytest.mark.thorough(test) if TARGET == "emulator" else test


def text(value: Any) -> str:
    """How a value is named in a test's id: seeds by the first and the last."""
    return f"{value.start}..{value.stop - 1}" if isinstance(value, range) else str(value)
