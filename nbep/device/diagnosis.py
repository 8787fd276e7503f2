"""What a compiler's error means to the writer of a kernel: the cause, and the line, in few words.

Numba wraps what has failed in a report for every overload that it has tried, and where the failing call is in a helper,
the report does not say where. Python's own frames do.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

NO_MEMORY = "a kernel can make no list, dict, set or string: what is in them needs memory that grows"
CAUSES = tuple(
    (re.compile(pattern, re.MULTILINE), text)
    for pattern, text in (
        (r"^\s*TypingError: (\w+ needs .*?)(?: \(at .*\))?$", "{0}"),
        (
            r"Untyped global name '(\w+)': Cannot determine Numba type of <class 'function'>",
            "{0} is a plain Python function; a kernel calls those that @device_function decorates",
        ),
        (r"NameError: (name '\w+' is not defined)", "{0}"),
        (r"<ufunc '(\w+)'>", "np.{0}: a kernel cannot call NumPy's functions; those of math it can"),
        (
            r">>> (?:set|get)item\(int64",
            "an address is a number: memory is read and written by primitives, such as ld_weak_s32(x + 4 * i)",
        ),
        (r"NRT required but not enabled|DictType|unicode_type|\bstr\(", NO_MEMORY),
        (r"(missing a required argument: '\w+'|too many positional arguments)", "{0}"),
        (r"return_dynamic_user_exc|Exception matching", "a kernel can neither raise nor catch exceptions; see trap()"),
    )
)
# As nbep.device.compilers.kinds and Numba's reports write them; the first is the innermost one.
PLACE = re.compile(
    r"\(at (?P<path>.+):(?P<line>\d+)\)$|^\s*File \"(?P<file>[^\"]+)\", line (?P<number>\d+)", re.MULTILINE
)


def explain(error: Exception, function: Callable) -> str:
    """Why a kernel does not compile, and at which line of it or of a helper; in Numba's words where none are known."""
    text = f"{type(error).__name__}: {error}"
    found = next(((match, words) for pattern, words in CAUSES if (match := pattern.search(text))), None)
    cause = _first_words(error) if found is None else found[1].format(*found[0].groups())
    code = function.__code__
    path, line = _named_place(text) or place_of(_frames(error)) or (code.co_filename, code.co_firstlineno)
    source = linecache.getline(path, line).strip()
    return f"{cause}\n  at {path}:{line}" + (f"\n    {source}" if source else "")


def _first_words(error: Exception) -> str:
    """Numba's text without the step that failed, and without the lines of source that it repeats."""
    if not type(error).__module__.startswith("numba"):
        return f"{type(error).__name__} in Numba: {error}"
    return re.sub(r"Failed in cuda mode pipeline \(step: .*\)\n", "", str(error)).partition('\n\nFile "')[0]


def place_of(frames: Iterator[FrameType]) -> tuple[str, int] | None:
    """File and line that Numba works on, from frames of Numba, the innermost first."""
    for frame in frames:
        for owner in ("self", "inst"):
            loc: Any = getattr(frame.f_locals.get(owner), "loc", None)
            filename = getattr(loc, "filename", None)
            if isinstance(filename, str) and (Path(filename).is_file() or filename in linecache.cache):
                return filename, loc.line
    return None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(error: Exception) -> Iterator[FrameType]:
    """The frames that an exception has passed through, the innermost first."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    return reversed(frames)


def _named_place(text: str) -> tuple[str, int] | None:
    """The first place that the error's text names, if it is a file of the user's."""
    for match in PLACE.finditer(text):
        path = match["path"] or str(Path(match["file"]).resolve())
        if "site-packages" not in path:
            return path, int(match["line"] or match["number"])
    return None
