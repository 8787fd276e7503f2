"""torch's function modes, which a call of nbep leaves aside.

torch.set_default_device turns such a mode on. Then each method and each attribute of a tensor passes through a function
in Python, at 1 us or more, though it makes nothing that could go to a default device; a call of nbep asks for dozens.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any


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
