"""For notebooks: show a kernel's source, break it on purpose, and find the seed under which that shows.

show(barrier.barrier_block)                                    the source, as it is now
with edit(barrier.barrier_block, "add_release_sys", "add_relaxed_sys"):
    print(first_failure(attempt, range(100)))                  attempt(seed) raises if the result is wrong
fold("the barrier", barrier.barrier_block)                     the source, folded
explain(first_failure(...), "DataRace", cell="signal")         print the report, if it is the one that the page explains
boxes({"expert 0": [10, 12, ""]}, follow=12)                   a picture of memory, one value in colour
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from nbep.device import primitives
from nbep.emulator import EmulatorError
from nbep.emulator.machine.source import edited as sources
from nbep.host.faults import NetworkError
from nbep.host.ranks.timeouts import PeerTimeout

PACKAGE_PARENT = Path(__file__).resolve().parent.parent.parent
# A check that failed, the emulator, and what the host makes of a kernel's fault report.
FAULTS = (AssertionError, EmulatorError, NetworkError, PeerTimeout, ValueError)
_edited: dict[FunctionType, str] = {}  # edits inside edits start from here


def show(*functions: Any) -> None:
    """Display the source of functions or classes; outside a notebook, print it."""
    _show("", *functions)


def fold(title: str, *functions: Any) -> None:
    """The same, folded behind a title that the reader clicks; outside a notebook, print it."""
    _show(title, *functions)


def _show(title: str, *functions: Any) -> None:
    source = "\n\n".join(inspect.getsource(function) for function in functions)
    if "ipykernel" not in sys.modules:
        print(f"{title}\n\n{source}" if title else source)
        return
    from IPython.display import Markdown, display

    code = f"```python\n{source}```"
    display(Markdown(f"<details><summary>{title}</summary>\n\n{code}\n\n</details>" if title else code))


def picture(module: ModuleType) -> None:
    """Print the picture and the ledger that open a module."""
    print(inspect.cleandoc(module.__doc__ or "").partition("\n\nSource:")[0])


def boxes(rows: Mapping[str, Sequence[object]], *, follow: object = None, title: str = "") -> Any:
    """A picture of memory: a row of boxes for each name, "" for an empty one. The value `follow` has a colour."""
    from nbep.lab.trace.style import FAINT, INK, SHADE, SMALL, TAIL_COLOR, Picture

    most = max(len(row) for row in rows.values())
    picture = Picture(1.9 + 0.55 * max(most, 8), 0.34 * (len(rows) + 1.2))  # inches: the names, then the boxes
    axes = picture.subplots()
    for y, (name, row) in enumerate(rows.items()):
        axes.text(-0.15, y, name, ha="right", va="center", fontsize=SMALL, color=INK)
        for x, value in enumerate(row):
            is_followed = value != "" and value == follow
            color = TAIL_COLOR if is_followed else "white" if value == "" else SHADE
            axes.barh(y, 0.94, 0.78, x, color=color, edgecolor=FAINT, linewidth=0.7)
            text = "white" if is_followed else INK
            axes.text(x + 0.47, y, str(value), ha="center", va="center", fontsize=SMALL, color=text)
    axes.set_xlim(-0.2, max(most, 8))
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_title(title, loc="left", fontsize=SMALL, color=INK)
    axes.axis("off")
    return picture


def clean(text: str) -> str:
    """A report without the machine's paths, and without line numbers, which change with every edit."""
    text = re.sub(r"[^\s(]*site-packages/", "", text.replace(f"{PACKAGE_PARENT}/", ""))
    text = re.sub(r"\S*ipykernel_\d+/\d+\.py", "<this notebook>", text)
    return re.sub(r"(\.py|>):\d+", r"\1", text)


class Failure(NamedTuple):
    """A seed, and what the run under it ended with."""

    seed: int
    error: Exception

    def __str__(self) -> str:
        return f"seed {self.seed}, {type(self.error).__name__}: {clean(str(self.error))}"


def first_failure(attempt: Callable[[int], Any], seeds: Sequence[int], kind: type[Exception] = Exception) -> Failure:
    """Call attempt(seed) for one seed after the other until one raises a fault of that kind.

    Raises: LookupError if none does
    """
    for seed in seeds:
        try:
            attempt(seed)
        except FAULTS as error:
            if isinstance(error, kind):
                return Failure(seed, error)
    raise LookupError(f"no {kind.__name__} in {len(seeds)} runs")


def explain(failure: Failure, kind: str, *, cell: str = "", line: str = "", lines: int | None = None) -> None:
    """Print how a run failed, after a check that the report is the one that the page explains.

    kind: the name of the exception; cell, line: what the report names; lines: how many of its lines to print
    Raises: AssertionError if it is another one
    """
    text = str(failure)
    assert type(failure.error).__name__ == kind, f"a {type(failure.error).__name__}, not a {kind}: {text}"
    assert cell in text, f"the report does not name {cell}: {text}"
    assert line in text, f"the report does not show {line}: {text}"
    shown = text.splitlines()[:lines]
    print("\n".join(shown))
    if (more := len(text.splitlines()) - len(shown)) > 0:
        print(f"... and {more} lines more")


def holds(attempt: Callable[[int], Any], seeds: Sequence[int]) -> str:
    """Call attempt(seed) for all seeds, and say how many there were. What one raises is passed on."""
    for seed in seeds:
        attempt(seed)
    return f"no failure in {len(seeds)} runs"


@contextmanager
def edit(function: FunctionType, old: str, new: str) -> Iterator[None]:
    """Run with another text in a function's source, whoever calls the function. Prints what changes.

    The new text may use any primitive, also one that the module does not import.

    Raises: ValueError if `old` does not stand in the source exactly once
    """
    function = inspect.unwrap(function)  # of one with versions by type: the body that stands there
    source = _edited.get(function) or textwrap.dedent(inspect.getsource(function))
    if (count := source.count(old)) != 1:
        lines = [line.strip() for line in source.splitlines() if old.partition("\n")[0] in line]
        found = "".join(f"\n  {line}" for line in lines)
        raise ValueError(f"old: got a text that stands {count} times in {function.__name__}; must be once{found}")
    edited = source.replace(old, new)
    for line in difflib.unified_diff(source.splitlines(), edited.splitlines(), lineterm="", n=1):
        if not line.startswith(("---", "+++", "@@")):
            print(line)
    original = function.__code__
    code = _compile(edited, function)
    names = [name for name in code.co_names if name not in function.__globals__ and hasattr(primitives, name)]
    function.__globals__.update({name: getattr(primitives, name) for name in names})
    function.__code__ = code
    _edited[function] = edited
    sources[code] = code.co_firstlineno, edited.splitlines()
    try:
        yield
    finally:
        function.__code__ = original
        _edited[function] = source
        sources.pop(code, None)
        for name in names:
            del function.__globals__[name]


def _compile(source: str, function: FunctionType) -> CodeType:
    """The code of the function that `source` defines, as if it stood in the place of `function`."""
    code = function.__code__
    module = compile("\n" * (code.co_firstlineno - 1) + source, code.co_filename, "exec", dont_inherit=True)
    return next(const for const in module.co_consts if isinstance(const, CodeType) and const.co_name == code.co_name)
