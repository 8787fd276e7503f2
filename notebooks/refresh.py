"""Execute the notebooks and keep their outputs, without what differs between machines and runs.

python notebooks/refresh.py                 all of them
python notebooks/refresh.py 04_dispatch     some
python notebooks/refresh.py --stale         those that were last executed with other code (see tools/digests.py)
python notebooks/refresh.py --stale --list  print their names, execute nothing
python notebooks/refresh.py --check         change nothing; exit status 1 if a text output is out of date
"""

import argparse
import json
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tools"))
from digests import KEY, digest_of_notebook, is_stale_notebook  # noqa: E402

LIMIT_S = 1800  # of a cell, and of its kernel's start: it ends what hangs, never what is only slow
CHECK = "# What the text says of this run:"  # opens a cell that asserts it; readers do not see its source
HIDDEN = {"jupyter": {"source_hidden": True}, "tags": ["remove-input"]}  # for Jupyter; for the site
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs."""
    notebook = nbformat.read(path, as_version=4)
    limits = {"timeout": LIMIT_S, "startup_timeout": LIMIT_S, "iopub_timeout": LIMIT_S}
    NotebookClient(notebook, **limits, record_timing=False, resources={"metadata": {"path": str(HERE)}}).execute()
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict(HIDDEN if cell.source.startswith(CHECK) else {})
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
    as_stored = json.loads(nbformat.writes(notebook))["cells"]
    notebook.metadata[KEY] = {"digest": digest_of_notebook(as_stored, path.parent)}
    return notebook


def merged(outputs: list) -> list:
    """Outputs with what was printed in several pieces as one: where the pieces end is a matter of timing."""
    whole: list = []
    for output in outputs:
        if output.output_type == "stream" and whole and whole[-1].get("name") == output.name:
            whole[-1].text += output.text
        else:
            whole.append(output)
    return whole


def texts(notebook: nbformat.NotebookNode) -> list[str]:
    """The outputs that can be compared: all but pictures."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" not in data:
                found.append(output.get("text") or data.get("text/markdown") or data.get("text/plain") or "")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the notebooks and keep their outputs.")
    parser.add_argument("names", nargs="*", help="file names without .ipynb; none: all")
    parser.add_argument("--stale", action="store_true", help="only those that were last executed with other code")
    parser.add_argument("--list", action="store_true", help="execute nothing, only print their names")
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.stem for path in HERE.glob("*.ipynb"))
    if arguments.stale:
        names = [name for name in names if is_stale_notebook(HERE / f"{name}.ipynb")]
    if arguments.list:
        print("".join(f"{name}\n" for name in names), end="")
        return 0
    stale = 0
    for name in names:
        path = HERE / f"{name}.ipynb"
        started = time.monotonic()
        before = texts(nbformat.read(path, as_version=4))
        notebook = execute(path)
        current = texts(notebook) == before
        stale += not current
        if not arguments.check:
            nbformat.write(notebook, path)
        state = "current" if current else "out of date" if arguments.check else "refreshed"
        print(f"{path.name}: {state}, {time.monotonic() - started:.1f} s")
    return 1 if arguments.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
