"""What the emulator says of a run that it stops stays word for word the same, or somebody decides that it changes.

Each report of the tests that have the fixture `held_reports` is compared with tests/support/held_reports.json, by its
digest. A line of code stands there for its number, so that a report stays the same where code only moves.

    python -m pytest -m '' tests/corpus tests/museum tests/puzzles --write-reports      they are right as they are now
    python -m pytest -m '' tests/corpus --reports-in FOLDER    their words, a file for each test: for diff of commits
"""

import json
import linecache
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import pytest

from nbep.emulator import EmulatorError, World

HELD = Path(__file__).with_suffix(".json")
ROOT = HELD.parents[2]
PLACE = re.compile(r"((?:[\w./-]+/)?[\w-]+\.py):(\d+)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-reports", action="store_true", help="take the reports that tests meet for right")
    parser.addoption("--reports-in", type=Path, help="a folder for the words of the reports that tests meet")


def words_of(error: EmulatorError) -> str:
    """All that a report says, with its notes, and the code of a line in place of its number."""
    said = [type(error).__name__, getattr(error, "full", str(error)), *getattr(error, "__notes__", ())]
    return PLACE.sub(_code_at, "\n".join(said))


def _code_at(place: re.Match[str]) -> str:
    path = ROOT / place[1]
    return f"{path.name}: {linecache.getline(str(path), int(place[2])).strip()}"


def digest(reports: list[str]) -> str:
    return f"{len(reports)} {blake2b(chr(0).join(reports).encode(), digest_size=6).hexdigest()}"


@pytest.fixture
def held_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare the reports of a test, in their order, with those that are held."""
    reports: list[str] = []
    explain = World.explain

    def listen(world: World, error: BaseException) -> None:
        explain(world, error)
        if isinstance(error, EmulatorError):
            reports.append(words_of(error))

    monkeypatch.setattr(World, "explain", listen)
    yield
    if request.node.stash.get(FAILED, False):
        return
    folder: Path | None = request.config.getoption("--reports-in")
    name = request.node.nodeid
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = re.sub(r"[^\w.,-]+", "_", name)[-200:] + ".txt"
        (folder / file).write_text("\n\n".join(reports))
    held: dict[str, str] = json.loads(HELD.read_text())
    said = digest(reports) if reports else None
    if held.get(name) == said:
        return
    if request.config.getoption("--write-reports"):
        held = {**held, name: said} if said else {one: text for one, text in held.items() if one != name}
        HELD.write_text(json.dumps(dict(sorted(held.items())), indent=0, ensure_ascii=False) + "\n")
        return
    how = f"how to see what has changed, and how to take it for right: see {Path(__file__).relative_to(ROOT)}"
    pytest.fail(f"reports: held are {held.get(name)}, these are {said}; {how}\n\n" + "\n\n".join(reports))


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    """Whether a test has failed by itself: then its reports are not its only trouble."""
    outcome = yield
    if outcome.get_result().failed:
        item.stash[FAILED] = True
