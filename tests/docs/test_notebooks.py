"""Notebooks have one order, keep their outputs, and hold nothing of the machine that they ran on. CI executes them."""

import ast
import re
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
sys.path.insert(0, str(FOLDER))
from refresh import CHECK, HIDDEN  # noqa: E402

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ORDER = ["The picture", "The code", "Run it", "Break it", "Mend it", "Exercises"]
RUNGS = ["Why this kernel exists", "The real source", "Test yourself", "Exercises"]  # the steps come behind the first


def load(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def output_texts(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [str(output.get("text") or output.get("data", {}).get("text/plain", "")) for output in outputs]


def test_there_are_these():
    assert [path.stem for path in NOTEBOOKS] == [
        "00_the_flag_that_overtook",
        "01_barrier",
        "02_layout",
        "03_notify",
        "04_dispatch",
        "05_combine",
        "06_fp8_and_ue8m0",
        "07_low_latency_dispatch",
        "08_low_latency_combine",
        "09_hook_and_double_buffer",
        "10_one_rdma_write",
        "11_what_rdma_does_not_promise",
        "12_internode_notify",
        "13_internode_dispatch",
        "14_internode_combine",
        "15_cached_notify",
        "16_casts",
        "17_without_rings",
        "18_one_buffer_for_both",
    ]


def headings_of(path: Path) -> list[str]:
    return [
        heading.partition(":")[0]
        for cell in load(path).cells
        if cell.cell_type == "markdown"
        for heading in re.findall(r"^## (.*)$", cell.source, re.MULTILINE)
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_sections_come_in_order(path):
    headings = headings_of(path)
    if headings[0] == RUNGS[0]:
        steps = [heading for heading in headings if heading.startswith("Step ")]
        assert headings[1 : 1 + len(steps)] == [f"Step {number}" for number in range(1, len(steps) + 1)]
        assert [heading for heading in headings if heading in RUNGS] == RUNGS
    else:
        assert list(dict.fromkeys(headings)) == ORDER


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_answers_to_questions_are_folded(path):
    if headings_of(path)[0] == RUNGS[0]:
        text = "\n".join(cell.source for cell in load(path).cells if cell.cell_type == "markdown")
        questions = text.partition("## Test yourself")[2].partition("## Exercises")[0]
        assert questions.count("<details>") >= 3
        assert text.count("<details>") == text.count("</details>") >= 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_who_is_asked_what_will_happen_runs_it_next_and_finds_the_answer_folded(path):
    cells = [cell for cell in load(path).cells if not cell.source.startswith(CHECK)]
    for i in [i for i, cell in enumerate(cells) if "**Predict.**" in cell.source]:
        assert cells[i + 1].cell_type == "code"
        assert cells[i + 2].source.startswith("<details><summary>What happened</summary>")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_and_name_no_machine(path):
    notebook = load(path)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    texts = output_texts(notebook)
    assert any("no failure in" in text for text in texts)
    assert not [text for text in texts if re.search(r"/(tmp|home|work|root|usr)/|site-packages|ipykernel", text)]
    for cell in notebook.cells:
        assert cell.metadata == (HIDDEN if cell.source.startswith(CHECK) else {}), "run `python notebooks/refresh.py`"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_the_text_says_of_a_run_is_asserted_in_cells_that_a_reader_does_not_see(path):
    for cell in load(path).cells:
        if cell.cell_type == "code":
            has_asserts = any(
                isinstance(node, ast.Assert)
                for statement in ast.parse(cell.source).body
                if not isinstance(statement, ast.FunctionDef | ast.ClassDef)
                for node in ast.walk(statement)
            )
            assert not has_asserts or cell.source.startswith(CHECK), f"the first line must be {CHECK!r}:\n{cell.source}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_source_is_shown_and_not_pasted(path):
    """What `show` and `fold` display stands in the repository as it is displayed."""
    shown = [
        source
        for cell in load(path).cells
        for output in cell.get("outputs", [])
        for source in re.findall(r"```python\n(.*?)```", output.get("data", {}).get("text/markdown", ""), re.DOTALL)
    ]
    package = path.parents[1] / "nbep"
    sources = [
        source.read_text() for folder in ("device", "host/low_latency") for source in (package / folder).rglob("*.py")
    ]
    pieces = [piece for text in shown for piece in text.split("\n\n\n")]
    assert pieces
    for piece in pieces:
        assert any(piece.strip("\n") in source for source in sources), f"run `python notebooks/refresh.py`:\n{piece}"


def shown_functions(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell shows of the source, or defines."""
    if cell.cell_type != "code":
        return []
    folded = re.findall(r"\bfold\(\s*\"[^\"]*\",(.*?)\)", cell.source, re.DOTALL)
    names = [name.strip() for call in folded for name in call.split(",") if name.strip()]
    return [*shown_of_source(cell), *names, *re.findall(r"^def (\w+)\(", cell.source, re.MULTILINE)]


def shown_of_source(cell: nbformat.NotebookNode) -> list[str]:
    calls = re.findall(r"\b(?:show|fold)\((.*?)\)", cell.source, re.DOTALL)
    return [name.strip() for call in calls for name in call.split(",") if name.strip()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_broken_was_shown_before(path):
    shown: set[str] = set()
    for cell in load(path).cells:
        shown.update(shown_functions(cell))
        assert set(re.findall(r"\bedit\(\s*([\w.]+),", cell.source)) <= shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_run_comes_before_ten_functions(path):
    cells = load(path).cells
    first_run = next(i for i, cell in enumerate(cells) if "nbep.spawn(" in cell.source)
    assert len([name for cell in cells[:first_run] for name in shown_of_source(cell)]) < 10


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_has_a_picture_of_a_run(path):
    outputs = [output for cell in load(path).cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
