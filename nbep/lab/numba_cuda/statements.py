"""Compiles a kernel: the same statements, with the types that Numba gives to each value.

The result is a Python function whose lines are those of the kernel. Types flow with control: where two paths meet, a
variable has the type that Numba unifies of both, and a loop is gone through until its types stay. So each assignment
is a version of its variable, as in Numba's SSA form.
"""

from __future__ import annotations

import ast
from types import FunctionType
from typing import Any

from . import faults, ops
from .code import assigned_in, build, constant, fail, placed, scope_of, source_of
from .env import NOT_CONSTANT, Conflict, Env, V, Var, join, same, widened
from .expressions import Expressions
from .loops import is_atomic, silence, watched
from .types import BOOL, UNKNOWN, Arr, Iter, Known, Num, Opt, Rec, Tup, Unknown, is_number, type_of_int, unify

MAX_PASSES = 12  # through a loop; types only ever grow


class Compiled:
    """A function for arguments of certain types. run: called with the thread, who it is, and the arguments"""

    def __init__(self, name: str):
        self.name, self.is_kernel = name, False
        self.run: Any = None
        self.returns: Any = UNKNOWN
        self.shared_sites: list[Any] = []
        self.uses: set[str] = set()
        self.variables: dict[str, Any] = {}  # their types at the end
        self.keep: Any = None  # what its key among all functions has the id of


class Loop:
    def __init__(self, is_while: bool = False) -> None:
        self.is_while = is_while
        self.breaks: list[Env] = []
        self.continues: list[Env] = []


