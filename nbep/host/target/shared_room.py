"""Whether the file system that holds MPI's shared windows has room for them.

MPI makes a file as large as it is asked for, mostly in /dev/shm, of which a container has 64 MB by default. The file
takes no room before its pages are written, and a write that finds none ends the process with SIGBUS.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Room(NamedTuple):
    """What a rank says of the file system of its window. held: of its process, in all windows; wanted: in this one"""

    host: str
    folder: str  # "" where it is unknown
    free: int
    total: int
    held: int
    wanted: int


def room_of(window: memoryview, held: int) -> Room:
    """The room for a window of this process, which has held so much before."""
    folder = _folder_of(np.frombuffer(window, np.uint8).ctypes.data)
    if not folder:
        return Room("", "", 0, 0, held, len(window))
    found = os.statvfs(folder)
    free, total = (blocks * found.f_frsize for blocks in (found.f_bavail, found.f_blocks))
    return Room(socket.gethostname(), folder, free, total, held, len(window))


def lack_of_room(name: str, rooms: Sequence[Room]) -> str:
    """What the ranks lack who make windows together, "" if nothing. rooms: of all of them"""
    for host, folder in sorted({(room.host, room.folder) for room in rooms if room.folder}):
        there = [room for room in rooms if (room.host, room.folder) == (host, folder)]
        wanted, held = sum(room.wanted for room in there), sum(room.held for room in there)
        total, free = there[0].total, min(room.free for room in there)
        taken = max(held, total - free)  # what was made before need not have been written yet
        if wanted > total - taken:
            size = -(-(taken + wanted) // (1 << 20))
            return (
                f"{name}: {len(there)} ranks on {host} need {wanted} bytes of {folder}, which has room for "
                f"{max(0, total - taken)}; start the container with --shm-size={size}m, or enlarge the file system: "
                f"mount -o remount,size={size}m {folder}"
            )
    return ""


def _folder_of(address: int) -> str:
    """The folder of the file that is mapped at an address."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    for line in lines:
        span, *_, path = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= address < end:
            return str(Path(path).parent) if path.startswith("/") else ""
    return ""
