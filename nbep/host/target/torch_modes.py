"""torch's function modes and torch.compile, which a call of nbep leaves aside.

torch.set_default_device turns such a mode on. Then each method and each attribute of a tensor passes through a function
in Python, at 1 us or more, though it makes nothing that could go to a default device; a call of nbep asks for dozens.

torch.compile traces what its function calls, also nbep, and replaces what runs below. `untraced` ends the graph at a
call of nbep: where torch traces, by an attribute; where it replaces frames, by what `leave_alone` has said of the code.
That is torch.compiler.disable without the two microseconds that its wrapper takes in each call, compiled or not.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, TypeVar

Function = TypeVar("Function")
BREAK = "nbep launches kernels that no graph of torch holds"  # what torch says of a graph that ends there
_codes: set[CodeType] = set()  # of which torch does not know yet


def mode_is_on() -> bool:
    """Whether tensors pass through a mode here and now."""
    torch: Any = sys.modules.get("torch")
    try:
        return torch is not None and torch._C._is_torch_function_mode_enabled()
    except AttributeError:  # a torch that is still being imported
        return False


def without_modes() -> AbstractContextManager[Any]:
    """While modes are on: a context without them, and without the functions of tensors of other classes."""
    torch: Any = sys.modules["torch"]
    return torch._C.DisableTorchFunction()


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
