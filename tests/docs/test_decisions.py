"""The records of decisions have a number, a date, and what was decided, against what, and measured how."""

import re
from datetime import date
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "records" / "decisions"
RECORDS = sorted(FOLDER.glob("*.md"))


def test_their_numbers_follow_each_other():
    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, 1 + len(RECORDS)))
    assert len(RECORDS) >= 7


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_says_when_what_against_what_and_how_measured(path):
    text = path.read_text()
    assert re.match(rf"# {int(path.name[:4])}\. \S", text)
    date.fromisoformat(re.search(r"^Date: (\S+)$", text, re.MULTILINE)[1])
    assert re.findall(r"^\*\*(\w+)\.\*\* \S", text, re.MULTILINE) == ["Decided", "Against", "Measured"]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_its_links_lead_to_headings(path):
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", path.read_text())
    assert links
    for target, anchor in links:
        page = (path.parent / target).resolve()
        headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, f"{target}#{anchor}"
