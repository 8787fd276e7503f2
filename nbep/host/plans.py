"""What does not change from call to call is checked and prepared once: a plan, which the buffer keeps for a verb.

 first call with such arrays and options:  check all, size, prepare the launches --> a plan
 each call:                                look at the arrays, find the plan, allocate, launch

The key of a plan says all that was checked: the kind of each array (see Runtime.look_at), all options with their types,
and what a handle says of its dispatch. So what is found under a key need not be checked again. Where the host reads
arrays, as on the emulator, their contents are checked, too: nothing is found there.

Most calls are like the one before. Whether one is so is asked in a shorter way, if the arrays' library has one; see
Runtime.recognizer. What it does not recognize is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from nbep.device.kernels.parts.calls import Call
from nbep.host.arguments import refuse
from nbep.host.request import DispatchRequest
from nbep.host.target.base import PreparedLaunch, Recognizer, Runtime
from nbep.host.target.new_arrays import Make

AnyPlan = TypeVar("AnyPlan")
MAX_PLANS = 1024  # of a verb


class Plan(NamedTuple):
    """Of a call of the normal mode with a handle: what depends on its sizes, on those of the arrays, and on the config.

    shape: of what it takes of the buffers, to name cells in reports
    Without rings `make` and `launch` are other things: see intranode.direct_dispatch.
    """

    make: Any  # its outputs
    notify: PreparedLaunch
    launch: Any
    shape: Any
    call: Call


class CountedPlan(NamedTuple):
    """Of a dispatch without one: sizes, dtypes and options alone, as rows that come are counted in every call."""

    make: Make  # what notify writes, and the outputs of dispatch if it is known how many rows they have
    make_counted: Make | None  # the outputs of dispatch, if not
    notify: PreparedLaunch
    counters: tuple[int, ...]
    launch: PreparedLaunch
    sizes: tuple[int, int]  # of the handle
    shape: Any
    call: Call


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

    def __init__(self, plan: AnyPlan, options: tuple[Any, ...]):
        self.plan = plan
        self.options = options
        self.types = list(map(type, options))
        self.recognize: Recognizer | None = None
        self.can_recognize = True  # until it is tried in vain


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

    def find(self, given: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, AnyPlan | None, list[Any]]:
        """The plan of an earlier call with such arrays and the same options.

        Returns: without a plan, what to keep one under once all is checked, None if none must be kept; the plan, None
                 if there is none; what a launch takes for the arrays
        """
        latest = self._latest
        # 1 is no True, and 4.0 no 4.
        if latest is not None and list(map(type, options)) == latest.types and options == latest.options:
            addresses = latest.recognize(given)  # type: ignore[misc]
            if addresses is not None:
                return None, latest.plan, addresses
        return self._look_up(given, options)

    def _look_up(self, given: Sequence[Any], options: tuple[Any, ...]) -> tuple[Any, AnyPlan | None, list[Any]]:
        kinds, addresses = self._runtime.look_at(given, self._num_free)
        if kinds is None:
            return None, None, addresses
        key = kinds, tuple(map(type, options)), options
        try:
            kept = self._kept.get(key)
        except TypeError:  # an option that cannot be part of a key
            return None, None, addresses
        if kept is None:
            return key, None, addresses
        if kept.can_recognize and (kept.recognize is None or kept.recognize(given) is None):
            kept.recognize = self._runtime.recognizer(given, self._num_free)
            kept.can_recognize = kept.recognize is not None
        self._latest = kept if kept.can_recognize else None
        return None, kept.plan, addresses

    def find_along(
        self, memory: Any, handle: Any, kind: Any, given: Sequence[Any], options: tuple[Any, ...]
    ) -> tuple[Any, AnyPlan | None, list[Any]]:
        """As `find`, of a call along the routes of a handle: that of a dispatch of this buffer as it was made.

        kind: its class. With any other one all is checked in each call.
        """
        if not isinstance(handle, kind) or not handle.is_as_made or handle.owner is not memory.identity:
            return None, None, self._runtime.look_at(given)[1]
        number = handle.number if memory.compares_handles else 0
        return self.find(given, (*options, handle.taken(self._runtime).sizes, number))

    def keep(self, key: Any, plan: AnyPlan) -> None:
        """Keep a plan for later calls."""
        if key is None:
            return
        if len(self._kept) >= MAX_PLANS:
            self._kept.clear()
        self._kept[key] = _Kept(plan, key[2])

    def __len__(self) -> int:
        return len(self._kept)


def find_dispatch(memory: Any, request: DispatchRequest, kind: Any) -> tuple[Plans[Any], Any, Any, list[Any]]:
    """The plans that a dispatch's is among, and what `find` returns. kind: the class of the mode's handles

    The arrays are x and scales; without a handle also topk_idx, topk_weights, is_token_in_rank, num_tokens_per_rank,
    num_tokens_per_expert, and between nodes num_tokens_per_rdma_rank.
    """
    is_pair = isinstance(request.x, tuple)
    x: Any = request.x if is_pair else (request.x, None)
    plans: Plans[Any] = memory.counted_plans if request.handle is None else memory.cached_plans
    if len(x) != 2:
        return plans, None, None, []
    if request.handle is not None:
        if request.topk_idx is not None or request.topk_weights is not None:
            name = "topk_weights" if request.topk_idx is None else "topk_idx"
            refuse(name, type(getattr(request, name)).__name__, "None together with a handle")
        options: tuple[Any, ...] = request.config, request.zero_copy, is_pair
        return plans, *plans.find_along(memory, request.handle, kind, x, options)
    if request.num_worst_tokens == 0 and memory.runtime.is_capturing:
        refuse("num_worst_tokens", 0, "positive in a CUDA graph, or a handle given: the CPU cannot wait there")
    counts: tuple[Any, ...] = request.is_token_in_rank, request.num_tokens_per_rank, request.num_tokens_per_expert
    if memory.internode is not None:
        counts += (request.num_tokens_per_rdma_rank,)
    options = (
        request.expert_alignment,
        request.num_worst_tokens,
        request.config,
        request.num_sms,
        is_pair,
        request.zero_copy,
    )
    return plans, *plans.find((*x, request.topk_idx, request.topk_weights, *counts), options)


def find_combine(
    memory: Any, handle: Any, kind: Any, given: Sequence[Any], options: tuple[Any, ...]
) -> tuple[Any, Any, list[Any]]:
    """As `find_along`, of a combine: x, topk_weights and both biases."""
    if len(given) != 4:
        return None, None, []
    found = memory.combine_plans.find_along(memory, handle, kind, given, options)
    if found[1] is not None:
        num_rows = handle.taken(memory.runtime).numbers[0]  # which the plan does not know
        for array in given[:2]:
            if array is not None and array.shape[0] != num_rows:
                return None, None, found[2]
    return found
