"""What an entry of the corpus is: a kernel that is broken in one place, and what its report must name.

    Race("flag: relaxed store", run, "store too weak", ("`memory` of rank 1: flag (",))

A race has kinds, any of which may be what its report finds (see nbep.emulator.reports.causes), and cells: each must be
among those that the report names, and it must name no others.  A text stands for each cell whose name it is a part of;
several texts that are as good stand in a tuple of their own.

For other errors the words count:

    Broken("a ring that nobody reads", run, DeadlockError, ("polls `memory` of rank 1: byte 64",), ("byte 0 ",))

The report's beginning (its first paragraph) must contain all of `names` and nothing of `not_names`. Say the cell by its
whole name, so that a report about another cell fails.  `run(seed)` runs a kernel once, and raises what the emulator
finds.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nbep.emulator import DataRace, EmulatorError

Name = str | tuple[str, ...]
# A slot that is used again before it has been read, from either side.
OVERWRITTEN = ("overwritten", "overwritten, heard", "unread", "unread, heard")
# What is in a slot of nbep's rings.
SLOT = (": x[", ": topk_idx[", ": topk_weights[", ": src_idx[", ": x_scales[")


class maybe(str):  # noqa: N801 - reads like a function
    """A cell that a report may name."""


class Race(NamedTuple):
    """A kernel with accesses that nothing orders. The rest is as with `Broken`."""

    name: str
    run: Callable[[int], object]
    kinds: Name
    cells: tuple[Name, ...]
    seeds: Sequence[int] = range(4)
    least: int = 1
    also: tuple[type[EmulatorError], ...] = ()

    def __str__(self) -> str:
        return self.name


class Broken(NamedTuple):
    """A broken kernel.

    name: the pattern, and what is broken in it
    run: runs it under a seed
    error: what it ends with under at least `least` of the seeds
    also: what it may end with under others: another check comes first, such as that of bytes that nobody has written
    names, not_names: see above
    """

    name: str
    run: Callable[[int], object]
    error: type[EmulatorError]
    names: tuple[Name, ...]
    not_names: tuple[str, ...] = ()
    seeds: Sequence[int] = range(4)
    least: int = 1
    also: tuple[type[EmulatorError], ...] = ()

    def __str__(self) -> str:
        return self.name


def beginning(error: Exception) -> str:
    """The first paragraph of a report: its lines before the first one that is empty or indented."""
    lines = str(error).splitlines()
    end = next((i for i, line in enumerate(lines) if not line.strip() or line.startswith(" ")), len(lines))
    return "\n".join(lines[:end])


def reports(broken: Broken | Race) -> list[EmulatorError]:
    """The errors that its seeds end with."""
    found: list[EmulatorError] = []
    for seed in broken.seeds:
        try:
            broken.run(seed)
        except EmulatorError as error:
            found.append(error)
    return found


def found_by(broken: Broken | Race) -> list[EmulatorError]:
    """The same without those that may come first; at least as many as are to be found."""
    found = [error for error in reports(broken) if type(error) not in broken.also]
    assert len(found) >= broken.least, f"{broken}: found under {len(found)} of {len(broken.seeds)} seeds"
    return found


def check(broken: Broken) -> None:
    """Whether the emulator finds what is broken, and names it under each seed that shows it."""
    for error in found_by(broken):
        said = beginning(error)
        assert type(error) is broken.error, f"{broken}: {type(error).__name__}\n{error}"
        for name in broken.names:
            assert any(text in said for text in texts(name)), f"{broken}: the beginning does not say {name!r}\n{error}"
        for name in broken.not_names:
            assert name not in said, f"{broken}: the beginning says {name!r}\n{error}"


def check_race(race: Race) -> None:
    """Whether the emulator finds a race, its kind and its cells under each seed that shows it."""
    known = [text for cell in race.cells for text in texts(cell)]
    for error in found_by(race):
        assert isinstance(error, DataRace), f"{race}: {type(error).__name__}\n{error}"
        kinds = {cause.kind for cause in error.causes}
        assert error.causes, f"{race}: no cause\n{error}"
        assert kinds <= set(texts(race.kinds)), f"{race}: {kinds}\n{error}"
        cells = [cell for cause in error.causes for cell in cause.cells]
        for expected in race.cells:
            is_there = any(text in cell for text in texts(expected) for cell in cells)
            assert is_there or isinstance(expected, maybe), f"{race}: {expected!r} is not among {cells}\n{error}"
        for cell in cells:
            assert any(text in cell for text in known), f"{race}: names {cell!r}\n{error}"


def texts(name: Name) -> tuple[str, ...]:
    return (name,) if isinstance(name, str) else name
