"""Compiles the kernels of the course for one architecture: those of puzzles, solved, and those in cells of notebooks.

    python course_kernels.py sm_75

It prints the name of each. Of a notebook it executes imports, definitions and constants only, so nothing runs.
"""

import ast
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from nbep.device.compile import compile_kernel, parse_arch
from nbep.lab.puzzle import command

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def runs_nothing(node: ast.stmt) -> bool:
    """Whether it imports, defines or gives a name a value, without calls that may take long; constants may have any."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)
    parts = list(ast.walk(node))
    is_constant = all(isinstance(target, ast.Name) and target.id.isupper() for target in node.targets)
    return is_constant or not any(isinstance(part, ast.Call | ast.Subscript) for part in parts)


def is_kernel(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("kernel" in ast.unparse(one) for one in node.decorator_list)


def kernels_of(notebook: Path) -> Iterator[Callable]:
    """The kernels that its cells define, in turn: what they call is what has that name after their cell."""
    scope: dict = {"__name__": notebook.stem}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            nodes = [node for node in ast.parse("".join(cell["source"])).body if runs_nothing(node)]
            for node in nodes:
                with suppress(NameError):  # of a value that nothing here has computed
                    exec(compile(ast.Module([node], []), f"<{notebook.stem}>", "exec"), scope)
            yield from (scope[node.name] for node in nodes if is_kernel(node))


def main() -> None:
    cc = parse_arch(sys.argv[1])
    sys.path.append(str(NOTEBOOKS))  # as where a notebook runs, for what cells import
    for path in command.files():
        puzzle = command.load(path)
        with puzzle.filled(command.solution_of(path)):
            print(path.stem, compile_kernel(puzzle.kernel, cc).name)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for kernel in kernels_of(path):
            print(path.stem, compile_kernel(kernel, cc).name)


if __name__ == "__main__":
    main()
