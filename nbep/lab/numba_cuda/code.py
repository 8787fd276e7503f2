"""Pieces of Python code that stand in for a kernel's own: templates, where they stand, and the source of a function."""

from __future__ import annotations

import ast
import builtins
import inspect
import itertools
import linecache
import sys
from functools import cache
from types import FunctionType
from typing import Any

from numba.core.errors import TypingError


class KernelTypeError(TypingError):
    """A kernel that Numba would not compile, or that the emulator cannot run; the message names what, and the line."""


def fail(node: ast.AST, filename: str, message: str) -> KernelTypeError:
    line = getattr(node, "lineno", 0)
    text = linecache.getline(filename, line).strip()
    return KernelTypeError(f"{message}\n  at {filename}:{line}" + (f"\n    {text}" if text else ""))


@cache
def _named(template: str, count: int) -> ast.expr:
    return ast.parse(template.format(*(f"_a{i}_" for i in range(count))), mode="eval").body


def _copy(tree: Any, holes: dict[str, ast.expr]) -> Any:
    if isinstance(tree, list):
        return [_copy(one, holes) for one in tree]
    if not isinstance(tree, ast.AST):
        return tree
    if isinstance(tree, ast.Name) and tree.id in holes:
        return holes[tree.id]
    return type(tree)(**{field: _copy(getattr(tree, field, None), holes) for field in tree._fields})


def build(template: str, *parts: ast.expr) -> ast.expr:
    """The code of a template in which {0}, {1}, ... are pieces of code."""
    return _copy(_named(template, len(parts)), {f"_a{i}_": part for i, part in enumerate(parts)})


def at_place_of(new: Any, old: ast.AST) -> Any:
    """New code where the kernel's own stands, if it has no place yet."""
    return new if hasattr(new, "lineno") else ast.copy_location(new, old)


@cache
def parsed_file(filename: str, lines: tuple[str, ...]) -> ast.Module:
    return ast.parse("".join(lines))


_numbers = itertools.count()
_exec = exec  # also where a program puts the following in its place


def exec_with_source(source: Any, names: Any = None, local: Any = None) -> None:
    """`exec` that gives its text to linecache, as IPython does: kernels are compiled from their source."""
    if names is None:
        frame = sys._getframe(1)
        names, local = frame.f_globals, frame.f_locals
    if isinstance(source, str):
        filename = f"<text-{next(_numbers)}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        source = compile(source, filename, "exec")
    _exec(source, names, names if local is None else local)


class NoSource(KernelTypeError):
    """The source of a function cannot be had."""


def source_of(function: FunctionType) -> ast.FunctionDef | ast.Lambda:
    """The definition of a function in its file."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if not lines:
        raise NoSource(f"the source of `{function.__qualname__}` cannot be had: {code.co_filename} is no file")
    try:
        tree = parsed_file(code.co_filename, tuple(lines))
    except SyntaxError:
        return _dedented(function)
    found = [node for node in ast.walk(tree) if _is_of(node, code)]
    if not found:
        raise NoSource(f"the source of `{function.__qualname__}` is not in {code.co_filename} any more")
    if len(found) > 1 and isinstance(found[0], ast.Lambda):
        columns = [place for place in code.co_positions() if place[2] is not None]
        inside = [node for node in found if all(_holds(node, place) for place in columns)]
        found = inside or found
    return found[-1]  # type: ignore[return-value]


def _dedented(function: FunctionType) -> Any:
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(inspect.cleandoc("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    return next(node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda)))


def _is_of(node: ast.AST, code: Any) -> bool:
    if isinstance(node, ast.FunctionDef):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        return node.name == code.co_name and first == code.co_firstlineno
    if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        return node.lineno == code.co_firstlineno and names == list(code.co_varnames[: len(names)])
    return False


def _holds(node: Any, place: tuple) -> bool:
    line, end_line, column, end_column = place
    begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return (begin <= (line, column) and (end_line, end_column) <= end) or (line == node.lineno and column == 0)


def scope_of(function: FunctionType) -> dict[str, Any]:
    """Globals, builtins and what the closure holds."""
    scope = {**vars(builtins), **function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            scope[name] = cell.cell_contents
        except ValueError:
            scope.pop(name, None)
    return scope


def assigned_in(body: list[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
