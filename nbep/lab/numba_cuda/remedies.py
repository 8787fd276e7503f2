"""What to write where, as reports say it: found in the source of the two accesses."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import Any

from nbep.emulator.machine.source import Site, line_number

from .code import parsed_file

ATOMIC_OF = {"Add": "add", "Sub": "sub", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor"}


def atomic_of(store: Site | None, load: Site | None = None) -> str | None:
    """The name of the atomic, if a store's value, or whether it is made, comes of a load of the same element.

    Args: load: the load that it must be; None for any
    """
    found = None if store is None else _statement(store)
    if found is None:
        return None
    function, statement = found
    target = ast.unparse(_target(statement))
    if load is not None and target not in _loaded(load, function):
        return None
    if isinstance(statement, ast.AugAssign):
        return ATOMIC_OF.get(type(statement.op).__name__, "cas")
    made: dict[str, list[ast.expr]] = {}
    for one in ast.walk(function):
        if isinstance(one, (ast.Assign, ast.AugAssign)):
            for name in ast.walk(_target(one)):
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
            atomic = ATOMIC_OF.get(type(value.op).__name__, "cas")
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
    around = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and _spans(one, number)]
    return max(around, key=lambda one: one.lineno, default=None)


def _statement(site: Site) -> Any:
    """The store at a site, to one element, and its function."""
    function, number = _tree(site), line_number(site)
    for one in ast.walk(function) if function is not None else ():
        if isinstance(one, (ast.Assign, ast.AugAssign)) and _spans(one, number):
            if isinstance(_target(one), ast.Subscript):
                return function, one
    return None


def _spans(one: Any, number: int) -> bool:
    return one.lineno <= number <= one.end_lineno


def _target(statement: Any) -> Any:
    return statement.target if isinstance(statement, ast.AugAssign) else statement.targets[0]


def _loaded(site: Site, function: ast.AST) -> Iterator[str]:
    """The elements that a site's expression may be: one, where Python keeps the columns."""
    place = list(site[0].co_positions())[site[1] // 2]
    for one in ast.walk(function):
        if isinstance(one, ast.Subscript) and one.lineno == place[0] and one.col_offset == place[2]:
            yield ast.unparse(one)


def barrier(first_one: Site | None, there: str) -> str | None:
    """Where a block's barrier between two accesses belongs; None if that is not sure. there: file and line of one"""
    file, _, number = there.partition(" (")[0].rpartition(":")
    function = None if first_one is None or first_one[0].co_filename != file else _tree(first_one)
    if function is None or first_one is None:
        return None
    lines, body, loop = (line_number(first_one), int(number)), function.body, None  # type: ignore[attr-defined]
    while True:
        places = [next((i for i, one in enumerate(body) if _spans(one, n)), -1) for n in lines]
        first, last = sorted(places)
        if first < 0:
            return None
        if first != last and not any(map(_is_barrier, body[first + 1 : last])):
            if loop is None or places[0] == first or _is_barrier(loop.body[-1]):
                return f"write cuda.syncthreads() after line {body[first].end_lineno}{_level(body[first])}"
        inner = body[first]
        if first != last or not isinstance(inner, (ast.For, ast.While)):
            break
        loop, body = inner, inner.body
    if loop is None or any(isinstance(one, (ast.Continue, ast.Break, ast.Return)) for one in ast.walk(loop)):
        return None
    end = loop.body[-1]
    where = f"after line {end.end_lineno}, at the end of each iteration of the loop"
    return f"write cuda.syncthreads() {where}{_level(end)}"


def _is_barrier(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).endswith(".syncthreads()")


def _level(statement: ast.stmt) -> str:
    """How far in, where that is not clear."""
    word = type(statement).__name__.lower()
    return f", outside of the `{word}`" if isinstance(statement, (ast.If, ast.For, ast.While)) else ""


def atomic_call(store: Site | None) -> str | None:
    """The atomic in place of a load and a store: `cuda.atomic.add(bins, b, 1)`; None if that is not sure."""
    found = None if store is None else _statement(store)
    if found is None:
        return None
    function, statement = found
    target: Any = _target(statement)
    chain: list[Any] = [statement]  # what goes: the store, and the names by which its value comes from the element
    change = _change(statement, ast.unparse(target), function, chain)
    lines = sorted({one.lineno for one in chain})
    names = {one.targets[0].id: ast.unparse(one.value) == ast.unparse(target) for one in chain[1:]}
    kept = [
        one.id for one in ast.walk(function)
        if isinstance(one, ast.Name) and one.id in names and one.lineno not in lines
    ]  # fmt: skip
    if change is None or not all(names[name] for name in kept):
        return None
    call = f"cuda.atomic.{change[0]}({ast.unparse(target.value)}, {ast.unparse(target.slice)}, {change[1]})"
    *first, last = map(str, lines)
    where = f"lines {', '.join(first)} and {last}" if first else f"line {last}"
    return f"write {f'{kept[0]} = ' if kept else ''}{call} in place of {where}"


def _change(statement: Any, target: str, function: Any, chain: list[Any]) -> tuple[str, str] | None:
    """The atomic and its operand, of a statement that adds to its target, or the like."""
    if isinstance(statement, ast.AugAssign):
        name = ATOMIC_OF.get(type(statement.op).__name__)
        return None if name is None else (name, ast.unparse(statement.value))

    def meaning(value: ast.expr) -> ast.expr:
        """The one value that a name stands for."""
        given = [
            one for one in ast.walk(function)
            if isinstance(one, ast.Assign) and isinstance(value, ast.Name) and ast.unparse(one.targets[0]) == value.id
        ]  # fmt: skip
        if len(given) != 1:
            return value
        chain.append(given[0])
        return meaning(given[0].value)

    value = meaning(statement.value)
    if isinstance(value, ast.BinOp):
        name, operands = ATOMIC_OF.get(type(value.op).__name__), [value.left, value.right]
    elif isinstance(value, ast.Call) and ast.unparse(value.func) in ("max", "min") and len(value.args) == 2:
        name, operands = ast.unparse(value.func), value.args
    else:
        return None
    for place in (0,) if name == "sub" else (0, 1):
        length = len(chain)
        if name is not None and ast.unparse(meaning(operands[place])) == target:
            return name, ast.unparse(operands[1 - place])
        del chain[length:]
    return None
