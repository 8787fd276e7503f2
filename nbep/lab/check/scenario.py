"""What is run again and again: a function of each rank, and what must come out of it.

A file of a user's is a scenario, too:

    NUM_RANKS = 2                      if it is not there: 2
    NUM_SMS = 4                        blocks that a rank holds at once (`--sms 8`); if it is not there: any number

    def main(comm, tokens=8): ...      once per rank; numbers with defaults are options (`--tokens 3`)

    def check(results, tokens=8): ...  may be there: gets what the ranks have returned, and raises AssertionError if it
                                       is wrong. main may use assert, too

So is a script that imports numba.cuda and has no such main: see nbep/lab/numba_cuda/script.py. It may say NUM_SMS = 4,
and compares by assert.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from nbep.registry import registered

Parameters = Mapping[str, int]


class ScenarioError(Exception):
    """A scenario that cannot be run: what is wrong with it, in words for the user."""


@dataclass(frozen=True)
class Scenario:
    """A program for a number of ranks.

    name: as users type it: that of one of nbep's, or a path
    about: what it does, in a line
    main: main(comm, **parameters), once per rank
    check: check(results, **parameters) raises AssertionError if what the ranks have returned is wrong
    parameters: numbers that the program takes, and their defaults; "ranks" is one
    least: how small they may become when a failing run is made smaller; 1 if it is not said
    kernels: whose faults it can show: names of kernels, or of folders of them
    variants: parameters that lead into all of their code, for faults
    shapes: parameters that seeds take in turn by default: most are small, so that many seeds take little time
    lets_time_pass: waits that nothing can end time out, as on a GPU; else that is a deadlock
    compares: whether it looks at any result: it has a check, or its file an assert
    script: runs a program for numba.cuda, in place of main, on so many SMs as the parameter "sms" says
    """

    name: str
    about: str
    main: Callable[..., Any] = field(repr=False)
    check: Callable[..., None] | None = field(repr=False)
    parameters: Parameters
    least: Parameters = field(default_factory=dict)
    kernels: tuple[str, ...] = ()
    variants: tuple[Parameters, ...] = ({},)
    shapes: tuple[Parameters, ...] = ({},)
    lets_time_pass: bool = False
    compares: bool = True
    script: Callable[..., None] | None = field(default=None, repr=False)


def scenarios() -> dict[str, Scenario]:
    """Those that have names."""
    return dict(ChainMap(*registered("scenarios")))


@cache
def load_scenario(name: str) -> Scenario:
    """One of nbep's scenarios, or that of a file.

    Raises: ScenarioError
    """
    if name in scenarios():
        return scenarios()[name]
    path = Path(name)
    if path.suffix != ".py" and not path.exists():
        raise ScenarioError(f"no scenario {name!r}; there are {', '.join(scenarios())}, and files with main(comm)")
    if is_script(path):
        return script_scenario(path, name)
    return scenario_of(load_module(path), name)


def script_scenario(path: Path, name: str) -> Scenario:
    """The scenario that a script is."""

    def runs(seen: Any, **options: Any) -> None:
        from nbep.lab.numba_cuda import script

        script.explore(path, seen, **options)

    tree = ast.parse(path.read_text())
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef)
            and node.name == "check"
            and [a.arg for a in node.args.args] == ["results"]
        ):
            raise ScenarioError(f"{name}: check(results) is for files with main(comm); a script compares with assert")
    numbers = dict(_constants_in(tree))
    if "NUM_RANKS" in numbers:
        raise ScenarioError(f"{name}: NUM_RANKS is for files with main(comm); a script is one program, for one GPU")
    sms = {"sms": _count(name, "NUM_SMS", numbers["NUM_SMS"])} if "NUM_SMS" in numbers else {}
    about = (ast.get_docstring(tree) or f"the kernels of {name}").partition("\n")[0]
    return Scenario(name, about, runs, None, sms, sms, compares=_asserts(tree), script=runs)


def _constants_in(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """The variables of a module that are constants, which can be had before it runs."""
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
            continue
        if not any(isinstance(part, (ast.Name, ast.Call)) for part in ast.walk(node.value)):
            value = eval(compile(ast.Expression(node.value), "a constant", "eval"))
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((getattr(target, "id", ""), value) for target in targets)


def _count(file: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScenarioError(f"{file}: {name} = {value!r}; must be an integer of at least 1")
    return value


def is_script(path: Path) -> bool:
    """Whether a file is a program for numba.cuda: it imports that, and has no main(comm)."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False
    if any(isinstance(node, ast.FunctionDef) and node.name == "main" and node.args.args for node in tree.body):
        return False
    imported = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [getattr(node, "module", None) or "" for node in imported]
    names += [f"{getattr(node, 'module', None) or ''}.{one.name}" for node in imported for one in node.names]
    return any(name == ".numba.cuda" or name.startswith(("numba.cuda", "numba_cuda_mlir")) for name in names) or (
        ".numba" in names and "cuda" in path.read_text()
    )


@cache
def load_module(path: Path) -> ModuleType:
    """A user's file as a module. Its errors are the user's."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ScenarioError(f"{path}: no Python file")
    if is_script(path):
        raise ScenarioError(f"{path}: a script for numba.cuda; only kernels of nbep.device have faults with names")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as if the file were run
    spec.loader.exec_module(module)
    return module


def scenario_of(module: ModuleType, name: str) -> Scenario:
    """The scenario that a module with main(comm) is."""
    main, check = getattr(module, "main", None), getattr(module, "check", None)
    if not callable(main):
        raise ScenarioError(f"{name}: has no function main(comm)")
    if check is not None and not callable(check):
        raise ScenarioError(f"{name}: check = {check!r}; must be a function of results, what the ranks have returned")
    parameters = {
        "ranks": _count(name, "NUM_RANKS", getattr(module, "NUM_RANKS", 2)),
    }
    defaults = ((p.name, p.default) for p in inspect.signature(main).parameters.values())
    parameters |= {name: int(value) for name, value in defaults if isinstance(value, int)}
    if hasattr(module, "NUM_SMS"):
        parameters["sms"] = _count(name, "NUM_SMS", module.NUM_SMS)
    about = (inspect.getdoc(module) or "").partition("\n")[0] or f"main of {name}"
    least = {name: parameters[name] for name in ("sms",) if name in parameters}  # fewer are another program
    least["ranks"] = min(2, parameters["ranks"])  # a rank that talks to itself hides what is wrong between two
    compares = check is not None or _asserts(ast.parse(inspect.getsource(module)))
    return Scenario(name, about, main, check, parameters, least, compares=compares)


def _asserts(tree: ast.Module) -> bool:
    """Whether a module has an assert statement, or a call of NumPy's assert_... functions, where something comes."""
    used = {"main", *(getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(tree))}
    body = [node for node in tree.body if not isinstance(node, ast.FunctionDef) or node.name in used]
    for node in (node for top in body for node in ast.walk(top)):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name.startswith("assert"):
                return True
    return False


def accepted(function: Callable, parameters: Parameters) -> dict[str, int]:
    """Those parameters that a function takes."""
    taken = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in taken):
        return dict(parameters)
    return {p.name: parameters[p.name] for p in taken if p.name in parameters}
