"""What an entry of the corpus is: a kernel that is broken in one place, and what its report must name.

    Broken("flag: relaxed store", run, DataRace, ("the store to `memory` of rank 1: byte 64",), ("byte 0 ",))

`run(seed)` runs it once, and raises what the emulator finds. The report's beginning (its first paragraph, for a race
one sentence) must contain all of `names` and nothing of `not_names`. Say the cell by its whole name, and the end that
is too weak, so that a report about another cell or the other end fails. Several texts that are as good stand in a
tuple of their own: one of them must be there.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nbep.emulator import EmulatorError

Name = str | tuple[str, ...]


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


def reports(broken: Broken) -> list[EmulatorError]:
    """The errors that its seeds end with."""
    found: list[EmulatorError] = []
    for seed in broken.seeds:
        try:
            broken.run(seed)
        except EmulatorError as error:
            found.append(error)
    return found


def check(broken: Broken) -> None:
    """Whether the emulator finds what is broken, and names it under each seed that shows it."""
    found = [error for error in reports(broken) if type(error) not in broken.also]
    assert len(found) >= broken.least, f"{broken}: found under {len(found)} of {len(broken.seeds)} seeds"
    for error in found:
        said = beginning(error)
        assert type(error) is broken.error, f"{broken}: {type(error).__name__}\n{error}"
        for name in broken.names:
            texts = (name,) if isinstance(name, str) else name
            assert any(text in said for text in texts), f"{broken}: the beginning does not say {name!r}\n{error}"
        for name in broken.not_names:
            assert name not in said, f"{broken}: the beginning says {name!r}\n{error}"
