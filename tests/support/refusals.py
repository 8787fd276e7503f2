"""Calls with one argument wrong: what they are refused with."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from arrays import to_target


def cases(table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """A test for each name: how the arguments change, and how the message begins."""
    return pytest.mark.parametrize(("change", "message"), table.values(), ids=table.keys())


def check_refused(call: Callable, arguments: dict, change: Any, message: str, starts_nothing: Callable) -> None:
    """The call with one argument changed raises a ValueError with the message, and nothing has started by then."""
    change = change(arguments) if callable(change) else change
    arguments = {**arguments, **{name: to_target(value) for name, value in change.items()}}
    with starts_nothing(), pytest.raises(ValueError, match="^" + re.escape(message)):
        call(**arguments)
