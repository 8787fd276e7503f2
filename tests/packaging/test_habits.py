"""Workflow, pre-commit, templates and changelog agree with the README, .ci/run and the package."""

import re
import tomllib
from pathlib import Path

import pytest

from nbep.version import __version__

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
PRE_COMMIT = (ROOT / ".pre-commit-config.yaml").read_text()
CI_LINES = {line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()}
CHECKS = {line for line in CI_LINES if re.match(r"(ruff|mypy)\b", line)}


def setup_lines() -> list[str]:
    block = re.search(r"<!-- setup:.*?-->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return block[1].splitlines()


def jobs() -> dict[str, list[str]]:
    """The commands of each job of the workflow."""
    found: dict[str, list[str]] = {}
    for line in WORKFLOW.partition("\njobs:\n")[2].splitlines():
        if job := re.fullmatch(r"  (\w+):", line):
            found[job[1]] = []
        elif command := re.fullmatch(r"      - run: (.+)", line):
            found[list(found)[-1]].append(command[1])
    return found


def test_every_command_of_the_workflow_is_a_line_of_the_readme_or_of_ci():
    assert jobs()["setup"] == setup_lines()
    commands = {command for name, job in jobs().items() if name != "setup" for command in job}
    assert commands - CI_LINES == set()
    assert WORKFLOW.count("run: ") == sum(map(len, jobs().values()))  # none is written in another form


def test_workflow_and_pre_commit_have_the_lint_and_types_of_ci():
    assert {line.split()[0] for line in CHECKS} == {"ruff", "mypy"}
    assert set(jobs()["lint"]) >= CHECKS
    assert set(re.findall(r"^ +entry: (.+)$", PRE_COMMIT, re.MULTILINE)) == CHECKS


def test_the_workflow_runs_on_every_python_that_the_package_names():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [found[1] for line in classifiers if (found := re.fullmatch(r".*:: (3\.\d+)", line))]
    matrix = re.search(r"python: \[(.*)\]", WORKFLOW)
    assert re.findall(r"[\d.]+", matrix[1]) == named


@pytest.mark.parametrize("template", ["ISSUE_TEMPLATE/bug.yml", "pull_request_template.md"])
def test_templates_ask_for_a_seed_and_for_nbep_info(template):
    text = (ROOT / ".github" / template).read_text()
    assert "`nbep info`" in text
    assert re.search(r"^\W*(label: )?Seed\b", text, re.MULTILINE)


def test_the_changelog_begins_with_the_version_of_the_package_or_with_what_is_unreleased():
    headings = re.findall(r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    versions = [(name, date) for name, date in headings if name != "Unreleased"]
    assert headings[1:].count(("Unreleased", "")) == 0
    assert versions[0][0] == __version__
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", date) for _, date in versions)
