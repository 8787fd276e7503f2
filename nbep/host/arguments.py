"""What every check of an argument is made of."""

from __future__ import annotations

import operator
from typing import Any, NoReturn


def refuse(name: str, got: object, allowed: str) -> NoReturn:
    """Raises: ValueError that says which argument it is, what came and what is allowed"""
    raise ValueError(f"{name}: got {got}; must be {allowed}")


def integer(name: str, value: Any, minimum: int | None = None) -> int:
    """The value as an int. Whatever Python takes for an index is one, also a NumPy integer, but no bool."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (minimum is not None and number < minimum):
        refuse(name, repr(value), "an integer" if minimum is None else f"an integer of at least {minimum}")
    return number
