"""What does not change from call to call is checked and prepared once: a plan, which the buffer or a handle keeps.

 first call with such arrays and options:  check all, size, prepare the launches --> a plan
 each call:                                look at the arrays, find the plan, allocate, launch

The key of a plan says all that was checked: the kind of each array (see Runtime.look_at), and all options with their
types. So what is found under a key need not be checked again. Where the host reads arrays, as on the emulator, their
contents are checked, too: nothing is found there.
"""

from __future__ import annotations

from typing import Any


def find_plan(plans: dict[Any, Any], kinds: tuple[Any, ...] | None, options: tuple[Any, ...]) -> tuple[Any, Any]:
    """The plan of an earlier call with such arrays and the same options.

    kinds: of the arrays, as Runtime.look_at
    Returns: what to keep a plan under once all is checked, None if none must be kept; the plan, None if there is none
    """
    if kinds is None:
        return None, None
    key = kinds, options, *map(type, options)  # 1 is no True, and 4.0 no 4
    try:
        return key, plans.get(key)
    except TypeError:  # an option that cannot be part of a key
        return None, None


def keep_plan(plans: dict[Any, Any], key: Any, plan: Any, most: int) -> None:
    """Keep a plan for later calls; most: how many there are at most."""
    if key is None:
        return
    if len(plans) >= most:
        plans.clear()
    plans[key] = plan
