"""docs/memory_orders.md lists every release-acquire pair of the source, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_pairs_is_complete():
    tags = {
        tag for path in (ROOT / "nbep").rglob("*.py") for tag in re.findall(r"# PAIR ([a-z0-9-]+)", path.read_text())
    }
    page = (ROOT / "docs" / "memory_orders.md").read_text()
    table = page.partition("## Pairs")[2].partition("\n## ")[0]
    assert tags == set(re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE))


def test_every_primitive_it_names_exists():
    import nbep.device.primitives as primitives

    page = (ROOT / "docs" / "memory_orders.md").read_text()
    named = set(re.findall(r"`((?:ld|st|atom|fence|tma|bar)_\w+)`", page))
    # ld_nc, ld_na, st_na and st_weak stand for their whole families.
    missing = {name for name in named if not any(known.startswith(name) for known in dir(primitives))}
    assert not missing
    assert len(named) > 15
