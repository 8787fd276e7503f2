"""List what pages, notebooks and puzzles say of a run, each with the assert that holds it.

    python tools/statements.py              the statements that nothing holds; exit status 1 if there are any
    python tools/statements.py --all        all of them, each with its assert
    python tools/statements.py PATH ...     of these files alone

A statement about a run is a sentence behind an output, before the next block, cell or heading, with a number, a quoted
word of the output, or one of the words in SAYS. What holds it is an assert:

    a page       a comment `<!-- holds ... -->` behind the output, or an assert in the run block
    a notebook   a cell that begins with `# What the text says of this run:`, or an assert in the cell of the output
    a puzzle     what its advice says is a sentence that a wrong solution of tests/puzzles/wrong_solutions must get

The story on a trace's page is made from the run itself: tests/trace/test_story.py compares it with the events.
A sentence that is about the code, the hardware or other runs needs none: GENERAL says which words mark it.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))
from sync import blocks  # noqa: E402

CHECK = "# What the text says of this run:"
NUMBER = re.compile(
    r"\b(\d[\d,.]*|one|two|three|four|five|six|seven|eight|none|nobody|nothing|all|both|each|half)\b", re.I
)
SAYS = re.compile(
    r"\b(this run|here|above|the (first|second|third|fourth|last) line|the report|seeds?|"
    r"it (prints|says|names|finds|hangs)|goes wrong|went wrong|is found|was found|gets?|got|came|is there|wrong|right|"
    r"overtook|before|first|last|same)\b",
    re.I,
)
GENERAL = re.compile(
    r"\b(would|could|can|may|might|must|should|if|when|whenever|never|always|usually|often|needs?|wants?|asks? for|"
    r"DeepEP|GPUs?|PTX|NVLink|RDMA|NIC|nbep'?s?|the (real|next|kernel|text|code|emulator)|predict|why|you|we|"
    r"next step|step \d|so that|notebooks?|puzzles?|exercise)\b|\?|https?:|`nbep |\]\(",
    re.I,
)
# Sentences that look like it, and speak of the code, of hardware or of what a reader does next.
OF_NO_RUN = (
    "Before it, a rank comes through the barrier of call",
    "The check runs your kernel under some seeds",
    "Here rank 0 raises the flag with a relaxed store",
    "The list after it says where",
    "What is wrong shows early",  # of the tests that it names
    "The order of both sums is fixed",
    "Rows of one source come in any order",
    "Measured: 204 and 377 GB/s",  # of the measured table, not of a run of the page
    "Without rings the line is nearly twice",
    "With few tokens `deduplicate` costs",
    "It says how far the queue came",
    "The atomic returns how many blocks came before",
    "Each block counts in its own shared memory",
    "The block that comes last writes",
    "A lane whose number differs in bit 8",
    "In colour are the adds",
    "In colour: the counts",
    "Lane `n` of the first warp tells",
    "What the one before did is in the *launch state*",
    "A coordinator empties the counts",
    "Rank 1 is slow there",
    "The first lanes of four warps post here",
    "`atom_add_relaxed_gpu_s32` adds and returns",
    "A release publishes all that happens before it",
    "It begins in the middle of a write",
    "A check for any seed",
    '"all rows before `h` are none',
)


class Statement(NamedTuple):
    """A sentence, where it stands, and the assert that holds it; "" if nothing does."""

    place: str
    text: str
    held_by: str


def sentences(text: str) -> list[str]:
    """Those of paragraphs; not of headings, tables, lists of links, folded answers and code."""
    text = re.sub(r"<details>.*?</details>|```.*?```|<!--.*?-->", " ", text, flags=re.S)
    text = re.sub(r"^\*\*(What was found|The repair)\.\*\*.*?(\n\n|\Z)", "\n", text, flags=re.S | re.M)  # of a thread
    kept = [line for line in text.splitlines() if not re.match(r"\s*(#|\||>|- \[|\d+\. |\*\*(Predict|Test))", line)]
    return [" ".join(s.split()) for s in re.split(r"(?<=[.!:])\s+(?=[A-Z`*\"])|\n\n", "\n".join(kept)) if s.strip()]


def is_of_a_run(sentence: str) -> bool:
    is_one = bool(NUMBER.search(sentence) and SAYS.search(sentence)) and not GENERAL.search(sentence)
    return is_one and not sentence.startswith(OF_NO_RUN)


def first_assert(code: str) -> str:
    """The first assert of some code, in one line."""
    found = re.search(r"^\s*(assert .*|with (pytest\.)?raises.*)$", code, re.M)
    return found[1].strip() if found else ""


def of_exhibit(path: Path) -> str:
    """What a test asks of the first lines of a report in the museum."""
    tests = "".join(file.read_text() for file in sorted((ROOT / "tests" / "museum").glob("test_*.py")))
    found = re.search(rf'"{path.parent.name}", "[\w ]+",\s*\((.*?)\)', tests, re.S)
    return " ".join(found[1].split()) if found else ""


def of_page(path: Path) -> Iterator[Statement]:
    text = path.read_text()
    found = blocks(text)
    for number, block in enumerate(found):
        if block.kind != "output":
            continue
        behind = [other for other in found[number + 1 :] if other.kind != "holds"]
        end = min([behind[0].span[0] if behind else len(text), text.find("\n#", block.span[1]) % (len(text) + 1)])
        holds = [other.body for other in found if other.kind == "holds" and block.span[1] < other.span[0] < end]
        held = first_assert("\n".join([*holds, found[number - 1].body if number else ""])) or of_exhibit(path)
        for sentence in sentences(text[block.span[1] + 4 : end]):
            if is_of_a_run(sentence):
                line = text[: block.span[1]].count("\n") + 1
                yield Statement(f"{path.relative_to(ROOT)}:{line}", sentence, held)


def of_notebook(path: Path) -> Iterator[Statement]:
    held, is_behind = "", False
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            held = first_assert(source) or held
            is_behind = is_behind or source.startswith(CHECK) or bool(cell["outputs"])
        elif is_behind:
            head = re.split(r"^#", source, maxsplit=1, flags=re.M)[0]
            for sentence in sentences(head):
                if is_of_a_run(sentence):
                    yield Statement(f"{path.relative_to(ROOT)}, cell {number}", sentence, held)
        if cell["cell_type"] == "markdown":
            held, is_behind = "", False


def of_puzzle(path: Path) -> Iterator[Statement]:
    """The strings of the puzzle's advice, each with the words of a wrong solution that gets it."""
    wrong = [
        " ".join(text.split())
        for file in sorted((ROOT / "tests" / "puzzles").rglob("*.py"))
        for text in re.split(r" \| | => |: |\n", file.read_text())
        if len(text) > 8
    ]
    advice = next((n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == "advice"), None)
    returned = (
        [] if advice is None else [n for n in ast.walk(advice) if isinstance(n, ast.Return) and n.value is not None]
    )
    for node in returned:
        parts = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        text = " ".join(" ".join(parts).split())
        if len(text) > 20 and not text.startswith("`"):
            pieces = [_plain(part) for part in parts if len(part) > 12]
            held = next((w for w in wrong if _plain(w) in _plain(text) or any(p in _plain(w) for p in pieces)), "")
            yield Statement(f"{path.relative_to(ROOT)}:{node.lineno}", text, held)


def _plain(text: str) -> str:
    """Without numbers, which an advice fills in."""
    return " ".join(re.sub(r"\d+", "", text).split())


def files() -> list[Path]:
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("records/*.md"), *ROOT.glob("examples/museum/*/*.md")]
    return [
        *sorted(pages),
        *sorted((ROOT / "notebooks").glob("*.ipynb")),
        *sorted((ROOT / "puzzles").glob("[0-9]*.py")),
    ]


def statements(path: Path) -> list[Statement]:
    reader = {".md": of_page, ".ipynb": of_notebook, ".py": of_puzzle}[path.suffix]
    return list(reader(path))


def main() -> int:
    arguments = sys.argv[1:]
    chosen = [Path(argument).resolve() for argument in arguments if argument != "--all"] or files()
    found = [statement for path in chosen for statement in statements(path)]
    bare = [statement for statement in found if not statement.held_by]
    for statement in found if "--all" in arguments else bare:
        print(f"{statement.place}\n  {statement.text}")
        if statement.held_by:
            print(f"    {statement.held_by}")
    print(f"{len(found)} statements about runs, {len(bare)} without an assert")
    return 1 if bare else 0


if __name__ == "__main__":
    sys.exit(main())
