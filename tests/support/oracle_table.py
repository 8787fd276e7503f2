"""What the oracle says of the random programs that nbep is compared with: a table of records/every_schedule.md.

python tests/support/oracle_table.py
"""

from __future__ import annotations

from collections import Counter

from oracle import Oracle, Program
from oracle_programs import SHAPES

HEAD = """\
| shape | what is drawn | with a race | else with a hang | right, one outcome | right, several |
| --- | --- | --- | --- | --- | --- |"""
NUMBER = 1000  # programs of each shape
KINDS = "race", "hang", "one", "several"


def kind_of(program: Program) -> str:
    faults, outcomes = Oracle(program).verdict()
    found = [fault for fault in KINDS if fault in faults]
    return found[0] if found else "several" if len(outcomes) > 1 else "one"


def row(shape: str) -> str:
    counts = Counter(kind_of(SHAPES[shape](seed)) for seed in range(NUMBER))
    drawn = (SHAPES[shape].__doc__ or "").strip().rstrip(".")
    return f"| `{shape}` | {drawn} | {' | '.join(str(counts[kind]) for kind in KINDS)} |"


if __name__ == "__main__":
    print(HEAD, *map(row, SHAPES), sep="\n")
