"""Compiles a kernel: the same statements, with the types that Numba gives to each value.

The result is a Python function whose lines are those of the kernel. Types flow with control: where two paths meet, a
variable has the type that Numba unifies of both, and a loop is gone through until its types stay. So each assignment
is a version of its variable, as in Numba's SSA form.
"""

from __future__ import annotations

import ast
import enum
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np

from . import cuda_rules, ops, reports, stubs
from .code import assigned_in, at_place_of, build, fail, scope_of, source_of
from .env import NOT_CONSTANT, Conflict, Env, V, Var, called, calls, invoked, join, same, widened
from .expressions import Expressions
from .loops import silence, watched
from .memory import DeviceNDArray
from .types import (
    BOOL,
    C128,
    F64,
    UNKNOWN,
    Arr,
    Iter,
    Known,
    Num,
    Opt,
    Rec,
    Tup,
    is_number,
    type_of_int,
    unify,
)
from .unit import type_of

MAX_PASSES = 12  # through a loop; types only ever grow


class Compiled:
    """A function for arguments of certain types. run: called with the thread, who it is, and the arguments"""

    def __init__(self, name: str):
        self.name, self.is_kernel = name, False
        self.run: Any = None
        self.returns: Any = UNKNOWN
        self.uses: set[str] = set()
        self.variables: dict[str, Any] = {}  # their types at the end
        self.scope: dict[str, Any] = {}  # what it has found among its globals and in its closure
        self.keep: Any = None  # what its key among all functions has the id of


class Loop:
    def __init__(self, is_while: bool = False) -> None:
        self.is_while = is_while
        self.breaks: list[Env] = []
        self.continues: list[Env] = []


