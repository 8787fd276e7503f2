"""What every check of an argument is made of."""

from __future__ import annotations

import operator
from typing import Any, NoReturn

import numpy as np


def refuse(name: str, got: object, allowed: str) -> NoReturn:
    """Raises: ValueError that says which argument it is, what came and what is allowed"""
    raise ValueError(f"{name}: got {got}; must be {allowed}")


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
