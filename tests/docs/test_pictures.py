"""The plots of docs/performance.md were drawn from the tables that records/measured.md has today."""

import importlib.util
import json
from pathlib import Path

import pytest
from PIL import Image

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
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
