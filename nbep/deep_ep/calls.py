"""How clients call: handles are tuples, topk_idx may be int32, and some arguments only forks of DeepEP have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from nbep.host.events import EventHandle, EventOverlap, handle_of
from nbep.host.handles import Unpacks
from nbep.host.target.torch_modes import mode_is_on, without_modes

Verb = TypeVar("Verb", bound=Callable[..., Any])

# Arguments that DeepEP's main does not have. Source: deep_ep/buffer.py of each branch; of ACCL-EP what rtp-llm passes
# in rtp_llm/models_py/modules/factory/fused_moe/impl/cuda/routers/deepep_low_latency_router.py, lines 232 and 315
HYBRID_EP = "DeepEP's branch hybrid-ep"
ANTGROUP_OPT = "DeepEP's branch antgroup-opt"
ACCL_EP = "ACCL-EP, the DeepEP that rtp-llm is built with"
FORKS = {
    "allow_nvlink_for_normal_mode": HYBRID_EP,
    "use_nvfp4": HYBRID_EP,
    "use_ue8m0_for_sf": HYBRID_EP,
    "x_global_scale": HYBRID_EP,
    "src_signals": HYBRID_EP,
    "src_signal_expect_value": HYBRID_EP,
    "overlap": f"{HYBRID_EP}, and of {ANTGROUP_OPT}",
    "packed_recv_count": ANTGROUP_OPT,
    "comp_signal": ANTGROUP_OPT,
    "block_m": ANTGROUP_OPT,
    "threshold": ANTGROUP_OPT,
    "num_sms": ANTGROUP_OPT,
    "pertoken_quant": ACCL_EP,
    "opt_level": ACCL_EP,
}


class Handle(Unpacks):
    """The tuple that DeepEP's verb would return, with the attributes of nbep's handle, `made`, too.

    To make all arrays of the tuple costs more than a call does, and most programs only hand it on. So its contents are
    those of `made` when somebody asks for them. isinstance says that it is a tuple; C code that would look into a
    tuple's own memory is not let in.
    """

    __slots__ = ("made",)

    def __init__(self, made: Any):
        self.made = made

    @property
    def __class__(self) -> type:
        return tuple

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("__class__ of a handle: got a new one; it stays a tuple")

    def _as_tuple(self) -> tuple[Any, ...]:
        return tuple(self.made)

    def __add__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return self._as_tuple() + tuple(other)

    def __radd__(self, other: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(other) + self._as_tuple()

    def __getattr__(self, name: str) -> Any:
        if name == "made":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.made, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.made,)

    def __repr__(self) -> str:
        return f"Handle({self.made!r})"


def taken_as_deep_ep(nbeps: Callable[..., Any]) -> Callable[[Verb], Verb]:
    """For a verb that stands for one of nbep's: it has its signature, and names the fork whose argument it refuses."""

    def decorate(verb: Verb) -> Verb:
        @wraps(nbeps)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                if mode_is_on():
                    with without_modes():
                        return verb(*args, **kwargs)
                return verb(*args, **kwargs)
            except TypeError:
                refuse_forks(kwargs)
                raise

        return cast(Verb, call)

    return decorate


def refuse_forks(given: dict[str, Any]) -> None:
    """Raises: TypeError, as for any argument that is not there, which says whose it is"""
    for name in given:
        if name in FORKS:
            raise TypeError(f"{name}: not in DeepEP's main, and not in nbep; it is an argument of {FORKS[name]}")


def made_of(handle: Any) -> Any:
    """nbep's handle."""
    return handle.made if type(handle) is Handle else handle


def is_int32(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    return getattr(dtype, "itemsize", 0) == 4 and str(dtype).removeprefix("torch.") == "int32"


def widened(topk_idx: Any, previous_event: Any = None) -> tuple[Any, Any]:
    """topk_idx as int64, converted on the current stream: behind previous_event, and the call comes behind it.

    Returns: that, and the event that the call still has to come behind
    """
    previous = handle_of(previous_event)
    if previous is not None:
        previous.event.current_stream_wait()
    topk_idx = topk_idx.long() if hasattr(topk_idx, "long") else topk_idx.astype("int64")
    if previous is not None:
        previous_event = EventOverlap(EventHandle(checks=previous.checks))
    return topk_idx, previous_event
