"""Write tests/README.md: which tests speak for which room of nbep, and in which part of the night they run.

    python tools/test_map.py           write it
    python tools/test_map.py --check   exit status 1 if it is out of date

A test file speaks for the rooms that it imports from, itself or through the helpers of tests/support. Of a room the
folder of tests of the same name comes first, then those with the most such files.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from digests import ROOT, home_of, imported, modules, name_of

TESTS = ROOT / "tests"
PAGE = TESTS / "README.md"
HELPERS = {path.stem: path for folder in ("support", "corpus") for path in (TESTS / folder).glob("*.py")}
MOST = 5  # folders of tests that a row names
TOP = """# Which tests speak for which room

`python tools/test_map.py` writes this page from the imports of the tests. A change to a room of `nbep/` is covered
first by the tests of its row. A number counts the test files that import from the room. The last column names the
parts of [`.ci/nightly`](../CONTRIBUTING.md#what-runs-when) that run them.

| room | tests | parts |
| --- | --- | --- |
"""


def room_of(module: str) -> str:
    """nbep.host.intranode.dispatch -> nbep/host/intranode; a file of the package itself stands for itself."""
    path = modules()[module]
    folder = path.relative_to(ROOT).parent
    return (folder if len(folder.parts) > 1 else path.relative_to(ROOT)).as_posix()


@cache
def rooms_of(path: Path) -> frozenset[str]:
    """The rooms that a test or a helper imports from."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for name in imported(tree, "", ast.walk(tree)):
        home = home_of(name)
        while home and home not in modules():
            home = home.rpartition(".")[0]
        if home not in ("", "nbep"):
            found.add(room_of(home))
        elif name in HELPERS and HELPERS[name] != path:
            found |= rooms_of(HELPERS[name])
    return frozenset(found)


def parts() -> dict[str, str]:
    """The part of the night of each folder of tests."""
    rooms = re.findall(r"^    \[(\w+)\]='(.*)'$", (ROOT / ".ci" / "nightly").read_text(), re.MULTILINE)
    return {folder: part for part, folders in rooms for folder in folders.split()}


def page() -> str:
    speak: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted(TESTS.rglob("test_*.py")):
        for room in rooms_of(path):
            speak[room][path.relative_to(TESTS).parts[0]] += 1
    of_night, text = parts(), TOP
    for room in sorted({room_of(name_of(path)) for path in modules().values()}):
        same = Path(room).stem
        if any((TESTS / same).glob("test_*.py")):
            speak[room][same] += 0
        counts = sorted(speak[room].items(), key=lambda item: (item[0] != same, -item[1], item[0]))[:MOST]
        tests = ", ".join(f"`{folder}` {count or 'all'}" for folder, count in counts) or "none imports it"
        nights = ", ".join(dict.fromkeys(f"`{of_night[folder]}`" for folder, _ in counts))
        text += f"| `{room}` | {tests} | {nights} |\n"
    return text


def main() -> int:
    text = page()
    if PAGE.exists() and PAGE.read_text() == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.relative_to(ROOT)}: out of date")
        return 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
