"""How large the house is, and how large it may be.

    python tools/sizes.py           lines, lines of code and files of each room
    python tools/sizes.py --check   what is over its budget; exit status 1 if anything is

A budget is a decision: who needs more raises it in the commit that needs it, and says why. Who makes a room smaller
lowers it. Lines are all lines of Python files. Lines of code are those that are no comment, docstring or import, and
not blank.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = "lines", "code", "files"
# Of each kind, at most.
BUDGETS = {
    "nbep": (83_006, 51_395, 434),
    "nbep/emulator": (20_993, 13_767, 87),  # 5,840 lines are the engine, beside the machine that Python runs
    "nbep/device": (18_880, 10_552, 128),
    "nbep/host": (16_844, 9_926, 86),
    "nbep/lab/check": (2_082, 1_325, 7),
    "nbep/specimens/scenarios": (1_143, 837, 6),
    # a compiler of Numba's language, and its host: ufuncs, errors, streams
    "nbep/lab/numba_cuda": (9_194, 6_234, 33),
    "nbep/lab/trace": (1_920, 1_183, 9),
    "nbep/specimens/views": (1_588, 1_082, 7),
    "tests": (63_242, 44_155, 433),
    "research": (1_425, 829, 11),
    "tools": (3_280, 2_150, 18),
}


def code_lines(text: str) -> int:
    """Lines that are no comment, docstring or import, and not blank."""
    lines = {i for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.lstrip().startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, node.end_lineno + 1))
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def size(folder: str) -> tuple[int, int, int]:
    """Lines, lines of code and files of a folder's Python."""
    texts = [path.read_text() for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]
    return sum(len(text.splitlines()) for text in texts), sum(map(code_lines, texts)), len(texts)


def over(folder: str) -> list[str]:
    """What a folder has more of than its budget."""
    counts = zip(size(folder), BUDGETS[folder], ("lines", "lines of code", "files"), strict=True)
    return [f"{folder} has {count:,} {of}, its budget is {most:,}" for count, most, of in counts if count > most]


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = [line for folder in BUDGETS for line in over(folder)]
        print("".join(f"{line}\n" for line in found), end="")
        return 1 if found else 0
    print(f"{'':20}" + "".join(f"{kind:>9} {'budget':>7}" for kind in KINDS))
    rooms = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "nbep").iterdir() if path.is_dir())
    for folder in dict.fromkeys([*BUDGETS, *(room for room in rooms if size(room)[0])]):
        pairs = zip(size(folder), BUDGETS.get(folder, ("",) * 3), strict=True)
        print(f"{folder:20}" + "".join(f"{count:9,} {most if most == '' else f'{most:,}':>7}" for count, most in pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
