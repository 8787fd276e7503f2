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

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from nbep.host.target.arrays import Make, View
from nbep.host.target.base import PreparedLaunch, Recognizer, Runtime

AnyPlan = TypeVar("AnyPlan")
MAX_PLANS = 1024  # of a verb


class Plan(NamedTuple):
    """Of get_dispatch_layout, and of a dispatch or combine through rings.

    make          outputs; of a dispatch that waits for counts what notify writes, else in front of the outputs
    launch        of the kernel that moves tokens, or counts them
    notify, call  the launch before it, and what ranks compare there; a layout has none
    shape         what it takes of the buffers, to name cells in reports

    Of a dispatch without a handle:

    make_counted  outputs, if the CPU waits for how many rows they have
    counters      where notify writes the counts; num_local_experts: of how many experts
    sizes         of the handle
    """

    make: Make
    launch: PreparedLaunch
    notify: Any = None  # a PreparedLaunch
    shape: Any = None
    call: Any = None  # a Call
    make_counted: Make | None = None
    counters: tuple[int, ...] = ()
    sizes: tuple[int, int] = (0, 0)
    num_local_experts: int = 0


class _Kept(Generic[AnyPlan]):
    """A plan, and what it was made for."""

    __slots__ = ("can_recognize", "options", "plan", "recognize", "types")

    def __init__(self, plan: AnyPlan, options: Any, can_recognize: bool):
        self.plan = plan
        self.options = options
        self.types = list(map(type, options))
        self.recognize: Recognizer | None = None
        self.can_recognize = can_recognize  # until it is tried in vain


class Plans(Generic[AnyPlan]):
    """The plans of one verb of a buffer.

    runtime: what looks at arrays; num_free: so many of them may have any number of rows, which the verb compares
    """

    __slots__ = ("_kept", "_latest", "_num_free", "_runtime")

    def __init__(self, runtime: Runtime, num_free: int = 0):
        self._runtime = runtime
        self._num_free = num_free
        self._kept: dict[Any, _Kept[AnyPlan]] = {}
        self._latest: _Kept[AnyPlan] | None = None  # with a recognizer

    def find(
        self, given: Sequence[Any], options: tuple[Any, ...] | None, check_and_make: Callable[..., AnyPlan], *of: Any
    ) -> tuple[AnyPlan, list[Any], list[View]]:
        """The plan of an earlier call with such arrays and the same options, or what check_and_make makes.

        options: None if all must be checked, and what is made serves no other call
        check_and_make: takes `of`, and what the arrays are
        Returns: the plan; what a launch takes for the arrays; where the host reads them, what they are
        """
        # As the call before? 1 is no True, and 4.0 no 4.
        latest = self._latest
        if (
            latest is not None
            and options is not None
            and list(map(type, options)) == latest.types
            and options == latest.options
        ):
            addresses = latest.recognize(given)  # type: ignore[misc]
            if addresses is not None:
                return latest.plan, addresses, []
        # As an earlier one?
        runtime = self._runtime
        kinds, addresses, views = runtime.look_at(given, self._num_free)
        key, kept = (kinds, None if options is None else tuple(map(type, options)), options), None
        is_kept = kinds is not None and options is not None
        try:
            kept = self._kept.get(key) if is_kept else None
        except TypeError:  # an option that cannot be part of a key
            is_kept = False
        if kept is None:  # a new one
            plan = check_and_make(*of, views or [*map(runtime.view, given)])
            if is_kept:
                if len(self._kept) >= MAX_PLANS:
                    self._kept.clear()
                self._kept[key] = _Kept(plan, options, runtime.has_recognizers)
            return plan, addresses if kinds is not None else runtime.arguments(given), views
        if kept.can_recognize and (kept.recognize is None or kept.recognize(given) is None):
            kept.recognize = runtime.recognizer(given, self._num_free)
            kept.can_recognize = kept.recognize is not None
        self._latest = kept if kept.can_recognize else None
        return kept.plan, addresses, views

    def __len__(self) -> int:
        return len(self._kept)
