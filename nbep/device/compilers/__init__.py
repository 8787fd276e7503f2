"""The compilers that make PTX of a kernel. Nothing outside of this folder knows one.

 numba-cuda   numba_cuda.py        the default
 mlir         numba_cuda_mlir.py   its successor: NBEP_COMPILER=mlir

Each module has the same functions:

    lock()                               held while one kernel is compiled
    register(cc)                         say to the compiler what the decorators of `jit` have recorded
    lower(spec, cc, lineinfo)            what it makes of a kernel; raises what the compiler raises
    to_ptx(lowered, spec, cc) -> str     the PTX, by NVVM; its entry is called spec.entry_name

and PACKAGES, the packages that its code depends on. A kernel and a primitive have one version: `jit` records the text
of the inline PTX, and a compiler says how it is embedded. See records/compilers.md.
"""

import importlib
import os
from typing import Any

VARIABLE = "NBEP_COMPILER"
MODULES = {"numba-cuda": "numba_cuda", "mlir": "numba_cuda_mlir"}
PACKAGES = {"numba-cuda": ("numba", "numba-cuda"), "mlir": ("numba-cuda-mlir",)}


def chosen_name() -> str:
    """The name of the compiler that this process uses.

    Raises: ValueError if the environment variable NBEP_COMPILER names none
    """
    name = os.environ.get(VARIABLE) or "numba-cuda"
    if name not in MODULES:
        raise ValueError(f"{VARIABLE}: got {name!r}; must be {' or '.join(MODULES)}")
    return name


def chosen() -> Any:
    """Its module, imported."""
    return importlib.import_module(f"{__name__}.{MODULES[chosen_name()]}")
