"""Execute every notebook in a fresh kernel, and check that each one is committed with the outputs of a full run."""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def cells_without_outputs(notebook: nbformat.NotebookNode) -> list[int]:
    """Indices of the code cells that were never executed."""
    return [
        index
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None
    ]


def main() -> int:
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    if not paths:
        print(f"no notebooks in {NOTEBOOKS}", file=sys.stderr)
        return 1
    failed = 0
    for path in paths:
        started = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        missing = cells_without_outputs(notebook)
        if missing:
            print(f"{path.name}: cells {missing} are committed without having run", file=sys.stderr)
            failed += 1
        elif not any(cell.get("outputs") for cell in notebook.cells):
            print(f"{path.name}: committed without any output", file=sys.stderr)
            failed += 1
        NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(path.parent)}}).execute()
        print(f"{path.name}: {time.monotonic() - started:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
