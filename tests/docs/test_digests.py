"""A page or a notebook is stale once its code, its outputs, or a file of nbep that it imports or names has changed."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sync = load(ROOT / "docs" / "sync.py", "docs_sync")
import digests  # noqa: E402

PAGE = """# A page

<!-- run -->
```python
from nbep.user import f
print(f())
```

<!-- output -->
```text
1
```
"""
FILES = {
    "nbep/__init__.py": 'from . import always\nregister("views", "nbep.viewed:VIEW")\n',
    "nbep/viewed.py": "VIEW = 1\n",
    "nbep/__init__.pyi": "from .lazy import Buffer\n",
    "nbep/lazy.py": "Buffer = 1\n",
    "nbep/always.py": "",
    "nbep/other.py": "x = 2\n",
    "nbep/used.py": "x = 1\n",
    "nbep/user.py": 'from .used import x\n\n\ndef f():\n    registered("views")\n    return x\n',
    "docs/examples/program.py": "import beside\n",
    "docs/examples/beside.py": "",
    "puzzles/01_flag.py": "",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A small repository; a function that writes one of its files, and forgets what was read before."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for cached in digests.modules, digests.text_of, digests.loaded_by, digests.homes, digests.registrations:
            cached.cache_clear()
        return path

    monkeypatch.setattr(digests, "ROOT", tmp_path)
    for name, text in FILES.items():
        write(name, text)
    yield write
    for cached in digests.modules, digests.text_of, digests.loaded_by, digests.homes, digests.registrations:
        cached.cache_clear()


def executed_page(tree, text):
    page = tree("docs/page.md", text)
    page.write_text(sync.with_digest(text, page.parent))
    assert not sync.is_stale(page)
    return page


@pytest.mark.parametrize(
    "name", ["nbep/used.py", "nbep/user.py", "nbep/viewed.py", "nbep/always.py", "nbep/__init__.py"]
)
def test_a_page_is_stale_when_a_file_that_it_imports_has_changed(tree, name):
    page = executed_page(tree, PAGE)
    tree(name, FILES[name] + "y = 3\n")
    assert sync.is_stale(page)


@pytest.mark.parametrize(("name", "text"), [("nbep/other.py", "x = 3\n"), ("nbep/used.py", "# one\n\nx = 1\n")])
def test_a_page_is_not_stale_when_another_file_or_a_comment_has_changed(tree, name, text):
    page = executed_page(tree, PAGE)
    tree(name, text)
    assert not sync.is_stale(page)


@pytest.mark.parametrize(("old", "new"), [("f())", "f() + 1)"), ("1\n```", "2\n```")], ids=["code", "output"])
def test_a_page_is_stale_when_its_code_or_its_output_was_edited(tree, old, new):
    page = executed_page(tree, PAGE)
    text = page.read_text()
    page.write_text(text.replace(old, new))
    assert sync.is_stale(page)
    page.write_text(text.replace("# A page", "# A better title"))
    assert not sync.is_stale(page)


@pytest.mark.parametrize(
    "name", ["docs/examples/program.py", "docs/examples/beside.py", "nbep/other.py", "puzzles/01_flag.py"]
)
def test_a_command_depends_on_the_files_that_it_names_on_all_of_nbep_and_on_puzzles(tree, name):
    page = executed_page(tree, "<!-- run -->\n```bash\nnbep check docs/examples/program.py\n```\n")
    tree(name, FILES[name] + "y = 3\n")
    assert sync.is_stale(page)


@pytest.mark.parametrize("code", ["from nbep import Buffer", "import nbep\nnbep.Buffer"])
def test_a_name_of_the_package_depends_on_the_file_that_it_comes_from(tree, code):
    page = executed_page(tree, f"<!-- run -->\n```python\n{code}\n```\n")
    tree("nbep/used.py", "x = 3\n")
    assert not sync.is_stale(page)
    tree("nbep/lazy.py", "Buffer = 2\n")
    assert sync.is_stale(page)


def test_a_page_that_executes_nothing_has_no_digest(tree):
    page = executed_page(tree, "# A page\n")
    assert "digest" not in page.read_text()


@pytest.mark.parametrize("change", ["source", "output", "nbep/used.py"])
def test_a_notebook_is_stale_when_a_cell_an_output_or_an_import_has_changed(tree, change):
    cell = {"cell_type": "code", "source": ["from nbep.used import x\n", "x"], "outputs": [{"text": "1"}]}
    prose = {"cell_type": "markdown", "source": "A number."}
    path = tree("notebooks/one.ipynb", "")
    made = digests.digest_of_notebook([cell, prose], path.parent)
    notebook = {"cells": [cell, prose], "metadata": {digests.KEY: {"digest": made}}}
    path.write_text(json.dumps(notebook))
    assert not digests.is_stale_notebook(path)
    prose["source"] = "One number."
    if change == "source":
        cell["source"][1] = "x + 1"
    elif change == "output":
        cell["outputs"][0]["text"] = "2"
    else:
        tree(change, "x = 2\n")
    path.write_text(json.dumps(notebook))
    assert digests.is_stale_notebook(path)


def test_pages_that_execute_code_end_with_a_digest_and_others_have_none():
    """Whether it is that of now is for `--stale` to say."""
    for page in [*sync.pages(), *sync.exhibits()]:
        text = page.read_text()
        runs = any(block.kind == "run" for block in sync.blocks(text))
        assert bool(sync.DIGEST.search(text)) == runs, page
