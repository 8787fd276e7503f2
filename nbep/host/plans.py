"""What does not change from call to call is checked and prepared once: a plan, which the buffer or a handle keeps.

 first call with such arrays and options:  check all, size, prepare the launches --> a plan
 each call:                                look at the arrays, find the plan, allocate, launch

The key of a plan says all that was checked: class, shape, dtype, gaps and alignment of each array, and all options with
their types. So what is found under a key need not be checked again. Where the host reads arrays, as on the emulator,
their contents are checked, too: nothing is found there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbep.host.target.base import MaybeArray, Runtime

NOTHING = None, None, None


def find_plan(
    runtime: Runtime, plans: dict[Any, Any], arrays: Sequence[MaybeArray], options: tuple[Any, ...]
) -> tuple[list[Any] | None, Any, Any]:
    """The plan of an earlier call with such arrays and the same options.

    Returns: what a launch takes for the arrays, None if it takes a closer look to know; what to keep a plan under once
             all is checked, None if none must be kept; the plan, None if there is none
    """
    seen = runtime.look_at(arrays)
    if seen is None:
        return NOTHING
    kinds, arguments = seen
    key = kinds, options, *map(type, options)  # 1 is no True, and 4.0 no 4
    try:
        return arguments, key, plans.get(key)
    except TypeError:  # an option that cannot be part of a key
        return NOTHING


def keep_plan(plans: dict[Any, Any], key: Any, plan: Any, most: int) -> None:
    """Keep a plan for later calls; most: how many there are at most."""
    if key is None:
        return
    if len(plans) >= most:
        plans.clear()
    plans[key] = plan
