"""What tests ask of an exhibit of examples/museum."""

from pathlib import Path
from typing import NamedTuple

from entries import beginning

from nbep.check import Run, perform

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


def assert_repaired_form_is_clean(exhibit: Exhibit, seeds: range) -> None:
    found = [perform(exhibit.run(seed, model, repaired=1)) for seed in seeds for model in MODELS]
    assert found == [None] * len(found)
