"""Finds the line of kernel code behind a running or parked thread.

A kernel calls a primitive, the primitive calls the emulator.  The frame worth naming is the innermost one outside both,
and no frame of `by_network` that only chooses a function.
"""

import linecache
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = Path(__file__).resolve().parent.parent.parent
_LIBRARY = (_PACKAGE / "emulator", _PACKAGE / "device" / "primitives", _PACKAGE / "device" / "jit.py")
_is_library: dict[CodeType, bool] = {}

# Code that does not stand in its file: its first line, and what it was made from.
edited: dict[CodeType, tuple[int, list[str]]] = {}

# Where a thread stands: a code object and the byte offset of its current instruction.
Site = tuple[CodeType, int]


def kernel_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame at or outside `frame` that belongs to a kernel; None when there is none."""
    while frame is not None:
        code = frame.f_code
        library = _is_library.get(code)
        if library is None:
            path = Path(code.co_filename).resolve()
            library = _is_library[code] = any(part in (path, *path.parents) for part in _LIBRARY)
        if not library:
            return frame
        frame = frame.f_back
    return None


def site_of(frame: FrameType | None) -> Site | None:
    """The instruction that a frame's kernel code executes: cheap to take, and comparable between threads."""
    frame = kernel_frame(frame)
    return None if frame is None else (frame.f_code, frame.f_lasti)


def call_chain(frame: FrameType | None, depth: int = 4) -> list[Site]:
    """The site of a frame's kernel code and of its callers up to the kernel function, innermost first."""
    sites: list[Site] = []
    frame = kernel_frame(frame)
    while frame is not None and len(sites) < depth:
        sites.append((frame.f_code, frame.f_lasti))
        frame = kernel_frame(frame.f_back)
    return sites


def line_number(site: Site) -> int:
    code, instruction = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return line


def describe_site(site: Site | None) -> str:
    """`file:line (function)` of a site, with the file relative to the working directory when it lies below."""
    if site is None:
        return "an unknown line"
    code, _ = site
    path = Path(code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line_number(site)} ({code.co_name})"


def source_line(site: Site | None) -> str:
    """What stands in the line of a site; nothing if its source cannot be had."""
    if site is None:
        return ""
    code, _ = site
    first, lines = edited.get(code, (1, None))
    number = line_number(site)
    if lines is None:
        return linecache.getline(code.co_filename, number).strip()
    return lines[number - first].strip() if 0 <= number - first < len(lines) else ""