class FunctionCompiler(Expressions):
    """Compiles one function. scope: values by name, in place of its globals and its closure"""

    def __init__(
        self, unit: Any, function: FunctionType, types: dict[str, Any], compiled: Compiled, node: Any = None,
        outer: Env | None = None, outer_compiler: Any = None,
    ):  # fmt: skip
        self.unit = unit
        self.function = function
        self.filename = function.__code__.co_filename
        self.node = node if node is not None else source_of(function)
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
        self.outer = outer_compiler
        self.outer_env = outer or {}
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
            raise self.fail(self.node, f"Return type of recursive function does not converge: {returned}")
        if self.returned is UNKNOWN:
            raise self.fail(self.node, "this recursive function never returns: cannot type infer runaway recursion")
        module = ast.Module([tree], [])
        ast.fix_missing_locations(module)
        code = compile(module, self.filename, "exec")
        exec(code, self.names)
        self.compiled.run = self.names[tree.name]

    def function_tree(self) -> ast.FunctionDef:
        node = self.node
        arguments = [*node.args.posonlyargs, *node.args.args]
        if node.args.vararg is not None:
            arguments.append(node.args.vararg)
        arguments += node.args.kwonlyargs
        env: Env = {}
        names = []
        for argument in arguments:
            t = self.types[argument.arg]
            const = self.consts.get(argument.arg, NOT_CONSTANT)
            env[argument.arg] = Var(t, const=const)
            names.append(argument.arg)
        if isinstance(node, ast.Lambda):
            body, name = [placed(ast.Return(node.body), node)], "_lambda"
        else:
            body, name = node.body, node.name
        self.locals = {*names, *assigned_in(body)}
        statements, end = self.block(body, env)
        if end is not None:
            self.note_return(Known(None), node)
            self.compiled.variables = {name: var.t for name, var in end.items()}
        parameters = [placed(ast.arg(one), node) for one in ("_t", "_w", *names)]
        new: Any = ast.FunctionDef(
            name=name,
            args=ast.arguments([], parameters, None, [], [], None, []),
            body=statements or [placed(ast.Pass(), node)],
            decorator_list=[],
        )
        if hasattr(ast, "TypeVar"):
            new.type_params = []
        return placed(new, node)

    # --- statements -------------------------------------------------------------------------------------------------

    def block(self, statements: list[ast.stmt], env: Env | None) -> tuple[list[ast.stmt], Env | None]:
        """The code of some statements, and what is known behind them; None if nothing goes on there."""
        result: list[ast.stmt] = []
        for statement in statements:
            if env is None:
                break
            method = getattr(self, f"do_{type(statement).__name__}", None)
            if method is None:
                raise self.fail(statement, f"{type(statement).__name__} is not supported in kernels")
            self.env = env
            new, env = method(statement, env)
            result += new
        return result, env

    def fail(self, node: ast.AST, message: str) -> Exception:
        return fail(node, self.filename, f"{self.function.__name__}: {message}")

    def do_Pass(self, node: Any, env: Env) -> Any:
        return [node], env

    def do_Expr(self, node: ast.Expr, env: Env) -> Any:
        if isinstance(node.value, ast.Constant):
            return [], env  # a docstring
        code = self.value(node.value).code
        if is_atomic(code):
            silence(self, code)
        return [placed(ast.Expr(code), node)], self.env

    def do_Import(self, node: ast.Import, env: Env) -> Any:
        env = dict(env)
        for alias in node.names:
            module = __import__(alias.name)
            if alias.asname:
                for part in alias.name.split(".")[1:]:
                    module = getattr(module, part)
            env[alias.asname or alias.name.partition(".")[0]] = Var(Known(module))
        return [], env

    def do_ImportFrom(self, node: ast.ImportFrom, env: Env) -> Any:
        from importlib import import_module

        env = dict(env)
        module = import_module(node.module or "")
        for alias in node.names:
            env[alias.asname or alias.name] = Var(Known(getattr(module, alias.name)))
        return [], env

    def do_FunctionDef(self, node: ast.FunctionDef, env: Env) -> Any:
        return [], {**env, node.name: Var(Known(LocalFunction(node, self)))}

    def do_Assign(self, node: ast.Assign, env: Env) -> Any:
        is_named = isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
        self.target_name = node.targets[0].id if is_named else None  # type: ignore[attr-defined]
        value = self.value(node.value)
        self.target_name = None
        if len(node.targets) == 1:
            return self.assign(node.targets[0], value, node)
        name = self.temporary()
        result = [placed(ast.Assign([placed(ast.Name(name, ast.Store()), node)], value.code), node)]
        for target in node.targets:
            again = V(value.t, placed(ast.Name(name, ast.Load()), node), value.const, value.bits)
            new, self.env = self.assign(target, again, node)
            result += new
        return result, self.env

    def do_AnnAssign(self, node: ast.AnnAssign, env: Env) -> Any:
        if node.value is None:
            return [], env
        return self.assign(node.target, self.value(node.value), node)

    def assign(self, target: ast.expr, value: V, node: ast.AST) -> tuple[list[ast.stmt], Env]:
        env = self.env
        if isinstance(target, ast.Name):
            env = {**env, target.id: Var(value.t, False, value.bits, value.const)}
            self.env = env
            if isinstance(value.t, Known) and value.t.value is not None and not isinstance(value.t.value, str):
                return [], env
            store = placed(ast.Name(target.id, ast.Store()), target)
            return [placed(ast.Assign([store], value.code), node)], env
        if isinstance(target, (ast.Tuple, ast.List)):
            return self.unpack(target, value, node)
        silence(self, value.code)
        if isinstance(target, ast.Subscript):
            return [placed(ast.Expr(self.store_item(target, value)), node)], self.env
        if isinstance(target, ast.Attribute):
            return [placed(ast.Expr(self.store_attribute(target, value)), node)], self.env
        raise self.fail(node, f"assignment to {type(target).__name__} is not supported in kernels")

    def unpack(self, target: Any, value: V, node: ast.AST) -> tuple[list[ast.stmt], Env]:
        count = len(target.elts)
        if isinstance(value.t, Known) and isinstance(value.t.value, tuple):
            value = self.made_real(value, node)
        if isinstance(value.t, Tup):
            types = value.t.items
        elif isinstance(value.t, (Arr, Rec, Iter)):
            raise self.fail(node, f"a {value.t} cannot be unpacked")
        else:
            raise self.fail(node, f"a value of type {value.t} cannot be unpacked")
        if len(types) != count:
            raise self.fail(node, f"{count} targets for a tuple of {len(types)}")
        names = [self.temporary() for _ in range(count)]
        stores = placed(ast.Tuple([placed(ast.Name(name, ast.Store()), node) for name in names], ast.Store()), node)
        result: list[ast.stmt] = [placed(ast.Assign([stores], value.code), node)]
        consts = value.const if isinstance(value.const, tuple) else (NOT_CONSTANT,) * count
        for one, name, t, const in zip(target.elts, names, types, consts, strict=True):
            if isinstance(t, Known):
                const = NOT_CONSTANT
            new, self.env = self.assign(one, V(t, placed(ast.Name(name, ast.Load()), node), const), node)
            result += new
        return result, self.env

    def do_AugAssign(self, node: ast.AugAssign, env: Env) -> Any:
        target = node.target
        if isinstance(target, ast.Name):
            left = self.value(placed(ast.Name(target.id, ast.Load()), target))
            value = self.binary(type(node.op).__name__, left, self.value(node.value), node)
            return self.assign(target, value, node)
        if isinstance(target, ast.Subscript):
            return self.augment_item(node, target), self.env
        if isinstance(target, ast.Attribute):
            left = self.value(placed(ast.Attribute(target.value, target.attr, ast.Load()), target))
            value = self.binary(type(node.op).__name__, left, self.value(node.value), node)
            return self.assign(target, value, node)
        raise self.fail(node, "this target is not supported in kernels")

    def do_Delete(self, node: ast.Delete, env: Env) -> Any:
        return [], env

    def do_Global(self, node: Any, env: Env) -> Any:
        return [], env

    do_Nonlocal = do_Global

    def do_If(self, node: ast.If, env: Env) -> Any:
        test = self.value(node.test)
        after_test = self.env
        truth = self.truth(test, node.test)
        if truth.const is not NOT_CONSTANT:
            return self.block(node.body if truth.const else node.orelse, after_test)
        body, then = self.block(node.body, after_test)
        orelse, other = self.block(node.orelse, after_test)
        new = placed(ast.If(truth.code, body or [placed(ast.Pass(), node)], orelse), node)
        return [new], join(then, other)

    def do_While(self, node: ast.While, env: Env) -> Any:
        head = self.first_head(node, env)
        for _ in range(MAX_PASSES):
            self.env = dict(head)
            test = self.truth(self.value(node.test), node.test)
            inside = self.env
            if test.const is not NOT_CONSTANT and not test.const:
                return self.block(node.orelse, inside)
            loop = Loop(is_while=True)
            self.loops.append(loop)
            body, end = self.block(node.body, inside)
            self.loops.pop()
            new_head = join(env, end, *loop.continues)
            assert new_head is not None
            if same(new_head, head):
                break
            head = self.next_head(node, head, new_head)
        begin, turn = watched(self, node, head)
        orelse, other = self.block(node.orelse, inside)
        after = join(None if test.const is not NOT_CONSTANT else other, *loop.breaks)
        return [begin, placed(ast.While(test.code, [turn, *body], orelse), node)], after

    def first_head(self, node: ast.AST, env: Env) -> Env:
        known = self.heads.get(id(node))
        head = join(env, known) if known is not None else env
        assert head is not None
        return head

    def next_head(self, node: ast.AST, before: Env, after: Env) -> Env:
        head = widened(before, after)
        self.heads[id(node)] = head
        return head

    def do_For(self, node: ast.For, env: Env) -> Any:
        iterable = self.iterable(node.iter)
        item, bits, unrolled = iterable.t.item, iterable.bits, iterable.const
        if isinstance(unrolled, list):
            return self.unroll(node, unrolled)
        env = self.env
        head = self.first_head(node, env)
        for _ in range(MAX_PASSES):
            self.env = dict(head)
            name = None
            if isinstance(node.target, ast.Name):
                target: ast.expr = node.target
                self.env[node.target.id] = Var(item, False, bits)
                first: list[ast.stmt] = []
            else:
                name = self.temporary()
                target = placed(ast.Name(name, ast.Store()), node.target)
                value = V(item, placed(ast.Name(name, ast.Load()), node.target))
                first, self.env = self.assign(node.target, value, node.target)
            loop = Loop()
            self.loops.append(loop)
            body, end = self.block(node.body, self.env)
            self.loops.pop()
            new_head = join(env, end, *loop.continues)
            assert new_head is not None
            if same(new_head, head):
                break
            head = self.next_head(node, head, new_head)
        orelse, other = self.block(node.orelse, new_head)
        new = ast.For(target, iterable.code, (first + body) or [placed(ast.Pass(), node)], orelse)
        return [placed(new, node)], join(other, *loop.breaks)

    def unroll(self, node: ast.For, values: list[V]) -> Any:
        """A loop over a tuple of several types: its body once for each."""
        result: list[ast.stmt] = []
        env: Env | None = self.env
        for value in values:
            if env is None:
                break
            self.env = env
            first, env = self.assign(node.target, value, node)
            loop = Loop()
            self.loops.append(loop)
            body, env = self.block(node.body, env)
            self.loops.pop()
            if loop.breaks or loop.continues:
                raise self.fail(node, "break and continue are not supported in a loop over values of several types")
            result += first + body
        return result, env

    def do_Break(self, node: ast.Break, env: Env) -> Any:
        self.loops[-1].breaks.append(env)
        return [node], None

    def do_Continue(self, node: ast.Continue, env: Env) -> Any:
        self.loops[-1].continues.append(env)
        return [node], None

    def note_return(self, t: Any, node: ast.AST) -> None:
        if isinstance(t, Known) and t.value is not None:
            raise self.fail(node, f"{t} cannot be returned")
        if self.returned is None:
            self.returned = t
            return
        unified = unify(self.returned, t)
        if unified is None:
            raise self.fail(node, f"returns {self.returned} and {t}: these have no common type")
        self.returned = unified

    def do_Return(self, node: ast.Return, env: Env) -> Any:
        if node.value is None:
            self.note_return(Known(None), node)
            line = constant(node.lineno, node) if self.compiled.is_kernel else None  # for the report of a hang
            return [placed(ast.Return(line), node)], None
        value = self.value(node.value)
        if isinstance(value.t, Known) and value.t.value is not None:
            value = self.made_real(value, node)
        self.note_return(value.t, node)
        wanted = self.compiled.returns
        if not isinstance(wanted, Unknown) and isinstance(wanted, (Num, Tup, Opt)) and value.t is not UNKNOWN:
            value = self.converted(value, wanted, node)
        return [placed(ast.Return(value.code), node)], None

    def do_Raise(self, node: ast.Raise, env: Env) -> Any:
        if node.exc is None:
            raise self.fail(node, "raise without an exception is not supported in kernels")
        called = node.exc if isinstance(node.exc, ast.Call) else None
        what = self.value(called.func if called else node.exc)
        if not (isinstance(what.t, Known) and isinstance(what.t.value, type)):
            raise self.fail(node, "what a kernel raises must be the class of an exception, or a call of it")
        arguments = [self.value(one).code for one in called.args] if called else []
        keep = self.keep(faults.raised)
        first = [
            build(one, node)
            for one in ("_w", self.keep(what.t.value), self.keep((self.function.__name__, self.filename)))
        ]
        made = placed(
            ast.Call(placed(ast.Name(keep, ast.Load()), node), [*first, constant(node.lineno, node), *arguments], []),
            node,
        )
        return [placed(ast.Raise(made, None), node)], None

    def do_Assert(self, node: ast.Assert, env: Env) -> Any:
        test = self.truth(self.value(node.test), node.test)
        message = None if node.msg is None else self.value(node.msg).code
        return [placed(ast.Assert(test.code, message), node)], self.env

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

    def look_up(self, name: str, node: ast.AST) -> V:
        """What a name means: a variable, or something that is known."""
        var = self.env.get(name)
        if var is not None:
            return self.variable(name, var, node)
        if name in self.locals and not isinstance(self.node, ast.Lambda):
            if self.loops or name not in self.scope:  # from another turn, or an error of who comes here
                return V(UNKNOWN, placed(ast.Name(name, ast.Load()), node))
        if self.outer is not None and name in self.outer_env:
            raise self.fail(node, f"`{name}` of the function around this one is a variable; pass it as an argument")
        if name in self.scope:
            return self.known(self.scope[name], node)
        raise self.fail(node, f"`{name}` is not defined")

    def variable(self, name: str, var: Var, node: ast.AST) -> V:
        if isinstance(var.t, Conflict):
            kinds = " and ".join(str(t) for t in var.t.types)
            raise self.fail(node, f"`{name}` has two types that do not go together here: {kinds}")
        code = placed(ast.Name(name, ast.Load()), node)
        if isinstance(var.t, Known):
            return V(var.t, code)
        if var.const is not NOT_CONSTANT and isinstance(var.t, Num) and not var.is_mixed:
            return V(var.t, constant(var.const, node) if _is_plain(var.const) else code, var.const)
        value = V(var.t, code, var.const, var.bits)
        if var.is_mixed:
            value.code = build(self.conversion_to(var.t, node), node, code)
        return value

    def conversion_to(self, t: Any, node: ast.AST) -> str:
        """From any representation."""
        if isinstance(t, Opt):
            return f"(lambda _x: None if _x is None else {self.conversion_to(t.of, node).format('_x')})({{0}})"
        if isinstance(t, Num) and is_number(t):
            return ops.INEXACT.get(t.dtype.str[1:], "bool({0})" if t == BOOL else "int({0})")
        if isinstance(t, Tup) and all(isinstance(one, Num) for one in t.items):
            parts = [self.conversion_to(one, node).format(f"_x[{i}]") for i, one in enumerate(t.items)]
            return f"(lambda _x: ({', '.join(parts)},))({{0}})"
        raise self.fail(node, f"a variable is of several types, of which {t} is made: this is not supported")

    def known(self, value: Any, node: ast.AST) -> V:
        """A value that is there before the kernel runs, as the compiler freezes it."""
        return self.unit.known(self, value, node)

    def number(self, value: Any, node: ast.AST) -> V:
        """A number as it stands in the code."""
        if isinstance(value, bool):
            return V(BOOL, constant(value, node), value)
        if isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 64:
                raise self.fail(node, f"the integer {value} does not fit into 64 bits")
            return V(type_of_int(value), constant(value, node), value)
        if isinstance(value, float):
            from .types import F64

            code = constant(value, node) if value == value and abs(value) != ops.INF else None
            return V(F64, code or placed(ast.Name(self.keep(value), ast.Load()), node), value)
        from .types import C128

        return V(C128, placed(ast.Name(self.keep(value), ast.Load()), node), value)


def _is_plain(value: Any) -> bool:
    return type(value) in (int, bool) or (type(value) is float and value == value and abs(value) != ops.INF)


class LocalFunction:
    """A function that a kernel defines: it is compiled where it is called. It may use what is known around it."""

    def __init__(self, node: Any, compiler: Any):
        self.node = node
        self.compiler = compiler
        self.env = compiler.env
