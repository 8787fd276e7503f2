"""Runs plain `@cuda.jit` kernels on the emulator: no GPU, no edit of the program.

    nbep run script.py              a script whose numba.cuda is the emulator's
    nbep check script.py            the same under many schedules
    nbep.numba_cuda.install()       in a notebook or a conftest.py, before kernels are defined
    pytest --nbep-cuda              for a test suite

See docs/numba_cuda.md. Nothing here knows of experts. Numba is imported when one of the names is used first.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from nbep.emulator.machine.source import no_kernel_in

__all__ = ["KernelTypeError", "install", "options", "uninstall"]

_HOMES = {"KernelTypeError": "code", "install": "installing", "options": "session", "uninstall": "installing"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


no_kernel_in(str(Path(__file__).parent))
