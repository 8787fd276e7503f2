"""Find stale notebooks and pages without executing them.

A notebook, and a page that executes code, carries a digest: of its code and outputs, of the files that this code names,
and of the files of nbep that are loaded when it imports what it imports. `docs/sync.py` and `notebooks/refresh.py`
execute it and write the digest. Where the digest no longer fits, the outputs may have changed: the page is stale, and
the gate executes it.

A digest does not see what a function imports while it runs, nor another version of NumPy: `.ci/nightly` executes
everything. A block of bash may start any command, so it depends on all of nbep and on all puzzles. Lines that are empty
or only a comment do not count.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KEY = "nbep"  # of a notebook's metadata
MAGIC = re.compile(r"^\s*[%!].*$", re.MULTILINE)
PATH = re.compile(r"[\w./-]+")


@cache
def modules() -> dict[str, Path]:
    """The files of nbep, and of what stands beside it, by the names of their modules."""
    folders = (ROOT / folder for folder in ("nbep", "research", "notebooks"))
    return {name_of(path): path for folder in folders for path in sorted(folder.rglob("*.py"))}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def text_of(path: Path) -> str:
    """A file without its comments and blank lines."""
    lines = path.read_text(errors="replace").splitlines()
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def imported(tree: ast.Module, package: str, statements: Iterable[ast.AST]) -> Iterator[str]:
    """What these import statements of a file may mean: `from a import b` is a, and a.b. And its `nbep.name`."""
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nbep":
            yield f"nbep.{node.attr}"


@cache
def homes(package: str) -> dict[str, str]:
    """Where the names of a lazy package come from: its __init__.pyi says it."""
    path = modules().get(package)
    if path is None or path.name != "__init__.py" or not (stub := path.with_suffix(".pyi")).exists():
        return {}
    found = {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            module = f"{package}.{node.module}" if node.module else package
            found |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    return found


def home_of(name: str) -> str:
    """nbep.Buffer -> nbep.host.buffer.Buffer; nbep.DataRace -> nbep.emulator.DataRace -> where that comes from."""
    package, _, last = name.rpartition(".")
    if package == "nbep" and f"nbep.lab.{last}" in modules():  # nbep.doors
        return f"nbep.lab.{last}"
    if package and (moved := home_of(package)) != package:
        return home_of(f"{moved}.{last}")
    home = homes(package).get(last, name) if package else name
    return home if home == name else home_of(home)


def files_of(names: Iterable[str], folder: Path) -> set[Path]:
    """The files of nbep, and those beside a script, that are loaded with these modules; their packages are, too."""
    found = set()
    for name in names:
        parts = home_of(name).split(".")
        found |= {modules().get(".".join(parts[: i + 1])) for i in range(len(parts))}
        found.add(beside if (beside := folder / f"{parts[0]}.py").exists() else None)
    return {path for path in found if path is not None}


@cache
def registrations() -> dict[str, set[str]]:
    """The modules that nbep registers, by what for: see nbep.registry."""
    found: dict[str, set[str]] = {}
    for what, module in re.findall(r'^register\("(\w+)", "([\w.]+):', modules()["nbep"].read_text(), re.MULTILINE):
        found.setdefault(what, set()).add(module)
    return found


def asked_for(text: str) -> Iterator[str]:
    """The modules that a file asks the registry for."""
    for what in re.findall(r'\bregistered\("(\w+)"\)', text):
        yield from registrations().get(what, ())


@cache
def loaded_by(path: Path) -> frozenset[Path]:
    """The files that a Python file imports at its top, and those that it takes from the registry."""
    name = name_of(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    text = path.read_text()
    tree = ast.parse(text)
    return frozenset(files_of((*imported(tree, package, tree.body), *asked_for(text)), path.parent))


def with_imports(files: Iterable[Path]) -> set[Path]:
    """The files, and all that are loaded with them."""
    found: set[Path] = set()
    waiting = list(files)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += loaded_by(path) if path.suffix == ".py" else ()
    return found


def named(code: str, folder: Path) -> set[Path]:
    """The files of the repository whose paths stand in a piece of code; of a folder, all of its files."""
    found: set[Path] = set()
    for word in PATH.findall(code):
        if "/" not in word:
            continue
        for base in (ROOT, folder):
            path = (base / word).resolve()
            if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[1:]:
                inside = [path] if path.is_file() else path.rglob("*") if path.is_dir() else []
                found |= {file for file in inside if file.is_file() and "__pycache__" not in file.parts}
    return found


def digest(folder: Path, python: Iterable[str], bash: Iterable[str], outputs: Iterable[str]) -> str:
    """The digest of pieces of code that are executed on a page of this folder, and of what they gave."""
    python, bash = list(python), list(bash)
    files = set().union(*(named(code, folder) for code in [*python, *bash]))
    for code in python:
        tree = ast.parse(MAGIC.sub("", code))
        files |= files_of(imported(tree, "", ast.walk(tree)), folder)
    if bash:
        files |= {*modules().values(), *(ROOT / "puzzles").rglob("*.py")}
    sources = [f"{path.relative_to(ROOT)}\n{text_of(path)}" for path in sorted(with_imports(files))]
    made = hashlib.sha256()
    for part in (*python, *bash, *outputs, *sources):
        made.update(part.encode() + b"\0")
    return made.hexdigest()[:16]


def digest_of_notebook(cells: list[dict], folder: Path) -> str:
    """The digest of a notebook with these cells, as its file has them."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = (json.dumps(cell["outputs"], sort_keys=True) for cell in code)
    return digest(folder, ("".join(cell["source"]) for cell in code), (), outputs)


def is_stale_notebook(path: Path) -> bool:
    """Whether it was last executed with other code, or other outputs were put in."""
    notebook = json.loads(path.read_text())
    return notebook["metadata"].get(KEY, {}).get("digest") != digest_of_notebook(notebook["cells"], path.parent)
