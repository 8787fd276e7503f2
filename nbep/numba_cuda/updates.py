"""Which atomic would do what a store does that puts back what was made of the same element: a lost update."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import Any

from nbep.emulator.machine.source import Site, line_number

from .code import parsed_file

ATOMICS = {"Add": "add", "Sub": "sub", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor"}


def atomic_of(store: Site | None, load: Site | None = None) -> str | None:
    """The name of the atomic, if a store's value, or whether it is made, comes of a load of the same element.

    Args: load: the load that it must be; None for any
    """
    found = None if store is None else _statement(store)
    if store is None or found is None:
        return None
    function, statement = found
    target = ast.unparse(statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0])
    if load is not None and target not in _loaded(load, function):
        return None
    if isinstance(statement, ast.AugAssign):
        return ATOMICS.get(type(statement.op).__name__, "cas")
    made: dict[str, list[ast.expr]] = {}
    for one in ast.walk(function):
        if isinstance(one, (ast.Assign, ast.AugAssign)):
            for name in ast.walk(one.target if isinstance(one, ast.AugAssign) else one.targets[0]):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    made.setdefault(name.id, []).append(one.value)
    tests = [one.test for one in ast.walk(function) if isinstance(one, ast.If) and statement in ast.walk(one)]
    for values, is_test in (([statement.value], False), (tests, True)):
        atomic = _made_of(values, target, made)
        if atomic is not None:
            return "max" if is_test else atomic
    return None


def _made_of(values: list[ast.expr], target: str, made: dict[str, list[ast.expr]]) -> str | None:
    """The atomic for values of which one is made of the element `target`; None if none is."""
    left, seen = [(value, "cas") for value in values], set()
    while left:
        value, atomic = left.pop()
        if isinstance(value, ast.BinOp):
            atomic = ATOMICS.get(type(value.op).__name__, "cas")
        elif isinstance(value, ast.Call):
            atomic = next((one for one in ("max", "min") if one in ast.unparse(value.func)), atomic)
        if isinstance(value, ast.Subscript) and ast.unparse(value) == target:
            return atomic
        if isinstance(value, ast.Name) and value.id not in seen:
            seen.add(value.id)
            left += [(one, atomic) for one in made.get(value.id, ())]
        left += [(one, atomic) for one in ast.iter_child_nodes(value) if isinstance(one, ast.expr)]
    return None


def _tree(site: Site) -> ast.AST | None:
    """The function whose code a site is in."""
    lines = linecache.getlines(site[0].co_filename)
    try:
        tree = parsed_file(site[0].co_filename, tuple(lines))
    except SyntaxError:
        return None
    number = line_number(site)
    around = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef) and one.lineno <= number <= (one.end_lineno or 0)
    ]
    return max(around, key=lambda one: one.lineno, default=None)


def _statement(site: Site) -> Any:
    """The store at a site, to one element, and its function."""
    function, number = _tree(site), line_number(site)
    for one in ast.walk(function) if function is not None else ():
        if isinstance(one, (ast.Assign, ast.AugAssign)) and one.lineno <= number <= (one.end_lineno or 0):
            target = one.target if isinstance(one, ast.AugAssign) else one.targets[0]
            if isinstance(target, ast.Subscript):
                return function, one
    return None


def _loaded(site: Site, function: ast.AST) -> Iterator[str]:
    """The elements that a site's expression may be: one, where Python keeps the columns."""
    place = list(site[0].co_positions())[site[1] // 2]
    for one in ast.walk(function):
        if isinstance(one, ast.Subscript) and one.lineno == place[0] and one.col_offset == place[2]:
            yield ast.unparse(one)
