"""What tests ask of an exhibit of examples/museum."""

import re
from pathlib import Path
from typing import NamedTuple

from entries import beginning

from nbep.lab.check import Run, perform

MUSEUM = Path(__file__).resolve().parents[2] / "examples" / "museum"
MODELS = ("checked", "delayed")


class Exhibit(NamedTuple):
    """names: what the first line says, or, of a deadlock, the first lines; strategy, seed: a run that shows it

    lines: parts of the lines of code that the report points to
    """

    name: str
    kind: str
    names: tuple[str, ...]
    strategy: str = "uniform"
    seed: int = 0
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        return MUSEUM / self.name / "program.py"

    def places(self, code: str) -> list[str]:
        """`program.py:12`, of the one line that has this code. A thread in a loop may also be at the next line."""
        found = [(n, line) for n, line in enumerate(self.path.read_text().splitlines(), 1) if code in line]
        ((number, line),) = found
        return [f"{self.path.name}:{n} " for n in (number, number + 1)[: 1 + line.strip().startswith("while")]]

    def run(self, seed: int, model: str = "checked", **values: int) -> Run:
        return Run(str(self.path), tuple(values.items()), seed, self.strategy, model)


def assert_first_lines_name_the_cause(exhibit: Exhibit, seed: int) -> None:
    finding = perform(exhibit.run(seed))
    assert finding is not None
    assert finding.kind == exhibit.kind, finding
    first = beginning(finding.message) if exhibit.kind == "deadlock" else finding.first_line
    for name in exhibit.names:
        assert name in first, f"{name}\n{first}"
    report = first if exhibit.kind == "deadlock" else finding.message
    for code in exhibit.lines:
        assert any(place in report for place in exhibit.places(code)), f"{code}\n{report}"


def repaired(program: Path, folder: Path) -> Path:
    """A program with its repair.diff applied, as a file of a folder."""
    lines = program.read_text().splitlines(keepends=True)
    result: list[str] = []
    at = 0
    for line in (program.parent / "repair.diff").read_text().splitlines(keepends=True)[2:]:
        if hunk := re.match(r"@@ -(\d+)", line):
            result += lines[at : int(hunk[1]) - 1]
            at = int(hunk[1]) - 1
        elif line[0] == "+":
            result.append(line[1:])
        else:
            assert lines[at] == line[1:], f"repair.diff does not fit line {at + 1} of {program}"
            result += [line[1:]] * (line[0] == " ")
            at += 1
    path = folder / f"{program.parent.name}.py"
    path.write_text("".join([*result, *lines[at:]]))
    return path


def assert_repaired_form_is_clean(exhibit: Exhibit, seeds: range, folder: Path) -> None:
    path = repaired(exhibit.path, folder)
    runs = [Run(str(path), (), seed, exhibit.strategy, model) for seed in seeds for model in MODELS]
    found = [perform(run) for run in runs]
    assert found == [None] * len(found)
