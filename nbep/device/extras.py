"""Packages that nbep does without until something asks for them, and the line that installs them."""

from __future__ import annotations

EXTRAS = {
    "cuda": "cuda",
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
    return f"{package} is not installed: {install_line(extra)}"


def install_line(extra: str) -> str:
    """What to type to get an extra: nbep is on no index."""
    drivers = ", or '.[cuda12]' for a driver of CUDA 12" if extra == "cuda" else ""
    return f"pip install '.[{extra}]' in a copy of nbep's repository{drivers}"
