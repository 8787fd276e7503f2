"""What the gate would refuse, as far as it can be seen without a run: in half a minute, without a network.

    .ci/quick          one line for each thing to do, with the command that does it; exit status 1 if there is any

Stale notebooks and pages are no refusal: their outputs may still be right. `.ci/run` executes them and sees.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
# Tests that read sources and run no kernel.
TESTS = [
    *(f"tests/docs/test_{name}.py" for name in ("answers", "digests", "notebooks", "pages", "site")),
    *(f"tests/packaging/test_{name}.py" for name in ("habits", "layers", "readme")),
    *(f"tests/device/test_{name}.py" for name in ("ledgers", "pairs", "shared_cells")),
]


def run(*command: str) -> tuple[int, str]:
    """The exit status of a command and what it printed."""
    program = TOOLS / command[0]
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout + done.stderr


def things(command: tuple[str, ...], pattern: str, repair: str) -> list[str]:
    """One line for each match of the pattern in what a command prints; where it fails without one, its last line."""
    status, printed = run(*command)
    if not status:
        return []
    matches = [match.groups("") for match in re.finditer(pattern, printed)]
    found = [f"{' '.join(groups)}: {repair.format(*groups)}" for groups in matches]
    return found or [f"{' '.join(command[:2])}: exit status {status}: {(printed.splitlines() or [''])[-1]}"]


def lint() -> list[str]:
    lines = r"(?m)^(\S+:\d+):\d+: (.*)$"
    return [
        *things(("ruff", "check", "--quiet", "--output-format", "concise", "."), lines, "ruff check --fix ."),
        *things(("ruff", "format", "--check", "."), r"(?m)^Would reformat: (\S+)$", "ruff format {0}"),
    ]


def types() -> list[str]:
    return things(("mypy",), r"(?m)^(\S+:\d+): error: (.*)$", "mypy")


def tests() -> list[str]:
    command = ("python", "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", *TESTS)
    selected = ("-k", "not test_the_answers_hold")
    return things((*command, *selected), r"(?m)^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", "pytest '{0}'")


def pages() -> list[str]:
    return things(
        ("python", "docs/sync.py", "--still", "--check"), r"(?m)^(\S+): out of date$", "python docs/sync.py {0}"
    )


def house() -> list[str]:
    return [
        *things(("python", "tools/sizes.py", "--check"), r"(?m)^(\S+ has .*)$", "python tools/sizes.py"),
        *things(("python", "tools/test_map.py", "--check"), r"(?m)^(\S+): out of date$", "python tools/test_map.py"),
    ]


def stale() -> list[str]:
    """What was last executed with other code, by the two programs that execute it."""
    found = []
    for kind, program in ("notebooks", "notebooks/refresh.py"), ("pages", "docs/sync.py"):
        status, printed = run("python", program, "--stale", "--list")
        if status:
            found.append(f"{program} --stale --list fails: {(printed.splitlines() or [''])[-1]}")
        elif names := printed.split():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            found.append(f"stale {kind}: {shown}: python {program} --stale")
    return found


def main() -> int:
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.map(lambda check: check(), (types, tests, lint, pages, house, stale))
        *refusals, hints = list(waiting)
    todo = [line for lines in refusals for line in lines]
    print("".join(f"{line}\n" for line in [*todo, *hints]), end="")
    return 1 if todo else 0


if __name__ == "__main__":
    sys.exit(main())
