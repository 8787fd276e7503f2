"""How clients call: handles are tuples, and some pass arguments that only forks of DeepEP have."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

# Arguments that DeepEP's main does not have, and where SGLang's come from.
GB200 = "fzyzcjy/DeepEP, branch gb200_blog"
OVERLAP = "DeepEP's pull request 483"
FORKS = {
    "use_nvfp4": GB200,
    "x_global_scale": GB200,
    "src_signals": GB200,
    "src_signal_expect_value": GB200,
    "overlap": f"{GB200}, and of {OVERLAP}",
    "packed_recv_count": OVERLAP,
    "comp_signal": OVERLAP,
    "block_m": OVERLAP,
    "threshold": OVERLAP,
    "num_sms": OVERLAP,
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
    """For a verb that stands for one of nbep's: it has its signature, gets its handle, and no argument of a fork."""

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(nbeps)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_forks(kwargs)
            return verb(self, *map(_made, args), **{name: _made(value) for name, value in kwargs.items()})

        return call

    return decorate


def refuse_forks(given: dict[str, Any]) -> None:
    """Raises: TypeError, as for any argument that is not there, which says whose it is"""
    for name in given:
        if name in FORKS:
            raise TypeError(f"{name}: not in DeepEP's main, and not in nbep; it is an argument of {FORKS[name]}")


def _made(value: Any) -> Any:
    return value.made if isinstance(value, Handle) else value
