"""The steps of kernels that order memory, found in their source, and kernels with one such step left out.

A step is a call: a barrier, a fence, a wait for the copy engine, or an access that publishes or observes. Left out it
is nothing at all, the access without its order, or a vote without waiting for the others. The function itself is
changed, for all who call it.
"""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import NamedTuple

import pytest

from nbep.device import primitives

NOTHING = "nothing"
PREDICATE = "predicate"  # its last argument stands for what it returns
ALONE = "alone"  # its last argument, which says that it comes behind what is quiet, is False in place of True
# What stands for a step that is left out: nothing, or a weaker access.
WEAKER = {
    "bar_sync": NOTHING,
    "fence_mbarrier_init": NOTHING,
    "fence_proxy_async_global": NOTHING,
    "fence_proxy_async_shared": NOTHING,
    "syncthreads": NOTHING,
    "syncwarp": NOTHING,
    "tma_store_wait_all": NOTHING,
    "tma_store_wait_read_all": NOTHING,
    "team_barrier": NOTHING,
    "bar_red_and": PREDICATE,
    "quiet": NOTHING,
    "atom_add_release_sys_s32": "atom_add_relaxed_sys_s32",
    "atom_exch_release_cta_shared_s32": "atom_exch_relaxed_cta_shared_s32",
    "atom_add_acq_rel_gpu_s32": "atom_add_relaxed_gpu_s32",
    "atom_add_acq_rel_sys_s32": "atom_add_relaxed_sys_s32",
    "atom_add_acq_rel_sys_s64": "atom_add_relaxed_sys_s64",
    "ld_acquire_cta_shared_s32": "ld_relaxed_cta_shared_s32",
    "ld_acquire_gpu_s32": "ld_relaxed_gpu_s32",
    "ld_acquire_sys_s32": "ld_relaxed_sys_s32",
    "ld_acquire_sys_s64": "ld_relaxed_sys_s64",
    "st_release_gpu_s32": "st_relaxed_gpu_s32",
    "st_release_sys_s32": "st_relaxed_sys_s32",
    "st_release_sys_s64": "st_relaxed_sys_s64",
    "amo_add": ALONE,
    "add_to_arrival": ALONE,
    "add_to_count": ALONE,
}


class Step(NamedTuple):
    """The number-th call of a name in a function, counted from 0."""

    module: str
    function: str
    name: str
    number: int

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}-{self.name}-{self.number}"

    def leave_out(self, patch: pytest.MonkeyPatch) -> None:
        """Let the function do without it."""
        module = importlib.import_module(self.module)
        tree = ast.parse(Path(module.__file__).read_text())
        calls = _calls(_function(tree, self.function), self.name)
        call, weaker = calls[self.number], WEAKER[self.name]
        if weaker == NOTHING:
            _Replace(call, None).visit(tree)
        elif weaker == PREDICATE:
            _Replace(call, call.args[-1]).visit(tree)
        elif weaker == ALONE:
            call.args[-1] = ast.copy_location(ast.Constant(False), call)
        else:
            call.func.id = weaker
            patch.setattr(module, weaker, getattr(primitives, weaker), raising=False)
        replace_code(getattr(module, self.function), tree, module.__file__, patch)


def change(function: FunctionType, edit: Callable[[ast.FunctionDef], None], patch: pytest.MonkeyPatch) -> None:
    """Let a function do what its tree says after an edit."""
    path = function.__code__.co_filename
    tree = ast.parse(Path(path).read_text())
    edit(_function(tree, function.__name__))
    replace_code(function, tree, path, patch)


def replace_code(function: FunctionType, tree: ast.Module, path: str, patch: pytest.MonkeyPatch) -> None:
    """Let a function do what a changed tree of its module says."""
    codes = compile(ast.fix_missing_locations(tree), path, "exec").co_consts
    code = next(c for c in codes if isinstance(c, CodeType) and c.co_name == function.__name__)
    patch.setattr(function, "__code__", code)


class _Replace(ast.NodeTransformer):
    """Puts an expression in place of a call, or nothing in place of the statement that is the call."""

    def __init__(self, call: ast.Call, by: ast.expr | None):
        self.call = call
        self.by = by

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if self.by is None and node.value is self.call:
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return self.by if self.by is not None and node is self.call else self.generic_visit(node)


def _function(tree: ast.Module, name: str) -> ast.FunctionDef:
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)


def _calls(function: ast.FunctionDef, name: str) -> list[ast.Call]:
    """The calls of a name in a function, in the order of its lines; without those that order nothing anyhow."""
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    if WEAKER[name] == ALONE:
        calls = [call for call in calls if isinstance(call.args[-1], ast.Constant) and call.args[-1].value is True]
    return sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def steps_of(module: str) -> list[Step]:
    """All steps of a module's functions."""
    tree = ast.parse(Path(importlib.import_module(module).__file__).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [
        Step(module, function.name, name, number)
        for function in functions
        for name in WEAKER
        for number in range(len(_calls(function, name)))
    ]
