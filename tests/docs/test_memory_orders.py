"""records/shared_cells.md lists every release-acquire pair of the source, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_pairs_is_complete():
    tags = {
        tag for path in (ROOT / "nbep").rglob("*.py") for tag in re.findall(r"# PAIR ([a-z0-9-]+)", path.read_text())
    }
    page = (ROOT / "records" / "shared_cells.md").read_text()
    table = page.partition("## Pairs")[2].partition("\n## ")[0]
    assert tags == set(re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE))


def test_the_functions_of_each_row_carry_its_tag():
    page = (ROOT / "records" / "shared_cells.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|(.*)$", page.partition("## Pairs")[2].partition("\n## ")[0], re.MULTILINE)
    for tag, row in rows:
        ends = re.findall(r"\[`(\w+)`\]\(\.\./(\S+)\)", row)
        assert ends
        for symbol, path in ends:
            text = (ROOT / path).read_text()
            function = next(node for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) == symbol)
            body = text.splitlines()[function.lineno : function.end_lineno]
            assert any(f"# PAIR {tag}" in line for line in body), f"{symbol} has no end of {tag}"


def test_every_primitive_it_names_exists():
    import nbep.device.primitives as primitives

    page = (ROOT / "records" / "shared_cells.md").read_text()
    named = set(re.findall(r"`((?:ld|st|atom|fence|tma|bar)_\w+)`", page))
    # ld_nc, ld_na, st_na and st_weak stand for their whole families.
    missing = {name for name in named if not any(known.startswith(name) for known in dir(primitives))}
    assert not missing
    assert len(named) > 15
