"""What does not change from call to call is checked and prepared once: a plan, which the buffer or a handle keeps.

 first call with such arrays and options:  check all, size, prepare the launches --> a plan
 each call:                                look at the arrays, find the plan, allocate, launch

The key of a plan says all that was checked: the kind of each array (see Runtime.look_at), and all options with their
types. So what is found under a key need not be checked again. Where the host reads arrays, as on the emulator, their
contents are checked, too: nothing is found there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

AnyPlan = TypeVar("AnyPlan")


def overlap(addresses: Sequence[int], num_bytes: Sequence[int], first_output: int) -> bool:
    """Whether an output, if it is given, lies over another array; see validate.apart."""
    for i in range(first_output, len(addresses)):
        begin = addresses[i]
        if begin:
            end = begin + num_bytes[i]
            for j in range(i):
                if begin < addresses[j] + num_bytes[j] and addresses[j] < end:
                    return True
    return False


class Plans(Generic[AnyPlan]):
    """Plans by their keys. most: how many there are at most"""

    __slots__ = ("_kept", "_latest", "_latest_key", "_most")

    def __init__(self, most: int):
        self._most = most
        self._kept: dict[Any, AnyPlan] = {}
        self._latest_key: Any = None  # most calls are like the one before; comparing costs less than a look-up
        self._latest: AnyPlan | None = None

    def find(self, kinds: tuple[Any, ...] | None, options: tuple[Any, ...]) -> tuple[Any, AnyPlan | None]:
        """The plan of an earlier call with such arrays and the same options.

        kinds: of the arrays, as Runtime.look_at
        Returns: what to keep a plan under once all is checked, None if none must be kept; the plan, None if there is
                 none
        """
        if kinds is None:
            return None, None
        key = kinds, list(map(type, options)), options  # 1 is no True, and 4.0 no 4
        if key == self._latest_key:
            return key, self._latest
        try:
            plan = self._kept.get((kinds, *key[1], options))
        except TypeError:  # an option that cannot be part of a key
            return None, None
        if plan is not None:
            self._latest_key, self._latest = key, plan
        return key, plan

    def keep(self, key: Any, plan: AnyPlan) -> None:
        """Keep a plan for later calls."""
        if key is None:
            return
        if len(self._kept) >= self._most:
            self._kept.clear()
        kinds, types, options = key
        self._kept[kinds, *types, options] = plan

    def __len__(self) -> int:
        return len(self._kept)
