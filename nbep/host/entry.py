"""What a call of nbep passes on its way in: one thread at a time, torch's modes left aside, no look by torch.compile.

Ranks have to make the same calls in the same order. A lock would let two threads of a rank go one after the other, but
in which order, the ranks would not agree. So who comes second is refused.

torch.set_default_device turns a function mode on. Then each method and each attribute of a tensor passes through a
function in Python, at 1 us or more, though it makes nothing that could go to a default device; a call of nbep asks for
dozens.

torch.compile traces what its function calls, also nbep, and replaces what runs below. `untraced` ends the graph at a
call of nbep: where torch traces, by an attribute; where it replaces frames, by what `leave_alone` has said of the code.
That is torch.compiler.disable without the two microseconds that its wrapper takes in each call, compiled or not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import Parameter, signature
from types import CodeType
from typing import Any, NoReturn, TypeVar

from nbep.host.target.base import SHARED, is_rank_of_spawn

Verb = TypeVar("Verb", bound=Callable[..., Any])
Function = TypeVar("Function")
BREAK = "nbep launches kernels that no graph of torch holds"  # what torch says of a graph that ends there
_codes: set[CodeType] = set()  # of which torch does not know yet

GUARDED = """
def {name}({parameters}):
    {check}
    turn = self._turn
    if not turn.acquire(False):
        refuse_thread("{name}")
    try:
        if mode_is_on():
            with modules["torch"]._C.DisableTorchFunction():  # nor functions of tensors of other classes
                {again}
        {once}
    finally:
        turn.release()
"""


def in_turn(verb: Verb, first: Sequence[str] = (), more: Sequence[str] = (), check: str = "pass", **names: Any) -> Verb:
    """A verb of an object that has a lock `_turn`: a RuntimeError in a thread that comes while another is inside.

    It is a function of the verb's own signature: one that takes *args and **options costs as much as a plan.

    first: statements before the verb, over its parameters and these names; more: parameters at the end; check: a
    statement before all else
    """

    def refuse_thread(name: str) -> NoReturn:
        if is_rank_of_spawn():
            raise RuntimeError(f"{name}: called while another rank is in a call of this buffer; {SHARED}")
        raise RuntimeError(f"{name}: called while another thread is in a call of this buffer; one thread at a time")

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
    made: dict[str, Any] = {**names, "__name__": __name__, "verb": verb, "refuse_thread": refuse_thread}
    made |= {"mode_is_on": mode_is_on, "modules": sys.modules}
    exec(source, made)
    function = made[verb.__name__]
    function.__defaults__, function.__kwdefaults__ = verb.__defaults__, verb.__kwdefaults__
    return untraced(wraps(verb)(function))  # type: ignore[return-value]


def mode_is_on() -> bool:
    """Whether tensors pass through a mode here and now."""
    torch: Any = sys.modules.get("torch")
    try:
        return torch is not None and torch._C._is_torch_function_mode_enabled()
    except AttributeError:  # a torch that is still being imported
        return False


def untraced(function: Function) -> Function:
    """A function of nbep that users call: torch.compile does not look into it."""
    marked: Any = function
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, BREAK
    _codes.add(marked.__code__)
    leave_alone()
    return function


def leave_alone() -> None:
    """Tell torch, if it is imported, not to replace what runs inside of functions that are `untraced`.

    Source: torch/_dynamo/eval_frame.py, skip_code, and torch/csrc/dynamo/eval_frame.c; from torch 2.7 on
    """
    if not _codes or "torch" not in sys.modules:
        return
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)  # for the frame, and for those that it calls
        while _codes:
            eval_frame.set_code_exec_strategy(_codes.pop(), strategy)
    except (AttributeError, ImportError):
        pass  # before 2.7: a compiled caller wraps nbep's calls in torch.compiler.disable itself
