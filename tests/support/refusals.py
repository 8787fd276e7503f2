"""Calls with one argument wrong: what they are refused with.

A table has a case for each name: how the arguments change, and how the message begins. All cases of a table are tried
on one buffer: what comes before the call, a dispatch between nodes, say, takes longer than all of them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from arrays import to_target
from target import TARGET


def check_refused(call: Callable, arguments: dict, table: Mapping[str, Any], starts_nothing: Callable) -> None:
    """The call with one argument changed raises a ValueError with the message, and nothing has started by then.

    A case that is a pytest.param with marks is one for the emulator only. A message with a | is a pattern.
    """
    for name, case in table.items():
        if getattr(case, "marks", ()) and TARGET != "emulator":
            continue
        change, message = getattr(case, "values", case)
        change = change(arguments) if callable(change) else change
        changed = {**arguments, **{name: to_target(value) for name, value in change.items()}}
        pattern = message if "|" in message else re.escape(message)
        try:
            with starts_nothing(), pytest.raises(ValueError, match="^" + pattern):
                call(**changed)
        except BaseException as error:
            error.add_note(f"in the case of {name!r}")
            raise
