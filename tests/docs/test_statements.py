"""What pages, notebooks and puzzles say of a run is held by an assert: tools/statements.py finds what is not."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("statements", ROOT / "tools" / "statements.py")
statements = importlib.util.module_from_spec(spec)
spec.loader.exec_module(statements)

PAGE = """# A page

<!-- run -->
```bash
echo 208 wrong rows
```

<!-- output -->
```text
208 wrong rows
```
{}
All 208 rows of warp 0 are wrong here. A GPU would show fewer.
"""


def test_each_statement_about_a_run_has_an_assert():
    found = [statement for path in statements.files() for statement in statements.statements(path)]
    assert [f"{bare.place}: {bare.text}" for bare in found if not bare.held_by] == []
    assert len(found) > 150


def test_a_statement_that_nothing_holds_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(statements, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(""))
    (bare,) = statements.statements(page)
    assert (bare.text, bare.held_by) == ("All 208 rows of warp 0 are wrong here.", "")
    page.write_text(PAGE.format('\n<!-- holds\nassert output.startswith("208 ")\n-->\n'))
    (held,) = statements.statements(page)
    assert held.held_by == 'assert output.startswith("208 ")'


def test_no_exception_outlives_its_sentence():
    texts = [" ".join(path.read_text().replace('\\"', '"').split()) for path in statements.files()]
    texts = [text.replace('\\n", "', " ").replace("{", "").replace("}", "") for text in texts]
    gone = [words for words in statements.OF_NO_RUN if not any(words in text for text in texts)]
    assert gone == []
