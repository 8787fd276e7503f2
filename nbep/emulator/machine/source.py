"""Finds the line of kernel code behind a running or parked thread.

A kernel calls a primitive, the primitive calls the emulator; the host goes through its runtime. The frame worth naming
is the innermost one outside of these: files say of themselves that no kernel stands in them (`no_kernel_in`).
Who waits in a loop that others call to wait (`wait_loop`) stands at the line that calls it.
"""

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TypeVar

_PACKAGE = Path(__file__).resolve().parent.parent.parent
_libraries = [_PACKAGE / "emulator"]
wait_loops: dict[str, str] = {}  # functions that wait for whoever calls them -> their source file
polling: set[str] = set()  # names of the functions in which threads poll
Function = TypeVar("Function", bound=Callable)
_HERE = Path(__file__).parent.parent.parent  # the package, as the names of its files begin


class _Libraries(dict[str, bool]):
    """Name of a source file -> whether no kernel stands there. (A code object would take long to hash.)"""

    def __missing__(self, name: str) -> bool:
        path = Path(name).resolve()
        is_library = self[name] = any(part in (path, *path.parents) for part in _libraries)
        return is_library


_is_library = _Libraries()


def no_kernel_in(path: str) -> None:
    """Say that no kernel stands in a file, or in any of a folder."""
    _libraries.append(Path(path).resolve())
    _is_library.clear()


def polls(function: Function) -> Function:
    """Say that threads poll in a function."""
    polling.add(function.__name__)
    return function


def wait_loop(function: Function) -> Function:
    """Say that a function waits for whoever calls it: reports name the line that does."""
    wait_loops[function.__name__] = function.__code__.co_filename
    return polls(function)


def _is_hidden(code: CodeType) -> bool:
    """Whether no kernel stands in this code, or one that is named by the line that calls it."""
    return _is_library[code.co_filename] or wait_loops.get(code.co_name) == code.co_filename


# Code that does not stand in its file: its first line, and what it was made from.
edited: dict[CodeType, tuple[int, list[str]]] = {}

# By file and line: what a tool has changed there for now, so that no report shows the source as if it had run.
marks: dict[tuple[str, int], str] = {}

# Where a thread stands: a code object and the byte offset of its current instruction.
Site = tuple[CodeType, int]


def kernel_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame at or outside `frame` that belongs to a kernel; None when there is none."""
    while frame is not None and _is_hidden(frame.f_code):
        frame = frame.f_back
    return frame


def site_of(frame: FrameType | None) -> Site | None:
    """The instruction that a frame's kernel code executes: cheap to take, and comparable between threads."""
    while frame is not None:
        code = frame.f_code
        # As `_is_hidden`, written out: most primitive calls of a run come by here, through two frames or three.
        if not _is_library[code.co_filename] and wait_loops.get(code.co_name) != code.co_filename:
            return code, frame.f_lasti
        frame = frame.f_back
    return None


def is_same_call(one: Site | None, other: Site | None) -> bool:
    """Whether sites are of one call. A frame stands at the call, or at the caches behind it once calls are traced."""
    if one is None or other is None or one[0] is not other[0]:
        return one == other
    places = list(one[0].co_positions())
    return places[one[1] // 2] == places[other[1] // 2]


def call_chain(frame: FrameType | None, depth: int = 4) -> list[Site]:
    """The site of a frame's kernel code and of its callers up to the kernel function, innermost first."""
    sites: list[Site] = []
    frame = kernel_frame(frame)
    while frame is not None and len(sites) < depth:
        sites.append((frame.f_code, frame.f_lasti))
        frame = kernel_frame(frame.f_back)
    return sites


def raising_chain(trace: TracebackType | None, depth: int = 4) -> list[Site]:
    """The same of where an error was raised, once its frames are gone."""
    sites: list[Site] = []
    while trace is not None:
        if not _is_hidden(trace.tb_frame.f_code):
            sites.append((trace.tb_frame.f_code, trace.tb_lasti))
        trace = trace.tb_next
    return sites[::-1][:depth]


def frames_of_kernel(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """The frames of kernel code at and outside `frame`, the outermost first, each with its current instruction."""
    frames = []
    while frame is not None:
        if not _is_library[frame.f_code.co_filename]:
            frames.append((frame, frame.f_lasti))
        frame = frame.f_back
    return frames[::-1]


def caller_site(frame: FrameType | None) -> Site | None:
    """Where the user's code stands that has called nbep; None if there is none, as in a scenario of nbep's."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in (_PACKAGE.name, "torch") and package not in sys.stdlib_module_names:
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None


def line_number(site: Site) -> int:
    code, instruction = site
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return line


def describe_site(site: Site | None) -> str:
    """`file:line (function)` of a site.

    A file of nbep is `nbep/...`, wherever it is installed; others are relative to the working directory, if below it.
    """
    if site is None:
        return "an unknown line"
    code, _ = site
    path = Path(code.co_filename)
    folder = _HERE.parent if path.is_relative_to(_HERE) else Path.cwd()
    file = path.relative_to(folder) if path.is_relative_to(folder) else code.co_filename
    return f"{file}:{line_number(site)} ({code.co_name})"


def source_line(site: Site | None) -> str:
    """What stands in the line of a site, and what of it is changed; nothing if its source cannot be had."""
    if site is None:
        return ""
    code, _ = site
    first, lines = edited.get(code, (1, None))
    number = line_number(site)
    if lines is None:
        mark = marks.get((code.co_filename, number))
        return linecache.getline(code.co_filename, number).strip() + (f"  <- broken: {mark}" if mark else "")
    return lines[number - first].strip() if 0 <= number - first < len(lines) else ""
