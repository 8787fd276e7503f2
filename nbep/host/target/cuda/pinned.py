"""Memory of the host that processes share and their GPUs map.

new memory, or a peer's file descriptor -> map -> register: pages stay where they are, and all GPUs of the process see
them -> the device's address -> use -> unregister -> unmap

The memory has no name. When the last process that has it mapped ends, however it ends, it is free: nothing is left in
/dev/shm, and how large that is does not matter.

Source: memfd_create(2), proc_meminfo(5); CUDA Driver API, "Memory Management" (cuMemHostRegister)
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import ExitStack
from pathlib import Path

from cuda.bindings import driver as cu

from nbep.host.target.cuda.driver import check


def create(num_bytes: int, name: str, undo: ExitStack) -> int:
    """New memory, all zeros: its file descriptor. Its pages are taken when it is registered.

    Raises: RuntimeError if the host does not have so much; OSError if it has no such files
    """
    available = available_bytes()
    if num_bytes > available:
        raise RuntimeError(f"no {num_bytes} bytes of the host's memory for {name}: {available} are available")
    fd = os.memfd_create(f"nbep {name}")
    undo.callback(os.close, fd)
    os.ftruncate(fd, num_bytes)
    return fd


def available_bytes() -> int:
    """Memory of the host that can be had without moving other memory to disk."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


_registered: dict[int, mmap.mmap] = {}  # by address: a mapping ends with its last reference, while GPUs may use it


def map_memory(fd: int, num_bytes: int, what: str, undo: ExitStack) -> tuple[mmap.mmap, int]:
    """The memory as this process sees it, and the address at which its GPU does."""
    mapped = mmap.mmap(fd, num_bytes)
    undo.callback(mapped.close)
    host = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    flags = cu.CU_MEMHOSTREGISTER_PORTABLE | cu.CU_MEMHOSTREGISTER_DEVICEMAP
    check(f"cuMemHostRegister of {num_bytes} bytes for {what}", cu.cuMemHostRegister(host, num_bytes, flags))
    _registered[host] = mapped

    def unregister() -> None:
        check("cuMemHostUnregister", cu.cuMemHostUnregister(host))
        del _registered[host]

    undo.callback(unregister)
    return mapped, int(check("cuMemHostGetDevicePointer", cu.cuMemHostGetDevicePointer(host, 0)))
