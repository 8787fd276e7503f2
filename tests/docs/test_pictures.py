"""The plots and figures of docs/performance.md are those of the tables that records/measured.md has today."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
from PIL import Image

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PAGE = (PICTURES.parent / "performance.md").read_text()
spec = importlib.util.spec_from_file_location("docs_performance", PICTURES / "performance.py")
performance = importlib.util.module_from_spec(spec)
spec.loader.exec_module(performance)


@pytest.mark.parametrize("name", performance.PICTURES)
def test_a_plot_shows_the_figures_of_the_tables(name):
    read, _ = performance.PICTURES[name]
    with Image.open(PICTURES / f"{name}.png") as picture:
        drawn = json.loads(picture.text["Description"])
    assert drawn == json.loads(json.dumps(read())), "out of date: run `python docs/pictures/performance.py`"


def test_a_table_that_is_not_there_is_an_error():
    with pytest.raises(LookupError, match="no heading"):
        performance.table_below("## Nowhere", "work")


def test_figures_beside_deepep_are_those_of_the_tables():
    for work, theirs, ours in performance.table_below("### Four GPUs, beside DeepEP", "work"):
        cells = [
            f"{performance.number(cell):.0f} GB/s, {cell.partition('(')[2].rstrip(')')}" for cell in (ours, theirs)
        ]
        assert f"| {work}, 24 SMs | {' | '.join(cells)} |" in PAGE
    for work, theirs, ours in performance.table_below("### Low latency, beside DeepEP", "work"):
        assert re.search(rf"^\| low-latency {work}, 128 tokens \| {ours} us; .*? \| {theirs} us \|", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "heading", "record", "rows"),
    [
        ("performance", "## What a call costs the CPU", "## What a call costs the CPU", 9),
        ("direct", "### What it costs, and which way to take", "## Without rings, in detail", 7),
        ("performance", "## ElasticBuffer", "### Rows that the ranks share", 3),
    ],
)
def test_figures_of_a_page_are_in_one_row_of_the_measurements(page, heading, record, rows):
    said, measured = (
        re.findall(r"^\| (.+?) \| (\d.*?)[ |]*$", text.partition(f"\n{head}\n")[2].partition("\n## ")[0], re.M)
        for text, head in (
            ((PICTURES.parent / f"{page}.md").read_text(), heading),
            (performance.MEASURED.read_text(), record),
        )
    )
    assert len(said) == rows
    kept = [(work, {*row.split(" | "), *re.sub(r" \([^|]*\)", "", row).split(" | ")}) for work, row in measured]
    for work, cells in said:
        assert any(name == work and set(cells.split(" | ")) <= row for name, row in kept), work
