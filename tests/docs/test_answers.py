"""Each exercise of a notebook has an answer, and the code of the answers runs on what the notebook has defined."""

import io
import linecache
import re
from contextlib import redirect_stdout
from pathlib import Path

import nbep.notebook
import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = ("03", "04", "05", "06", "07", "08", "09", "12", "13", "14", "17")  # a run takes long, and so do its answers


def answers_of(path: Path) -> str:
    return (path.parent / "answers" / f"{path.stem}.md").read_text()


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^(?:## )?(\d+)\.", text, re.MULTILINE)]


def definitions(path: Path) -> dict:
    """What the notebook has defined and run before it breaks anything. What holds there is not tried again.

    A notebook in rungs breaks things all the way: of that, the cells count that break nothing.
    """
    names: dict = {"__name__": "answers"}
    cells = nbformat.read(path, as_version=4).cells
    first_break = next((i for i, cell in enumerate(cells) if cell.source.startswith("## Break it")), len(cells))
    before = [c.source for c in cells[:first_break] if c.cell_type == "code" and not re.search(r"\bedit\(", c.source)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nbep.notebook, "holds", lambda attempt, seeds: "")
        patch.setattr(nbep.notebook, "show", lambda *functions: None)
        patch.setattr(nbep.notebook, "fold", lambda title, *functions: None)
        for source in before:
            if "import " in source or "def " in source or re.search(r"^[A-Z_]+ = ", source, re.MULTILINE):
                run(source, names, path)
    names.update(holds=nbep.notebook.holds)
    return names


def run(source: str, names: dict, path: Path) -> None:
    """Run a piece of a file; `edit` finds the source of what it defines."""
    name = f"<{path.name} {len(linecache.cache)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    exec(compile(source, name, "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_exercise_has_an_answer(path):
    last = nbformat.read(path, as_version=4).cells[-1].source
    assert last.startswith("## Exercises")
    assert numbers(answers_of(path)) == numbers(last)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_page_of_answers_shows_something(path):
    assert "assert" in "".join(CODE.findall(answers_of(path)))


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.thorough] if p.stem[:2] in LONG else []) for p in NOTEBOOKS]
)
def test_the_answers_hold(path):
    with redirect_stdout(io.StringIO()):
        names = definitions(path)
        for source in CODE.findall(answers_of(path)):
            run(source, names, path.parent / "answers" / f"{path.stem}.md")


LINK = re.compile(r"\]\((?P<target>[^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_notebooks_and_answers_lead_somewhere(path):
    cells = nbformat.read(path, as_version=4).cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    for folder, text in ((path.parent, prose), (path.parent / "answers", CODE.sub("", answers_of(path)))):
        for link in LINK.finditer(text):
            target, _, anchor = link["target"].partition("#")
            if "://" in target:
                continue
            there = (folder / target).resolve()
            assert there.exists(), f"{link['target']}: no such file"
            assert not anchor or anchor in anchors(there), f"{link['target']}: no such heading"
