"""What does not change from call to call is checked and prepared once: a plan, which the buffer keeps for a verb.

 first call with such arrays and options:  check all, size, prepare the launches --> a plan
 each call:                                look at the arrays, find the plan, allocate, launch

The key of a plan says all that was checked: the kind of each array (see Runtime.look_at), all options with their types,
and what a handle says of its dispatch. So what is found under a key need not be checked again. Where the host reads
arrays, as on the emulator, what is in them and where they lie is checked in each call.

Most calls are like the one before. Whether one is so is asked in a shorter way, if the arrays' library has one; see
Runtime.recognizer. What it does not recognize is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from nbep.device.kernels.parts.calls import Call
from nbep.host.target.base import PreparedLaunch, Recognizer, Runtime
from nbep.host.target.new_arrays import Make
from nbep.host.target.views import View

AnyPlan = TypeVar("AnyPlan")
MAX_PLANS = 1024  # of a verb


class Plan(NamedTuple):
    """Of a dispatch or combine through rings: what depends on sizes, dtypes and options, and on those of a handle.

    make: outputs, and in front of a dispatch's without a handle what notify writes; shape: of what it takes of the
    buffers, to name cells in reports. The rest is of a dispatch without a handle
    make_counted: its outputs, if rows are counted before; counters: where; sizes: of the handle
    """

    make: Make
    notify: PreparedLaunch
    launch: PreparedLaunch
    shape: Any
    call: Call
    make_counted: Make | None = None
    counters: tuple[int, ...] = ()
    sizes: tuple[int, int] = (0, 0)
    num_local_experts: int = 0


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


class _Kept(Generic[AnyPlan]):
    """A plan, and what it was made for."""

    __slots__ = ("can_recognize", "options", "plan", "recognize", "types")

    def __init__(self, plan: AnyPlan, options: tuple[Any, ...], can_recognize: bool):
        self.plan = plan
        self.options = options
        self.types = list(map(type, options))
        self.recognize: Recognizer | None = None
        self.can_recognize = can_recognize  # until it is tried in vain


class Plans(Generic[AnyPlan]):
    """The plans of one verb of a buffer.

    runtime: what looks at arrays; num_free: so many of them may have any number of rows, which the verb compares
    are_kept: whether there are any; not for a verb that checks contents together with all else, where the host reads
    """

    __slots__ = ("_are_kept", "_kept", "_latest", "_num_free", "_runtime")

    def __init__(self, runtime: Runtime, num_free: int = 0, are_kept: bool = True):
        self._runtime = runtime
        self._num_free = num_free
        self._are_kept = are_kept
        self._kept: dict[Any, _Kept[AnyPlan]] = {}
        self._latest: _Kept[AnyPlan] | None = None  # with a recognizer

    def find(
        self, given: Sequence[Any], options: tuple[Any, ...] | None
    ) -> tuple[Any, AnyPlan | None, list[Any], list[View]]:
        """The plan of an earlier call with such arrays and the same options.

        options: None if all must be checked
        Returns: without a plan, what to keep one under once all is checked, None if none must be kept; the plan, None
                 if there is none; what a launch takes for the arrays; where the host reads them, what they are
        """
        latest = self._latest
        # 1 is no True, and 4.0 no 4.
        if (
            latest is not None
            and options is not None
            and list(map(type, options)) == latest.types
            and options == latest.options
        ):
            addresses = latest.recognize(given)  # type: ignore[misc]
            if addresses is not None:
                return None, latest.plan, addresses, []
        kinds, addresses, views = self._runtime.look_at(given, self._num_free)
        if kinds is None or options is None or not self._are_kept:
            return None, None, addresses, views
        key = kinds, tuple(map(type, options)), options
        try:
            kept = self._kept.get(key)
        except TypeError:  # an option that cannot be part of a key
            return None, None, addresses, views
        if kept is None:
            return key, None, addresses, views
        if kept.can_recognize and (kept.recognize is None or kept.recognize(given) is None):
            kept.recognize = self._runtime.recognizer(given, self._num_free)
            kept.can_recognize = kept.recognize is not None
        self._latest = kept if kept.can_recognize else None
        return None, kept.plan, addresses, views

    def keep(self, key: Any, plan: AnyPlan) -> None:
        """Keep a plan for later calls."""
        if key is None:
            return
        if len(self._kept) >= MAX_PLANS:
            self._kept.clear()
        self._kept[key] = _Kept(plan, key[2], self._runtime.has_recognizers)

    def __len__(self) -> int:
        return len(self._kept)
