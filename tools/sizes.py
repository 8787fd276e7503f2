"""How large the house is, and how large it may be.

    python tools/sizes.py           lines and files of each room
    python tools/sizes.py --check   what is over its budget; exit status 1 if anything is

A budget is a decision: who needs more raises it in the commit that needs it, and says why. Who makes a room smaller
lowers it. Lines are all lines of Python files; docstrings and blank lines count.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Lines and files, at most.
BUDGETS = {
    "nbep": (78_800, 514),
    "nbep/emulator": (15_000, 73),
    "nbep/device": (18_100, 133),
    "nbep/host": (17_200, 118),
    "nbep/check": (2_200, 12),
    "nbep/scenarios": (1_340, 9),
    "nbep/numba_cuda": (8_100, 31),  # a compiler of Numba's language, and its host's interface: ufuncs, errors, streams
    "nbep/trace": (2_700, 20),
    "nbep/views": (2_100, 12),
    "tests": (63_300, 420),
    "tools": (1_500, 12),
}


def size(folder: str) -> tuple[int, int]:
    """Lines and files of a folder's Python."""
    files = [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    return sum(len(path.read_text().splitlines()) for path in files), len(files)


def over(folder: str) -> list[str]:
    """What a folder has more of than its budget."""
    counts = zip(size(folder), BUDGETS[folder], ("lines", "files"), strict=True)
    return [f"{folder} has {count:,} {of}, its budget is {most:,}" for count, most, of in counts if count > most]


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = [line for folder in BUDGETS for line in over(folder)]
        print("".join(f"{line}\n" for line in found), end="")
        return 1 if found else 0
    print(f"{'':24} {'lines':>7} {'budget':>7}  {'files':>5} {'budget':>6}")
    rooms = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "nbep").iterdir() if path.is_dir())
    for folder in dict.fromkeys([*BUDGETS, *(room for room in rooms if size(room)[1])]):
        (lines, files), (most, most_files) = size(folder), BUDGETS.get(folder, (0, 0))
        print(f"{folder:24} {lines:7,} {most or '':>7}  {files:5} {most_files or '':>6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
