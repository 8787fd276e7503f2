"""What kernels over NVSHMEM are linked with: its device library, and three functions in front of it.

 kernel: call nbep_nvshmem_put_nbi_warp --> CALLS (NVRTC) --> inline functions of NVSHMEM's headers
                                                                  --> libnvshmem_device.a

NVSHMEM's device calls are inline functions of C++ headers, which end in calls of its device library. So NVRTC compiles
CALLS, once in a process, and nvJitLink puts kernel, calls and library together. The library defines the constants that
the host fills when a module is registered with NVSHMEM (`nbep.host.transport.nvshmem`). A kernel that is linked so
needs more registers, and a stack: the library's functions are not inlined.

nvshmem4py's own Numba bindings take another way: they define __NVSHMEM_NUMBA_SUPPORT__, which compiles the library's
code with the kernel (43 s instead of 3, and 19 MB of PTX), switches IBGDA off and passes arguments through memory.

It takes the wheel nvidia-nvshmem-cu13, which the extra nvshmem brings. Neither a GPU nor a driver is needed.

Source: NVSHMEM installation guide, "Using NVSHMEM with your applications"; its header nvshmemi_extern_constant.h
"""

import re
from functools import cache
from pathlib import Path

from nbep.device.extras import install_line
from nbep.device.jit import ComputeCapability, LinkInput

ARCHIVE = "libnvshmem_device.a"
PACKAGE, LOWEST = "nvidia-nvshmem-cu13", (3, 8)  # the headers of 3.4, which torch brings, do not compile with NVRTC
MAX_MESSAGES = 12  # lines of NVRTC in an error; one mistake in a header makes hundreds
CALLS = r"""
#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" __device__ void nbep_nvshmem_put_nbi_warp(long long dst, long long src, long long num_bytes, int pe) {
    nvshmemx_putmem_nbi_warp(reinterpret_cast<void *>(dst), reinterpret_cast<const void *>(src), num_bytes, pe);
}
extern "C" __device__ void nbep_nvshmem_quiet() { nvshmem_quiet(); }
extern "C" __device__ void nbep_nvshmem_add(long long cell, int value, int pe) {
    nvshmem_int_atomic_add(reinterpret_cast<int *>(cell), value, pe);
}
"""


class NvshmemMissing(RuntimeError):
    """NVSHMEM, or a part of it, is not installed, or too old."""

    def __init__(self, why: str):
        super().__init__(f"transport='nvshmem': {why}: {install_line('nvshmem')}")


def why_too_old(version: str) -> str | None:
    """What a version of NVSHMEM, such as 3.4.5, does not do for; None if it does."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= LOWEST:
        return None
    return f"it needs {PACKAGE} {'.'.join(map(str, LOWEST))} or later; here is {version}"


def include_folder(library: str) -> Path:
    """Where the headers of a part of CUDA are.

    Raises: NvshmemMissing, also for those of NVSHMEM if they are too old
    """
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory(library)
    if not found:
        what = "NVSHMEM is" if library == "nvshmem" else f"the headers of {library} are"
        raise NvshmemMissing(f"{what} not installed")
    version = Path(found) / "non_abi" / "nvshmem_version.h"
    if library == "nvshmem" and version.is_file():
        numbers = re.findall(r"NVSHMEM_VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION (\d+)", version.read_text())
        why = why_too_old(".".join(numbers))
        if why:
            raise NvshmemMissing(why)
    return Path(found)


def archive() -> LinkInput:
    """NVSHMEM's device library.

    Raises: NvshmemMissing
    """
    path = include_folder("nvshmem").parent / "lib" / ARCHIVE
    if not path.is_file():
        raise NvshmemMissing(f"NVSHMEM's {ARCHIVE} is not installed")
    return LinkInput(ARCHIVE, path.read_bytes(), is_archive=True)


@cache
def libraries(cc: ComputeCapability) -> tuple[LinkInput, ...]:
    """What kernels over NVSHMEM are linked with for a card.

    Raises: NvshmemMissing if NVSHMEM or headers of CUDA are not installed; RuntimeError if NVRTC refuses its headers
    """
    return LinkInput("nbep_nvshmem.ptx", compile_calls(cc), is_archive=False), archive()


def compile_calls(cc: ComputeCapability) -> bytes:
    """The PTX of CALLS. Raises: as `libraries`"""
    from cuda.bindings import nvrtc

    def check(result):
        code, *values = result
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"NVRTC: {code.name}")
        return values[0] if values else None

    folders = [include_folder(library) for library in ("nvshmem", "cccl", "cudart")]
    options = [f"-arch=compute_{cc[0]}{cc[1]}", "-rdc=true", "-std=c++17", "-default-device"]
    options += [f"-I{folder}" for folder in folders]
    program = check(nvrtc.nvrtcCreateProgram(CALLS.encode(), b"nbep_nvshmem.cu", 0, [], []))
    try:
        try:
            check(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
        except RuntimeError as error:
            log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program)))
            messages = bytes(log.ljust(1))
            check(nvrtc.nvrtcGetProgramLog(program, messages))
            lines = messages.decode(errors="replace").strip("\0\n").splitlines()
            if len(lines) > MAX_MESSAGES:
                lines[MAX_MESSAGES:] = [f"... and {len(lines) - MAX_MESSAGES} more lines"]
            raise RuntimeError("\n".join([f"NVSHMEM's headers: {error}", *lines])) from error
        ptx = b" " * check(nvrtc.nvrtcGetPTXSize(program))
        check(nvrtc.nvrtcGetPTX(program, ptx))
        return ptx.rstrip(b"\0")
    finally:
        check(nvrtc.nvrtcDestroyProgram(program))
