"""How clients call: topk_idx may be int32, and some arguments only forks of DeepEP have."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

from nbep.host.entry import in_turn
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


def taken_as_deep_ep(nbeps: Callable[..., Any], *first: str, **names: Any) -> Any:
    """A verb that stands for one of nbep's: its topk_idx may be int32, and it names the fork whose argument it refuses.

    nbeps: which is `in_turn`; this takes its place, so that a call passes through one function, not two
    first, names: as of `in_turn`
    """
    verb: Any = nbeps.__wrapped__  # type: ignore[attr-defined]
    parameters = signature(verb).parameters
    if "topk_idx" in parameters:
        event = "previous_event" if "previous_event" in parameters else "_"
        behind = event if event in parameters else "None"
        first += (f"if is_int32(topk_idx): topk_idx, {event} = widened(topk_idx, {behind})",)

    def refuse_options(options: dict[str, Any]) -> None:
        refuse_forks(options)
        raise TypeError(f"{verb.__name__}() got an unexpected keyword argument {next(iter(options))!r}")

    names |= {"is_int32": is_int32, "widened": widened, "refuse_options": refuse_options}
    return in_turn(verb, first, ["**options"], "if options: refuse_options(options)", **names)


def refuse_forks(given: dict[str, Any]) -> None:
    """Raises: TypeError, as for any argument that is not there, which says whose it is"""
    for name in given:
        if name in FORKS:
            raise TypeError(f"{name}: not in DeepEP's main, and not in nbep; it is an argument of {FORKS[name]}")


def is_int32(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    if dtype is _latest_other[0]:
        return False
    found = getattr(dtype, "itemsize", 0) == 4 and str(dtype).removeprefix("torch.") == "int32"
    if not found:
        _latest_other[0] = dtype
    return found


_latest_other: list[Any] = [None]  # the dtype of an array before that was not int32


def widened(topk_idx: Any, previous_event: Any) -> tuple[Any, Any]:
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


def torch_stream(stream: Any) -> Any:
    """The stream; for torch one of its own class, which record_stream takes."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(stream, "cuda_stream"):
        return stream
    return torch.cuda.ExternalStream(stream.cuda_stream, device=stream.ordinal)
