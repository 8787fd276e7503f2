"""What the README shows is run; what it names exists."""

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


def test_example_runs_and_every_choice_of_an_expert_arrives(capsys):
    namespace: dict = {}
    exec(compile(block("example"), "README.md", "exec"), namespace)
    results = namespace["results"]
    assert len(results) == 4
    arrived = sum(sum(counts) for _, counts in results)
    assert arrived == 4 * namespace["num_tokens"] * namespace["num_topk"]
    assert capsys.readouterr().out.count("received") == 4


def test_setup_is_two_lines():
    run, test = block("setup").splitlines()
    assert run.endswith("nbep demo")
    assert "pytest" in test


@pytest.mark.parametrize("path", re.findall(r"^\| `(\w+/(?:\w+/)?)` \|", README, re.MULTILINE))
def test_folder_of_the_map_exists(path):
    assert (ROOT / path).is_dir()


def test_the_package_s_description_has_no_link_that_leads_nowhere_outside_the_source():
    spec = importlib.util.spec_from_file_location("setup_of_nbep", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.description(README)
    links = re.findall(r"\[[^\]]+\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)
    assert "Litmus tests (docs/litmus.md)".lower() in text.lower()
    assert "docs/start.md says" in text
    assert "<!--" not in text


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_relative_links_lead_somewhere(document):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / document).read_text()):
        assert (ROOT / target).exists(), target
