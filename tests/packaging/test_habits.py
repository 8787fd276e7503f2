"""Workflows, pre-commit, templates and changelog agree with the README, .ci/ and the package."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from nbep.version import __version__

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / ".ci"
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
NIGHTLY = (CI / "nightly").read_text()
PARTS = re.search(r"^parts=\((.*)\)$", NIGHTLY, re.MULTILINE)[1].split()
ROOMS = {part: rooms.split() for part, rooms in re.findall(r"^    \[(\w+)\]='(.*)'$", NIGHTLY, re.MULTILINE)}


def setup_lines() -> list[str]:
    block = re.search(r"<!-- setup:.*?-->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return block[1].splitlines()


def commands(workflow: str) -> dict[str, list[str]]:
    """The commands of each job of a workflow."""
    found: dict[str, list[str]] = {}
    for line in WORKFLOWS[workflow].partition("\njobs:\n")[2].splitlines():
        if job := re.fullmatch(r"  (\w+):", line):
            found[job[1]] = []
        elif command := re.fullmatch(r"      - run: (.+)", line):
            found[list(found)[-1]].append(command[1])
    return found


def test_the_workflows_run_the_gate_the_readme_and_every_part_of_the_night():
    assert commands("tests") == {"gate": [".ci/run"], "setup": setup_lines()}
    assert commands("nightly") == {"nightly": [".ci/nightly ${{ matrix.part }}"]}
    assert re.search(r"part: \[(.*)\]", WORKFLOWS["nightly"])[1].split(", ") == PARTS


def test_every_folder_of_tests_belongs_to_one_part_of_the_night():
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    assert sorted(folder for rooms in ROOMS.values() for folder in rooms) == sorted(folders)
    assert PARTS[: len(ROOMS)] == list(ROOMS)


def test_contributing_names_every_part_of_the_night_and_its_folders():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert [part for part, _ in rows] == PARTS
    for part, text in rows:
        assert set(ROOMS.get(part, ())) <= set(re.findall(r"`(\w+)`", text)), part


def test_a_part_that_does_not_exist_is_refused():
    done = subprocess.run([CI / "nightly", "no_such_part"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no part no_such_part; there are: emulator" in done.stderr


def test_pre_commit_is_the_quick_check_of_the_gate():
    pre_commit = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"^ +entry: (.+)$", pre_commit, re.MULTILINE) == [".ci/quick"]
    assert "\n.ci/quick\n" in (CI / "run").read_text()


def test_the_workflow_runs_on_every_python_that_the_package_names():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [found[1] for line in classifiers if (found := re.fullmatch(r".*:: (3\.\d+)", line))]
    matrix = re.search(r"python: \[(.*)\]", WORKFLOWS["tests"])
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
