"""The table of docs/compilers.md: kernels by two compilers, for one architecture.

    nbep compile --arch sm_90 --ptx A > A/rows.txt
    NBEP_COMPILER=mlir nbep compile --arch sm_90 --ptx B > B/rows.txt
    python docs/compare_compilers.py A B

A kernel that one of them lacks is left out.
"""

import re
import sys
from pathlib import Path

from nbep.device.orders import only_in

ROW = re.compile(
    r"^(\S+) (sm_\d+): (\d+) registers, (\d+) spill stores, (\d+) spill loads, .*, ([\d.]+) s$", re.MULTILINE
)
HEAD = """| kernel | orders | registers | spilled bytes | machine code, KiB | seconds |
| --- | --- | --- | --- | --- | --- |"""


def rows_of(folder: Path) -> dict[str, tuple[str, ...]]:
    """Kernel -> architecture, registers, bytes spilled in stores and in loads, and seconds."""
    return {name: tuple(row) for name, *row in ROW.findall((folder / "rows.txt").read_text())}


def verdict(ptx: str, other: str) -> str:
    """Whether threads can execute the same sequences in both."""
    if only_in(other, ptx) is not None:
        return "undecided"
    return "same" if only_in(ptx, other, may_return=True) is None else "subset"


def main() -> None:
    folders = Path(sys.argv[1]), Path(sys.argv[2])
    rows = [rows_of(folder) for folder in folders]
    print(HEAD)
    for name in sorted(rows[0].keys() & rows[1].keys()):
        pair = rows[0][name], rows[1][name]
        stems = [folder / f"{name}.{row[0]}" for folder, row in zip(folders, pair, strict=True)]
        ptx = [stem.with_name(f"{stem.name}.ptx").read_text() for stem in stems]
        size = [f"{stem.with_name(f'{stem.name}.cubin').stat().st_size / 1024:.0f}" for stem in stems]
        spilled = [str(int(row[2]) + int(row[3])) for row in pair]
        cells = ((row1, row2) for row1, row2 in ((pair[0][1], pair[1][1]), spilled, size, (pair[0][4], pair[1][4])))
        print(f"| {name} | {verdict(*ptx)} | {' | '.join(f'{a}, {b}' for a, b in cells)} |")


if __name__ == "__main__":
    main()
