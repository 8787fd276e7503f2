"""How clients call: handles are tuples, topk_idx may be int32, and some arguments only forks of DeepEP have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

from nbep.host.events import EventHandle, EventOverlap, handle_of

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


class Handle(tuple):
    """The tuple that DeepEP's verb would return. It has the attributes of nbep's handle, too."""

    made: Any

    @classmethod
    def of(cls, made: Any) -> Handle | None:
        if made is None:
            return None
        handle = cls(made)
        handle.made = made
        return handle

    def __getattr__(self, name: str) -> Any:
        if name == "made":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.made, name)


def taken_as_deep_ep(nbeps: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a verb that stands for one of nbep's: it has its signature, and gets all arguments by their names, with
    nbep's handle, topk_idx of int64, and no argument of a fork.
    """
    taken = signature(nbeps)
    names = [name for name, parameter in taken.parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    del names[0]  # self

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(nbeps)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_forks(kwargs)
            given = {name: _made(value) for name, value in (*zip(names, args, strict=False), *kwargs.items())}
            if len(given) < len(args) + len(kwargs):  # too many, or one of them twice
                taken.bind(self, *args, **kwargs)
            if _is_int32(given.get("topk_idx")):
                _widen(given)
            return verb(self, given)

        return call

    return decorate


def refuse_forks(given: dict[str, Any]) -> None:
    """Raises: TypeError, as for any argument that is not there, which says whose it is"""
    for name in given:
        if name in FORKS:
            raise TypeError(f"{name}: not in DeepEP's main, and not in nbep; it is an argument of {FORKS[name]}")


def _made(value: Any) -> Any:
    return value.made if isinstance(value, Handle) else value


def _is_int32(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    return getattr(dtype, "itemsize", 0) == 4 and str(dtype).removeprefix("torch.") == "int32"


def _widen(given: dict[str, Any]) -> None:
    """Convert topk_idx to int64, on the current stream: behind previous_event, and the call comes behind it."""
    previous = handle_of(given.get("previous_event"))
    if previous is not None:
        previous.event.current_stream_wait()
    topk_idx = given["topk_idx"]
    given["topk_idx"] = topk_idx.long() if hasattr(topk_idx, "long") else topk_idx.astype("int64")
    if previous is not None:
        given["previous_event"] = EventOverlap(EventHandle(checks=previous.checks))
