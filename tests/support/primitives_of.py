"""Other primitives for one module of device code: what a kernel would do if one of its steps did something else."""

from collections.abc import Callable
from types import ModuleType

import pytest


def replace_primitives(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **others: Callable) -> None:
    """Let the functions of `module` find other primitives under these names; on the emulator."""
    replaced = ModuleType(module.ptx.__name__)
    vars(replaced).update(vars(module.ptx), **others)
    monkeypatch.setattr(module, "ptx", replaced)
