"""The table of records/compilers.md: kernels by two compilers, for one architecture.

    nbep compile --arch sm_90 --json A.json
    NBEP_COMPILER=mlir nbep compile --arch sm_90 --json B.json
    python tools/compare_compilers.py A.json B.json

Only orders that numba-cuda's code has, too, get into B.json: the second command refuses other kernels. A kernel that
one of them lacks is left out.
"""

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """| kernel | registers | spilled bytes | machine code, KiB |
| --- | --- | --- | --- |"""


def rows_of(path: str) -> dict[str, dict[str, Any]]:
    return {row["kernel"]: row for row in json.loads(Path(path).read_text())}


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["registers"]),
        str(row["spill_stores"] + row["spill_loads"]),
        f"{row['cubin_bytes'] / 1024:.0f}",
    )


def main() -> None:
    ours, theirs = rows_of(sys.argv[1]), rows_of(sys.argv[2])
    print(HEAD)
    for name in sorted(ours.keys() & theirs.keys()):
        pairs = zip(cells(ours[name]), cells(theirs[name]), strict=True)
        print(f"| {name} | {' | '.join(', '.join(pair) for pair in pairs)} |")
        if ours[name]["ordered"].keys() != theirs[name]["ordered"].keys():
            raise ValueError(f"{name}: the compilers use other kinds of ordered instructions")


if __name__ == "__main__":
    main()
