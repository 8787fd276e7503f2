"""What every check of an argument is made of."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

ROW_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8")  # uint8: FP4, packed


def refuse(name: str, got: object, allowed: str) -> NoReturn:
    """Raises: ValueError that says which argument it is, what came and what is allowed"""
    raise ValueError(f"{name}: got {got}; must be {allowed}")


@contextmanager
def named_by(variables: Mapping[str, str]) -> Iterator[None]:
    """An error about an argument that the environment has given names the variable. variables: by argument"""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        name, _, rest = str(error).partition(":")
        if name not in variables:
            raise
        raise type(error)(f"{variables[name]}:{rest}") from None


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """The value as an int. Whatever Python takes for an index is one, also a NumPy integer, but no bool."""
    if value.__class__ is int and (minimum is None or value >= minimum):
        return value
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum):
        refuse(name, repr(value), "an integer" if minimum is None else f"an integer of at least {minimum}")
    return number


def flags(**given: Any) -> None:
    """What is switched on or off is True or False: a number, a text or an array in its place is a mistake."""
    for name, value in given.items():
        if value.__class__ is not bool and not isinstance(value, np.bool_):
            refuse(name, repr(value), "True or False")


def switches(**given: Any) -> None:
    """As `flags`, but 1 and 0 are True and False, too: programs for DeepEP's ElasticBuffer pass them."""
    as_bool: dict[Any, bool] = {0: False, 1: True}
    flags(**{name: as_bool.get(value, value) if value.__class__ is int else value for name, value in given.items()})
