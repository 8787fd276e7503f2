"""Packages that nbep does without until something asks for them, and the line that installs them."""

from __future__ import annotations

from pathlib import Path
from traceback import walk_tb

NUMBA = "pip install 'numba>=0.65,<0.69'"  # all that plain kernels need on the emulator
PLAIN = Path(__file__).parents[1] / "lab/numba_cuda"
EXTRAS = {
    "cuda": "cuda",
    "llvmlite": "cuda",
    "numba": "cuda",
    "numba_cuda": "cuda",
    "mpi4py": "mpi",
    "numba_cuda_mlir": "mlir",
    "nvshmem": "nvshmem",
    "torch": "torch",
}


def what_is_missing(error: ImportError) -> str | None:
    """In one line which package is missing and what installs it; None if it is none of an extra."""
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None or not isinstance(error, ModuleNotFoundError):
        return None
    is_plain = any(Path(frame.f_code.co_filename).parent == PLAIN for frame, _ in walk_tb(error.__traceback__))
    if package == "numba_cuda_mlir" and is_plain:
        return str(error)
    return f"{package} is not installed: {NUMBA if package == 'numba' and is_plain else install_line(extra)}"


def install_line(extra: str) -> str:
    """What to type to get an extra: nbep is on no index."""
    drivers = ", or '.[cuda12]' for a driver of CUDA 12" if extra == "cuda" else ""
    return f"pip install '.[{extra}]' in a copy of nbep's repository{drivers}"
