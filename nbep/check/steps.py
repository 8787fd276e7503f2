"""The steps of a function of device code: what is called there, in the order of its lines; numbers of slots."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType

from nbep.device.jit import PRIMITIVES
from nbep.device.protocols.matrices import matrix_cell

POLLS = ("ld_acquire_", "ld_relaxed_", "ld_volatile_")  # what a wait polls with
LOOPS = ("wait_until", "wait_or_report")  # the loop of all waits: what is left out is the wait that calls it


def function_tree(function: FunctionType) -> ast.FunctionDef:
    """The tree of a function's source, with the line numbers of its file; nested functions have none of their own.

    `ptx.name` is `name` in it: a step has one name, however its file imports primitives.

    Raises: OSError if the source cannot be found
    """
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        raise OSError(f"{function.__name__} is not written with def")
    return _WithoutNamespace().visit(found)


class _WithoutNamespace(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "ptx":
            return ast.copy_location(ast.Name(node.attr, node.ctx), node)
        return self.generic_visit(node)


def calls_of(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """All calls of names in a tree, by the name; and where a load is named that a wait is to poll with."""
    found: dict[str, list[ast.expr]] = {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {id(call.func) for call in calls}
    cells = {id(call.args[0]): call.args[1:2] for call in calls if call.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found.setdefault(node.func.id, []).append(node)
        elif isinstance(node, ast.Name) and id(node) not in called and node.id.startswith(POLLS):
            found.setdefault(node.id, []).append(ast.copy_location(ast.Call(node, cells.get(id(node), []), []), node))
    return {name: sorted(nodes, key=position) for name, nodes in found.items()}


def ring_sizes_of(tree: ast.AST) -> list[ast.expr]:
    """Where a tree reads the number of slots of a ring, but for what it only reports."""
    reported = {id(inner) for call in calls_of(tree).get("report_fault", []) for inner in ast.walk(call)}
    found = [
        node
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr == "num_slots") and id(node) not in reported
    ]
    return sorted(found, key=position)


def turns_of(tree: ast.AST) -> list[ast.expr]:
    """Where a tree says which of two places a round takes: `round_ % 2`."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and ast.unparse(node) == "round_ % 2"]
    return sorted(found, key=position)


def is_wait(name: str) -> bool:
    """Whether a function of this name waits for something: but for `wait_expired`, it is written with primitives."""
    return name.startswith("wait_") and name not in PRIMITIVES


def is_zero(node: ast.expr) -> bool:
    """Whether a store of this makes a cell empty."""
    return ast.unparse(node) in ("0", "(0, 0, 0, 0)")


def coherent_loads_of(tree: ast.AST) -> list[ast.Name]:
    """Where a tree names a load that bypasses L1 and is coherent all the same: it calls it, or passes it on."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id.startswith("ld_na_")]


def position(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def cell_of(call: ast.Call, lines: list[str], first: int) -> str:
    """What a call's address is called: the tag of its pair, or the constant or the name in it."""
    for number in range(call.lineno, (call.end_lineno or call.lineno) + 1):
        _, is_tagged, tag = lines[number - first].partition("# PAIR ")
        if is_tagged:
            return tag.split(":")[0].split()[0]
    if not call.args:
        return ""
    terms = _terms(call.args[0])
    constants = [term for term in terms if _is_constant(term)]
    address: ast.AST = constants[-1] if constants else terms[0]
    if isinstance(address, ast.Call) and ast.unparse(address.func).startswith("ld_"):  # a table says where it is
        address = next((name for name in ast.walk(address.args[0]) if _is_constant(name)), address)
    if isinstance(address, ast.Call):
        address = address.func
    return address.attr if isinstance(address, ast.Attribute) else ast.unparse(address)


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id.isupper()


def _terms(node: ast.expr) -> list[ast.expr]:
    """What is added up; of an entry of a matrix, where the matrix begins."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == matrix_cell.__name__:
        return _terms(node.args[0])
    return [node]