class FunctionCompiler(Expressions):
    """Compiles one function. scope: values by name, in place of its globals and its closure

    env: what is known where the compiler is, None where nothing goes on; at: the node that it is at
    """

    def __init__(self, unit: Any, function: FunctionType, types: dict[str, Any], compiled: Compiled, node: Any = None):
        self.unit = unit
        self.function = function
        self.filename = function.__code__.co_filename
        self.node: Any = node if node is not None else source_of(function)
        self.at: Any = self.node
        self.compiled = compiled
        self.types = types
        self.names: dict[str, Any] = dict(ops.NAMES)
        self.numbers: dict[int, str] = {}
        self.kept: list[Any] = []
        self.temporaries = 0
        self.loops: list[Loop] = []
        self.consts: dict[str, Any] = {}
        self.returned: Any = None
        self.heads: dict[int, Env] = {}
        self.locals: set[str] = set()
        self.scope = scope_of(function)

    def compile(self) -> None:
        """Fill in `compiled`. Twice, if what it returns is of several types, or of one that a call of itself needs."""
        for _ in range(MAX_PASSES):
            self.heads = {}
            before, self.returned = self.compiled.returns, None
            tree = self.function_tree()
            returned = Known(None) if self.returned is None else self.returned
            if returned == before:
                break
            self.compiled.returns = returned
        else:
            raise self.fail(f"Return type of recursive function does not converge: {returned}")
        if self.returned is UNKNOWN:
            raise self.fail("this recursive function never returns: cannot type infer runaway recursion")
        module = ast.fix_missing_locations(ast.Module([tree], []))
        exec(compile(module, self.filename, "exec"), self.names)
        self.compiled.run = self.names[tree.name]

    def function_tree(self) -> ast.FunctionDef:
        node = self.node
        arguments = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs]
        names = [one.arg for one in arguments if one is not None]
        env = {name: Var(self.types[name], const=self.consts.get(name, NOT_CONSTANT)) for name in names}
        is_lambda = isinstance(node, ast.Lambda)
        body: Any = [ast.Return(node.body)] if is_lambda else node.body
        self.locals = {*names, *assigned_in(body)}
        statements, end = self.block(body, env)
        if end is not None:
            self.note_return(Known(None))
            self.compiled.variables = {name: var.t for name, var in end.items()}
        new: Any = ast.FunctionDef(
            name="_lambda" if is_lambda else node.name,
            args=ast.arguments([], [ast.arg(one) for one in ("_t", "_w", *names)], None, [], [], None, []),
            body=statements or [ast.Pass()],
            decorator_list=[],
        )
        if hasattr(ast, "TypeVar"):
            new.type_params = []
        return at_place_of(new, node)

    # --- statements -------------------------------------------------------------------------------------------------

    def block(self, statements: list[ast.stmt], env: Env | None) -> tuple[list[ast.stmt], Env | None]:
        """The code of some statements, and what is known behind them; None if nothing goes on there."""
        result: list[ast.stmt] = []
        self.env = env
        before = self.at
        for statement in statements:
            if self.env is None:
                break
            self.at = at_place_of(statement, before)
            method = getattr(self, f"do_{type(statement).__name__}", None)
            if method is None:
                raise self.fail(f"{type(statement).__name__} is not supported in kernels")
            result += [at_place_of(one, statement) for one in method(statement)]
        self.at = before
        return result, self.env

    def fail(self, message: str) -> Exception:
        return fail(self.at, self.filename, f"{self.function.__name__}: {message}")

    def do_Pass(self, node: ast.stmt) -> list[ast.stmt]:
        return [node]

    def do_Expr(self, node: ast.Expr) -> list[ast.stmt]:
        if isinstance(node.value, ast.Constant):
            return []  # a docstring
        code = self.value(node.value).code
        if calls(code, "atomic"):
            silence(self, code)
        return [ast.Expr(code)]

    def do_Import(self, node: ast.Import) -> list[ast.stmt]:
        for alias in node.names:
            module = import_module(alias.name)
            name = alias.asname or alias.name.partition(".")[0]
            self.env = {**self.env, name: Var(Known(module if alias.asname else sys.modules[name]))}
        return []

    def do_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        module = import_module(node.module or "")
        found = {alias.asname or alias.name: Var(Known(getattr(module, alias.name))) for alias in node.names}
        self.env = {**self.env, **found}
        return []

    def do_FunctionDef(self, node: ast.FunctionDef) -> list[ast.stmt]:
        self.env = {**self.env, node.name: Var(Known(LocalFunction(node, self)))}
        return []

    def do_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        is_named = isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
        self.target_name = node.targets[0].id if is_named else None  # type: ignore[attr-defined]
        value = self.value(node.value)
        self.target_name = None
        if len(node.targets) == 1:
            return self.assign(node.targets[0], value)
        name = self.temporary()
        result = [self.named(name, value.code)]
        for target in node.targets:
            result += self.assign(target, V(value.t, build(name), value.const, value.bits))
        return result

    def do_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt]:
        return [] if node.value is None else self.assign(node.target, self.value(node.value))

    def assign(self, target: ast.expr, value: V) -> list[ast.stmt]:
        if isinstance(target, ast.Name):
            self.env = {**self.env, target.id: Var(value.t, False, value.bits, value.const)}
            if isinstance(value.t, Known) and value.t.value is not None and not isinstance(value.t.value, str):
                return []
            return [self.named(target.id, value.code)]
        if isinstance(target, (ast.Tuple, ast.List)):
            return self.unpack(target, value)
        silence(self, value.code)
        if isinstance(target, ast.Subscript):
            return [ast.Expr(self.store_item(target, value))]
        if isinstance(target, ast.Attribute):
            return [ast.Expr(self.store_attribute(target, value))]
        raise self.fail(f"assignment to {type(target).__name__} is not supported in kernels")

    def unpack(self, target: Any, value: V) -> list[ast.stmt]:
        count = len(target.elts)
        value = self.made_real(value)
        if not isinstance(value.t, Tup):
            what = "" if isinstance(value.t, (Arr, Rec, Iter)) else "value of type "
            raise self.fail(f"a {what}{value.t} cannot be unpacked")
        if len(value.t.items) != count:
            raise self.fail(f"{count} targets for a tuple of {len(value.t.items)}")
        names = [self.temporary() for _ in range(count)]
        stores = ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())
        result: list[ast.stmt] = [ast.Assign([stores], value.code)]
        consts = value.const if isinstance(value.const, tuple) else (NOT_CONSTANT,) * count
        for one, name, t, const in zip(target.elts, names, value.t.items, consts, strict=True):
            result += self.assign(one, V(t, build(name), NOT_CONSTANT if isinstance(t, Known) else const))
        return result

    def do_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        target = node.target
        if isinstance(target, ast.Subscript):
            return self.augment_item(node, target)
        left = self.value(build(ast.unparse(target)))
        value = self.binary(type(node.op).__name__, left, self.value(node.value))
        return self.assign(target, value)

    def do_Delete(self, node: Any) -> list[ast.stmt]:
        return []

    do_Global = do_Nonlocal = do_Delete

    def do_If(self, node: ast.If) -> list[ast.stmt]:
        truth = self.truth(self.value(node.test))
        after_test = self.env
        if truth.const is not NOT_CONSTANT:
            return self.block(node.body if truth.const else node.orelse, after_test)[0]
        body, then = self.block(node.body, after_test)
        orelse, other = self.block(node.orelse, after_test)
        self.env = join(then, other)
        return [ast.If(truth.code, body or [ast.Pass()], orelse)]

    def through(self, node: ast.For | ast.While, begin: Callable[[], Any]) -> tuple[Any, Env, Any, Env]:
        """Go through a loop until the types stay. begin: what a turn begins with: a test, or the next value

        Returns: what that is; what is known behind it; the code of the turn, None if there is none; what is known at
        the head. The breaks are in `self.left`
        """
        env: Env = self.env
        head: Any = join(env, self.heads.get(id(node)))
        for _ in range(MAX_PASSES):
            self.env = dict(head)
            begun, inside = begin(), self.env
            loop = Loop(isinstance(node, ast.While))
            if isinstance(begun, V) and begun.const is not NOT_CONSTANT and not begun.const:
                return begun, inside, None, head
            self.loops.append(loop)
            body, end = self.block(node.body, inside)
            self.left = self.loops.pop().breaks
            new_head: Any = join(env, end, *loop.continues)
            if same(new_head, head):
                break
            head = self.heads[id(node)] = widened(head, new_head)
        return begun, inside, body, head

    def do_While(self, node: ast.While) -> list[ast.stmt]:
        test, inside, body, head = self.through(node, lambda: self.truth(self.value(node.test)))
        if body is None:
            return self.block(node.orelse, inside)[0]
        left = self.left
        begin, turn = watched(self, node, head)
        orelse, other = self.block(node.orelse, inside)
        self.env = join(None if test.const is not NOT_CONSTANT else other, *left)
        return [begin, ast.While(test.code, [turn, *body], orelse)]

    def do_For(self, node: ast.For) -> list[ast.stmt]:
        iterable = self.iterated(self.held(self.value(node.iter)), unrolls=True)
        if isinstance(iterable.const, list):
            return self.unroll(node, iterable.const)

        def begin() -> tuple[ast.expr, list[ast.stmt]]:
            if isinstance(node.target, ast.Name):
                self.env[node.target.id] = Var(iterable.t.item, False, iterable.bits)
                return node.target, []
            name = self.temporary()
            return ast.Name(name, ast.Store()), self.assign(node.target, V(iterable.t.item, build(name)))

        (target, first), _, body, head = self.through(node, begin)
        left = self.left
        orelse, other = self.block(node.orelse, head)
        self.env = join(other, *left)
        return [ast.For(target, iterable.code, (first + body) or [ast.Pass()], orelse)]

    def unroll(self, node: ast.For, values: list[V]) -> list[ast.stmt]:
        """A loop over a tuple of several types: its body once for each."""
        result: list[ast.stmt] = []
        for value in values:
            if self.env is None:
                break
            result += self.assign(node.target, value)
            loop = Loop()
            self.loops.append(loop)
            result += self.block(node.body, self.env)[0]
            self.loops.pop()
            if loop.breaks or loop.continues:
                raise self.fail("break and continue are not supported in a loop over values of several types")
        return result

    def do_Break(self, node: ast.Break) -> list[ast.stmt]:
        self.loops[-1].breaks.append(self.env)
        self.env = None
        return [node]

    def do_Continue(self, node: ast.Continue) -> list[ast.stmt]:
        self.loops[-1].continues.append(self.env)
        self.env = None
        return [node]

    def note_return(self, t: Any) -> None:
        if isinstance(t, Known) and t.value is not None:
            raise self.fail(f"{t} cannot be returned")
        unified = t if self.returned is None else unify(self.returned, t)
        if unified is None:
            raise self.fail(f"returns {self.returned} and {t}: these have no common type")
        self.returned = unified

    def do_Return(self, node: ast.Return) -> list[ast.stmt]:
        if node.value is None:
            self.note_return(Known(None))
            code: Any = ast.Constant(node.lineno) if self.compiled.is_kernel else None  # for the report of a hang
        else:
            value = self.made_real(self.value(node.value))
            self.note_return(value.t)
            wanted = self.compiled.returns
            if isinstance(wanted, (Num, Tup, Opt)):
                value = self.converted(value, wanted)
            code = value.code
        self.env = None
        return [ast.Return(code)]

    def do_Raise(self, node: ast.Raise) -> list[ast.stmt]:
        if node.exc is None:
            raise self.fail("raise without an exception is not supported in kernels")
        call = node.exc if isinstance(node.exc, ast.Call) else None
        what = self.value(call.func if call else node.exc)
        if not (isinstance(what.t, Known) and isinstance(what.t.value, type)):
            raise self.fail("what a kernel raises must be the class of an exception, or a call of it")
        arguments = [self.value(one) for one in call.args] if call else []
        where = self.keep((self.function.__name__, self.filename))
        made = called(self.keep(reports.raised), "_w", self.keep(what.t.value), where, str(node.lineno), *arguments)
        self.env = None
        return [ast.Raise(made, None)]

    def do_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        test = self.truth(self.value(node.test))
        return [ast.Assert(test.code, None if node.msg is None else self.value(node.msg).code)]

    # --- names ------------------------------------------------------------------------------------------------------

    def temporary(self) -> str:
        self.temporaries += 1
        return f"_{self.temporaries}"

    def keep(self, value: Any) -> str:
        """A name by which the code has a value."""
        if id(value) not in self.numbers:
            name = self.numbers[id(value)] = f"_c{len(self.numbers)}"
            self.names[name] = value
            self.kept.append(value)
        return self.numbers[id(value)]

    def look_up(self, name: str) -> V:
        """What a name means: a variable, or something that is known."""
        var = self.env.get(name)
        if var is not None:
            return self.variable(name, var)
        if name in self.locals and not isinstance(self.node, ast.Lambda):
            if self.loops or name not in self.scope:  # from another turn, or an error of who comes here
                return V(UNKNOWN, build(name))
        if name in self.scope:
            self.compiled.scope[name] = self.scope[name]
            return self.known(self.scope[name])
        raise self.fail(f"`{name}` is not defined")

    def variable(self, name: str, var: Var) -> V:
        if isinstance(var.t, Conflict):
            kinds = " and ".join(str(t) for t in var.t.types)
            raise self.fail(f"`{name}` has two types that do not go together here: {kinds}")
        code = build(name)
        if isinstance(var.t, Known):
            return V(var.t, code)
        if var.const is not NOT_CONSTANT and isinstance(var.t, Num) and not var.is_mixed:
            return self.typed_constant(var.const, var.t)
        value = V(var.t, code, var.const, var.bits)
        if var.is_mixed:
            value.code = build(self.conversion_to(var.t), code)
        return value

    def conversion_to(self, t: Any) -> str:
        """From any representation."""
        if isinstance(t, Opt):
            return f"(lambda _x: None if _x is None else {self.conversion_to(t.of).format('_x')})({{0}})"
        if isinstance(t, Num) and is_number(t):
            return ops.INEXACT.get(t.dtype.str[1:], "bool({0})" if t == BOOL else "int({0})")
        if isinstance(t, Tup) and all(isinstance(one, Num) for one in t.items):
            parts = [self.conversion_to(one).format(f"_x[{i}]") for i, one in enumerate(t.items)]
            return f"(lambda _x: ({', '.join(parts)},))({{0}})"
        raise self.fail(f"a variable is of several types, of which {t} is made: this is not supported")

    def known(self, value: Any) -> V:
        """A value that is there before the kernel runs, as the compiler freezes it."""
        if isinstance(value, V):
            return value
        if isinstance(value, stubs.Stub):
            return cuda_rules.special(self, value) or V(Known(value), ast.Constant(None))
        if isinstance(value, enum.IntEnum):
            return self.number(int(value))
        if isinstance(value, enum.Enum):
            return V(Known(value), build(self.keep(value)))
        if isinstance(value, (bool, int, float, complex)) and not isinstance(value, np.generic):
            return self.number(value)
        if isinstance(value, np.generic) and not isinstance(value, (np.void, np.str_, np.bytes_)):
            return self.typed_constant(ops.from_numpy(value, value.dtype), Num(value.dtype))
        if isinstance(value, tuple):
            made = self.tuple_of([self.known(one) for one in value])
            return V(Tup(made.t.items, type(value)), made.code, made.const)
        if isinstance(value, np.ndarray):
            return cuda_rules.constant_array(self, value)
        if isinstance(value, np.void):
            array = cuda_rules.constant_array(self, np.array([value]))
            return V(Rec(value.dtype), invoked(array.code, "rec", "0"))
        if isinstance(value, DeviceNDArray) or hasattr(value, "__cuda_array_interface__"):
            return V(type_of(value), called("_w.run.captured", self.keep(value)))
        is_shown = value is None or isinstance(value, (str, bytes))
        return V(Known(value), ast.Constant(value if is_shown else None))

    def number(self, value: Any) -> V:
        """A number as it stands in the code."""
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise self.fail(f"the integer {value} does not fit into 64 bits")
        kinds = {bool: lambda: BOOL, int: lambda: type_of_int(value), float: lambda: F64, complex: lambda: C128}
        return self.typed_constant(value, next(t() for kind, t in kinds.items() if isinstance(value, kind)))


class LocalFunction:
    """A function that a kernel defines: it is compiled where it is called. It may use what is known around it."""

    def __init__(self, node: Any, compiler: Any):
        self.node = node
        self.compiler = compiler
        self.env = compiler.env
