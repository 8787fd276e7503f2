"""The pages of docs/ say what the code says, and every link on them leads somewhere."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("docs_sync", ROOT / "docs" / "sync.py")
sync = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sync)

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n.*?^```$", re.MULTILINE | re.DOTALL)
PAGES = [*sync.pages(), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sync.exhibits()]


def name_of(page: Path) -> str:
    return page.parent.name if page in sync.exhibits() else page.stem


def links(page: Path) -> list[tuple[str, str]]:
    """(text, target) of the links into the repository."""
    text = FENCE.sub("", page.read_text())
    found = [(link["text"], link["target"]) for link in LINK.finditer(text)]
    return [(text, target) for text, target in found if "://" not in target]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*sync.pages(), *sync.exhibits()], ids=name_of)
def test_the_code_on_the_page_is_that_of_the_source(page):
    """What a page executes is not executed here: `python docs/sync.py --stale` knows what needs it."""
    text = page.read_text()
    assert text == sync.up_to_date(text, still=True), f"out of date: run `python docs/sync.py {page.relative_to(ROOT)}`"


@pytest.mark.parametrize("page", sync.pages(), ids=lambda page: page.stem)
def test_every_python_block_is_taken_from_the_source_or_run(page):
    text = page.read_text()
    marked = [block for block in sync.blocks(text) if block.language in ("python", "bash") and block.kind != "holds"]
    assert len(marked) == len(re.findall(r"^```(?:python|bash)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page):
    for text, target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target}: no such file"
        if anchor:
            assert there.suffix == ".md", f"{target}: links to code go to files"
            assert anchor in anchors(there), f"{target}: no such heading"
        symbol = re.fullmatch(r"`(\w+(?:\.\w+)*)(?:\(\))?`", text)
        if there.suffix == ".py" and symbol and not text.endswith(".py`"):
            try:
                sync.find_symbol(ast.parse(there.read_text()), symbol[1])
            except LookupError:
                pytest.fail(f"[{text}]({target}): the file defines no such symbol")


def test_every_record_is_linked_from_the_page_of_records():
    linked = {target.partition("#")[0] for _, target in links(sync.DOCS / "records.md")}
    assert linked >= {f"../records/{path.name}" for path in (ROOT / "records").glob("*.md")}


def test_the_route_of_the_course_has_every_notebook_every_puzzle_and_the_page_of_each_mode():
    route = (ROOT / "docs" / "course.md").read_text().partition("\n## The route")[2].partition("\n## ")[0]
    notebooks = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r"notebooks/(\w+\.ipynb)", route)) == notebooks
    assert set(re.findall(r"\]\((\w+)\.md", route)) >= {"journey", "direct", "low_latency", "rdma", "internode"}
    found = set()
    for words in re.findall(r"puzzles? ([\d, toand]+)", route):
        for first, last in re.findall(r"(\d+)(?: to (\d+))?", words):
            found |= set(range(int(first), int(last or first) + 1))
    puzzles = list((ROOT / "puzzles").glob("[0-9]*.py"))
    assert found == set(range(1, len(puzzles) + 1))


def test_a_stale_source_block_is_noticed():
    reference = "nbep/device/protocols/channels.py::channel_task_range"
    stale = f"<!-- source: {reference} -->\n```python\nold\n```\n"
    assert sync.up_to_date(stale) == stale.replace("old\n", sync.source_of(reference))


def test_a_wrong_output_block_is_noticed():
    stale = "<!-- run -->\n```python\nprint(1 + 1)\n```\n\n<!-- output -->\n```text\n3\n```\n"
    assert sync.up_to_date(stale) == stale.replace("3\n", "2\n")


def test_a_missing_symbol_is_an_error():
    with pytest.raises(LookupError):
        sync.source_of("nbep/device/protocols/channels.py::no_such_function")


def test_what_the_text_says_of_a_run_is_executed_out_of_sight():
    said = (
        "<!-- run -->\n```bash\necho 3\n```\n\n<!-- output -->\n```text\n```\n\n<!-- holds\nassert output == {}\n-->\n"
    )
    assert sync.up_to_date(said.format("'3\\n'")).count("3") == 3
    with pytest.raises(AssertionError):
        sync.up_to_date(said.format("'4\\n'"))
    assert sync.digest_of(said.format("'3\\n'"), ROOT) != sync.digest_of(said.format("'4\\n'"), ROOT)


def test_what_an_output_has_behind_prompts_is_typed():
    program = "<!-- run -->\n```bash\npython -c 'breakpoint(); n = 4'\n```\n\n<!-- output -->\n```text\n{}```\n"
    shown = sync.up_to_date(program.format("(Pdb) p 3 + 4\n(Pdb) c\n"))
    assert "\n(Pdb) p 3 + 4\n7\n(Pdb) c\n```\n" in shown
    assert sync.up_to_date(shown) == shown
