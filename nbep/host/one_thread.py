"""One thread at a time in the verbs of a buffer.

Ranks have to make the same calls in the same order. A lock would let two threads of a rank go one after the other, but
in which order, the ranks would not agree. So who comes second is refused.

A verb also leaves torch's function modes aside; see target.torch_modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NoReturn, TypeVar

from nbep.host.target.current import SHARED, is_rank_of_spawn
from nbep.host.target.torch_modes import mode_is_on, untraced, without_modes

Verb = TypeVar("Verb", bound=Callable[..., Any])

GUARDED = """
def {name}({parameters}):
    {check}
    turn = self._turn
    if not turn.acquire(False):
        refuse_thread("{name}")
    try:
        if mode_is_on():
            with without_modes():
                {again}
        {once}
    finally:
        turn.release()
"""


def in_turn(verb: Verb) -> Verb:
    """A verb of an object that has a lock `_turn`: a RuntimeError in a thread that comes while another is inside."""
    return guarded(verb)


def guarded(verb: Verb, first: Sequence[str] = (), more: Sequence[str] = (), check: str = "pass", **names: Any) -> Verb:
    """The same, in a function of the verb's own signature: one that takes *args and **options costs as much as a plan.

    first: statements before it, over the verb's parameters and these names; more: parameters at the end; check: a
    statement before all else
    """
    parameters, arguments = [], []
    for name, parameter in signature(verb).parameters.items():
        is_keyword = parameter.kind is Parameter.KEYWORD_ONLY
        if is_keyword and "*" not in parameters:
            parameters.append("*")
        parameters.append(name if parameter.default is Parameter.empty else f"{name}=None")
        arguments.append(f"{name}={name}" if is_keyword else name)
    steps = *first, f"return verb({', '.join(arguments)})"
    once, again = (f"\n{indent}".join(steps) for indent in (8 * " ", 16 * " "))
    parameters += more
    source = GUARDED.format(name=verb.__name__, parameters=", ".join(parameters), check=check, once=once, again=again)
    made: dict[str, Any] = {**names, "__name__": __name__, "verb": verb, "refuse_thread": _refuse_thread}
    made |= {"mode_is_on": mode_is_on, "without_modes": without_modes}
    exec(source, made)
    function = made[verb.__name__]
    function.__defaults__, function.__kwdefaults__ = verb.__defaults__, verb.__kwdefaults__
    return untraced(wraps(verb)(function))  # type: ignore[return-value]


def _refuse_thread(name: str) -> NoReturn:
    if is_rank_of_spawn():
        raise RuntimeError(f"{name}: called while another rank is in a call of this buffer; {SHARED}")
    raise RuntimeError(f"{name}: called while another thread is in a call of this buffer; one thread at a time")
