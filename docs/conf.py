"""Sphinx builds the site from the pages and notebooks as they are:

    sphinx-build -W --keep-going -b html -c docs . SITE

The source folder is the repository's root: so links between docs/, notebooks/ and nbep/ mean the same on the site as
in the repository. docs/index.md is the table of contents: each of its sections is a part of the navigation. Notebooks
stand below the course, exhibits below the museum, in the order of their names. Answers and the pages of the root stand
in no navigation.
records/ is no part of the site: a link to it leads to a page that shows the file.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = re.search(r'__version__ = "(.*)"', (ROOT / "nbep" / "version.py").read_text())

project = "nbep"
project_copyright = "nbep contributors"
version = release = VERSION[1] if VERSION else ""
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "examples/museum/*.md",
    "examples/museum/*/*.md",
    "notebooks/*.ipynb",
    "notebooks/answers/*.md",
    "*.md",
]
exclude_patterns = ["**/.*", "build", "dist"]
smartquotes = False
html_theme = "furo"
html_title = f"nbep {version}"
html_copy_source = html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["site.css"]

nb_execution_mode = "off"  # notebooks keep their outputs, and `notebooks/refresh.py --check` compares them
nb_merge_streams = True
myst_heading_anchors = 6  # GitHub's anchors
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Alike", "Blocks", "Returns", "Source"]  # as they stand, below their name
autodoc_typehints = "none"  # docstrings say types and shapes
autodoc_member_order = "bysource"
maximum_signature_line_length = 100

ENTRY = re.compile(r"^- \[[^\]]+\]\((?P<page>[^)#\s]+)\)", re.MULTILINE)
BELOW = {"docs/course": "../notebooks/*", "examples/museum/README": "*/README"}  # what stands below which page


def toctrees(index: str) -> dict[str, list[str]]:
    """What docs/index.md lists, by section."""
    sections = (section.partition("\n") for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:])
    return {caption: ENTRY.findall(entries) for caption, _, entries in sections}


def add_toctrees(app, docname, source) -> None:
    """What docs/index.md lists becomes the navigation."""
    trees = {":glob:\n": [BELOW[docname]]} if docname in BELOW else {}
    if docname == root_doc:
        sections = toctrees(source[0]).items()
        trees = {f":caption: {caption}\n": [page.rpartition(".")[0] for page in pages] for caption, pages in sections}
    for option, entries in trees.items():
        source[0] += "\n```{toctree}\n:hidden:\n" + option + "\n" + "\n".join(entries) + "\n```\n"
    if docname.startswith("notebooks/answers/") or "/" not in docname:
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


SECTION = re.compile(r"(Alike|Args|Attributes|Blocks|Raises|Returns|Source|Yields):")


def keep_layout(app, what, name, obj, options, lines) -> None:
    """A docstring is plain text: what has a meaning for Sphinx is taken out of it.

    With sections of Google's form napoleon makes lists of them, behind this. Without, the first paragraph is prose, and
    the rest a table that stays as it is laid out.
    """
    if any(SECTION.fullmatch(line) for line in lines):
        lines[:] = [re.sub(r"([\\*|])|_(?!\w)", r"\\\g<0>", re.sub(r"`([^`]+)`", r"``\1``", line)) for line in lines]
        return
    first = lines.index("") if "" in lines else len(lines)
    table = [f"   {line}" for line in lines[first:]]
    escaped = [re.sub(r"([\\*`|_])", r"\\\1", line) for line in lines[:first]]
    lines[:] = [*escaped, "", *(["::", "", *table, ""] if any(map(str.strip, table)) else [])]


def link_sources(app, doctree) -> None:
    """A link to a file that is no page leads to a page that shows the file."""
    from docutils import nodes
    from sphinx import addnodes

    shown = app.env.nbep_sources = getattr(app.env, "nbep_sources", {})
    docname = app.env.docname
    records = [link for link in doctree.findall(addnodes.pending_xref) if link["reftarget"].startswith("records/")]
    for link in [*doctree.findall(addnodes.download_reference), *records]:
        file = (ROOT / docname).parent.joinpath(link["reftarget"]).resolve()
        if link in records:  # names of documents, from the source folder
            file = ROOT / f"{link['reftarget']}.md"
        elif link["reftarget"].startswith("/"):
            file = ROOT / link["reftarget"][1:]
        path = file.relative_to(ROOT).as_posix()
        shown.setdefault(docname, set()).add(path)
        address = app.builder.get_relative_uri(docname, f"source/{path}")
        link.replace_self(nodes.reference("", "", *link.children, refuri=address, internal=True))


def show_sources(app):
    """The pages of the files that link_sources has met: (name, what the template gets, template)."""
    from html import escape

    for path in sorted(set().union(*getattr(app.env, "nbep_sources", {}).values())):
        language = "python" if path.endswith(".py") else "text"
        code = app.builder.highlighter.highlight_block((ROOT / path).read_text(), language, linenos=False)
        yield f"source/{path}", {"title": path, "body": f"<h1>{escape(path)}</h1>{code}"}, "page.html"


SCORER = """\
const PRIMITIVES = new Set(%s);
var Scorer = {
    score: ([docname, , , , score]) => {
        const words = (new URLSearchParams(window.location.search).get("q") ?? "").trim().split(/\\s+/);
        const first = words.length === 1 ? "docs/primitives" : "docs/numba_cuda";
        return words.some((word) => PRIMITIVES.has(word)) && docname === first ? score + 100 : score;
    },
    objNameMatch: 11, objPartialMatch: 6, objPrio: {0: 15, 1: 5, 2: -5}, objPrioDefault: 0,
    title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
"""


def rank_primitives(app, config) -> None:
    """A search for a primitive has the page of primitives first; one for "syncthreads missing" the page for Numba.

    The other numbers are Sphinx's own.
    """
    import json

    from nbep.device import primitives

    path = Path(app.doctreedir) / "scorer.js"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SCORER % json.dumps(sorted(primitives.__all__)))
    config.html_search_scorer = str(path)


def write_front_page(app, exception) -> None:
    """The address of the site itself leads to its index."""
    if exception is None and app.builder.name == "html":
        page = '<!doctype html><title>nbep</title><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(page)


def setup(app) -> None:
    app.connect("config-inited", rank_primitives)
    app.connect("source-read", add_toctrees)
    app.connect("autodoc-process-docstring", keep_layout, priority=400)  # before napoleon
    app.connect("doctree-read", link_sources, priority=100)  # before Sphinx copies the files
    app.connect("html-collect-pages", show_sources)
    app.connect("build-finished", write_front_page)
