"""The site's navigation has every page once, and the API reference every public name. No Sphinx is needed here."""

import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import nbep
from nbep import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
conf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conf)
SECTIONS = conf.toctrees((DOCS / "index.md").read_text())


def test_every_page_and_every_notebook_is_in_one_place_of_the_navigation():
    listed = Counter((DOCS / page).resolve() for pages in SECTIONS.values() for page in pages)
    for page, pattern in conf.BELOW.items():
        folder = (ROOT / page).parent
        listed.update(path.resolve() for path in folder.glob(f"{pattern}.*") if path.suffix in (".md", ".ipynb"))
    there = {path for pattern in conf.include_patterns for path in ROOT.glob(pattern)}
    besides = {DOCS / "index.md", *ROOT.glob("*.md"), *ROOT.glob("notebooks/answers/*.md")}
    assert listed == Counter(there - besides)


def test_links_between_pages_lead_to_pages_of_the_site():
    """Sphinx knows no other page; a link to one that is left out is a warning, which is an error there."""
    pages = {path for pattern in conf.include_patterns for path in ROOT.glob(pattern)}
    shown = {*pages, *ROOT.glob("records/**/*.md")}
    lost = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in sorted(pages)
        if page.suffix == ".md"
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+\.(?:md|ipynb))", page.read_text())
        if (page.parent / target).resolve() not in shown
    ]
    assert lost == []


def test_the_navigation_has_four_groups_and_at_most_29_pages():
    assert list(SECTIONS) == ["Learn", "Use", "Understand", "Look up"]
    assert sum(map(len, SECTIONS.values())) <= 29  # 28, and the one for maintainers of frameworks
    assert sum(len((DOCS / page).read_text().split()) for pages in SECTIONS.values() for page in pages) <= 70_000


def test_the_api_reference_has_every_public_name_once():
    names = re.findall(r"^\.\. auto\w+:: nbep\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert Counter(names) == Counter(nbep.__all__)


def test_the_command_line_page_has_every_command():
    commands = re.findall(r"^<!-- options: (\S+) -->$", (DOCS / "command_line.md").read_text(), re.MULTILINE)
    groups = next(action.choices for action in cli._parser()._actions if action.dest == "command")
    expected = [name for name in groups if name != "bench"] + [f"bench/{name}" for name in cli.BENCHMARKS]
    assert Counter(commands) == Counter(expected)


@pytest.mark.parametrize(
    ("docstring", "shown"),
    [
        ("One line with *stars* and `ticks`.", [r"One line with \*stars\* and \`ticks\`.", ""]),
        ("Say it.\n\nArgs:  x *a*", ["Say it.", "", "::", "", "   ", "   Args:  x *a*", ""]),
    ],
    ids=["one paragraph", "with a table"],
)
def test_a_docstring_stays_plain_text(docstring, shown):
    lines = docstring.splitlines()
    conf.keep_layout(None, "function", "f", None, None, lines)
    assert lines == shown


@pytest.mark.skipif(shutil.which("node") is None, reason="the order of what a search finds is JavaScript")
@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("ld_acquire_sys_s32", "primitives"),
        ("syncthreads", "primitives"),
        ("syncthreads missing", "numba_cuda"),
        ("memory order", ""),
    ],
)
def test_a_search_has_the_page_first_that_answers_it(tmp_path, query, first):
    """Of pages that have all its words: Sphinx finds no others."""
    config = type("Config", (), {})()
    conf.rank_primitives(type("App", (), {"doctreedir": str(tmp_path)}), config)
    pages = [page.stem for page in DOCS.glob("*.md") if all(word in page.read_text() for word in query.split())]
    found = f"""
        const window = {{location: {{search: "?q=" + encodeURIComponent("{query}")}}}};
        {Path(config.html_search_scorer).read_text()}
        console.log({json.dumps(pages)}.filter((page) => Scorer.score(["docs/" + page, "", "", "", 5]) > 5).join());
    """
    assert subprocess.run(["node", "-e", found], capture_output=True, text=True, check=True).stdout == f"{first}\n"


def test_no_block_of_code_goes_on_out_of_sight():
    """In a browser: of 64 blocks of notebook 4 none is wider than its frame, at 1440, 1100 and 800 pixels."""
    style = (DOCS / "static" / "site.css").read_text()
    assert conf.html_css_files == ["site.css"]
    assert "white-space: pre-wrap" in style
    assert "overflow-wrap: anywhere" in style


def test_the_front_page_shows_the_picture_of_a_run():
    assert "](pictures/story.png)" in (DOCS / "index.md").read_text()


SECTIONS_OF_DOCSTRINGS = ("Args", "Returns", "Raises", "Blocks", "Source", "Attributes")
EXPORTING = (
    "nbep",
    "nbep.lang",
    "nbep.emulator",
    "nbep.lab.check",
    "nbep.lab.trace",
    "nbep.lab.puzzle",
    "nbep.numba_cuda",
)


def with_members(name: str, obj: object) -> list[tuple[str, object]]:
    """A function; or a class with its public methods."""
    members = inspect.getmembers(obj, callable) if isinstance(obj, type) else []
    return [(name, obj), *((f"{name}.{n}", member) for n, member in members if n[0] != "_")]


def documented() -> list[tuple[str, object]]:
    """What docs/api.md lists, and what nbep's packages export."""
    packages = [importlib.import_module(package) for package in (*EXPORTING, "nbep.debug")]
    found = []
    for name in re.findall(r"auto(?:class|function|exception):: (nbep[\w.]+)", (DOCS / "api.md").read_text()):
        obj = nbep
        for part in name.split(".")[1:]:
            obj = getattr(obj, part)
        found += with_members(name, obj)
    for package in packages:
        for name in getattr(package, "__all__", [name for name in vars(package) if name[0] != "_"]):
            obj = getattr(package, name)
            if callable(obj) and (getattr(obj, "__module__", "") or "").startswith("nbep"):
                found += with_members(f"{package.__name__}.{name}", obj)
    return list({id(obj): (name, obj) for name, obj in reversed(found)}.values())


def arguments_of(obj: object) -> set[str]:
    """Of a function, or of what makes an object of a class."""
    try:
        called = obj.__init__ if isinstance(obj, type) else obj
        return set(inspect.signature(called).parameters) | set(getattr(obj, "__annotations__", {}))
    except ValueError:  # of C
        return set()


@pytest.mark.parametrize(("name", "obj"), documented(), ids=lambda value: value if isinstance(value, str) else "")
def test_public_docstrings_have_sections_of_googles_form(name, obj):
    """Nothing behind the word that opens one, and each entry of Args is an argument: the site makes lists of them."""
    text = inspect.getdoc(obj) or ""
    beside = [line for line in text.splitlines() if re.match(rf"({'|'.join(SECTIONS_OF_DOCSTRINGS)}): *\S", line)]
    assert beside == []
    known = arguments_of(obj)
    names = [line.partition(":")[0].split(", ") for line in text.splitlines() if re.match(r"\w+(, \w+)*: ", line)]
    assert not [one for one in names if known & set(one)], "belongs into Args, or Attributes"
    args = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
    if args:
        entries = re.findall(r"^    (\w+(?:, \w+)*):", args[1], re.MULTILINE)
        assert entries
        assert {part for entry in entries for part in entry.split(", ")} <= known
        loose = [line for line in args[1].splitlines() if re.match(r"    \S", line) and ":" not in line]
        assert loose == []


def test_the_docstring_of_buffer_is_a_screen():
    assert len(nbep.Buffer.__doc__.splitlines()) <= 55
