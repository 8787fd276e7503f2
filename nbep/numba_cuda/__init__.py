"""Runs plain `@cuda.jit` kernels on the emulator: no GPU, no edit of the program.

    nbep run script.py              a script whose numba.cuda is the emulator's
    nbep check script.py            the same under many schedules
    nbep.numba_cuda.install()       in a notebook or a conftest.py, before kernels are defined
    pytest --nbep-cuda              for a test suite

See docs/numba_cuda.md. Nothing here knows of experts.
"""

from pathlib import Path

from nbep.emulator.machine.source import no_kernel_in

from .code import KernelTypeError
from .install import install, uninstall
from .session import options

__all__ = ["KernelTypeError", "install", "options", "uninstall"]

no_kernel_in(str(Path(__file__).parent))
