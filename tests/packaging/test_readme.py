"""The README is short, its set-up lines are two, and what it names exists."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The code between <!-- name: --> and <!-- /name -->."""
    match = re.search(rf"<!-- {name}:.*?-->\n```\w+\n(.*?)```\n<!-- /{name} -->", README, re.DOTALL)
    assert match is not None, f"README.md has no block {name}"
    return match[1]


def test_it_fits_on_a_screen_and_a_half():
    assert len(README.splitlines()) <= 70


def test_the_report_that_it_shows_is_that_of_a_page_that_is_run():
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    assert shown in (ROOT / "docs" / "numba_cuda.md").read_text()


def test_setup_is_two_lines():
    run, test = block("setup").splitlines()
    assert run.endswith("nbep demo")
    assert "pytest" in test


def test_the_package_s_description_has_no_link_that_leads_nowhere_outside_the_source():
    spec = importlib.util.spec_from_file_location("setup_of_nbep", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.description(README)
    links = re.findall(r"\[[^\]]+\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)
    assert "the course (docs/course.md)" in text
    assert "CONTRIBUTING.md says" in text
    assert "![" not in text
    assert "<!--" not in text


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_relative_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / document).read_text()):
        assert (ROOT / target).exists(), target
