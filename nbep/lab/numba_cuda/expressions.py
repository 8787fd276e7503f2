"""Types and code of expressions: names, tuples, conversions, calls. Operators and elements have files of their own."""

from __future__ import annotations

import ast
from typing import Any

from . import faults, ops
from .code import build, constant, placed
from .elements import Elements
from .env import FULL, NOT_CONSTANT, V, Var
from .operators import Operators
from .types import (
    BOOL,
    NONE,
    UNKNOWN,
    Arr,
    Iter,
    Known,
    Num,
    Opt,
    Rec,
    Tup,
    is_int,
    is_number,
)


class Expressions(Operators, Elements):
    """The part of a compiler that gives expressions their types."""

    def value(self, node: ast.expr) -> V:
        method = getattr(self, f"of_{type(node).__name__}", None)
        if method is None:
            raise self.fail(node, f"{type(node).__name__} is not supported in kernels")
        return method(node)

    def of_Constant(self, node: ast.Constant) -> V:
        if isinstance(node.value, (bool, int, float, complex)):
            return self.number(node.value, node)
        return V(Known(node.value), constant(node.value, node))

    def of_Name(self, node: ast.Name) -> V:
        return self.look_up(node.id, node)

    def of_NamedExpr(self, node: ast.NamedExpr) -> V:
        value = self.value(node.value)
        self.env = {**self.env, node.target.id: Var(value.t, False, value.bits, value.const)}
        store = placed(ast.Name(node.target.id, ast.Store()), node)
        return V(value.t, placed(ast.NamedExpr(store, value.code), node), value.const, value.bits)

    def of_Tuple(self, node: ast.Tuple | ast.List) -> V:
        return self.tuple_of([self.value(one) for one in node.elts], node)

    def of_List(self, node: ast.List) -> V:
        made = self.of_Tuple(node)
        return V(Tup(made.t.items, list), made.code, made.const)

    def tuple_of(self, values: list[V], node: ast.AST) -> V:
        code = placed(ast.Tuple([one.code for one in values], ast.Load()), node)
        const = NOT_CONSTANT
        if all(one.is_known for one in values):
            const = tuple(one.known for one in values)
        return V(Tup(tuple(one.t for one in values)), code, const)

    def of_JoinedStr(self, node: ast.JoinedStr) -> V:
        parts = []
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                one = placed(ast.FormattedValue(self.value(one.value).code, one.conversion, one.format_spec), one)
            parts.append(one)
        return V(Known("..."), placed(ast.JoinedStr(parts), node))

    def of_Lambda(self, node: ast.Lambda) -> V:
        from .statements import LocalFunction

        return V(Known(LocalFunction(node, self)), constant(None, node))

    # --- conversions ------------------------------------------------------------------------------------------------

    def made_real(self, value: V, node: ast.AST) -> V:
        """A known tuple or number as a value."""
        known = value.t.value if isinstance(value.t, Known) else None
        if isinstance(known, tuple):
            return self.known(known, node)
        return value

    def converted(self, value: V, to: Any, node: ast.AST) -> V:
        """A value as one of another type."""
        if value.t == to or value.t is UNKNOWN or to is UNKNOWN:
            return value
        if isinstance(to, Opt):
            return self.as_optional(value, to, node)
        value = self.held(value, node)
        if value.t == to:
            return value
        if isinstance(value.t, Num) and isinstance(to, Num):
            if value.const is not NOT_CONSTANT and is_number(to) and is_number(value.t):
                if ops.conversion(value.t, to) is not None:
                    return self.typed_constant(ops.convert(value.const, value.t, to), to, node)
            template = ops.conversion(value.t, to)
            if template is None:
                raise self.fail(node, f"{value.t} cannot become {to}")
            if is_int(to) and is_int(value.t) and value.bits <= 8 * to.dtype.itemsize - (to.dtype.kind == "i"):
                if value.t.dtype.kind != "i" or to.dtype.kind == "i":
                    template = "int({0})" if value.t == BOOL else ""
            bits = min(value.bits, FULL) if is_int(to) and is_int(value.t) else FULL
            if not template:
                return V(to, value.code, NOT_CONSTANT, bits)
            return V(to, build(template, node, value.code), NOT_CONSTANT, bits if "wrap" not in template else FULL)
        if isinstance(value.t, Tup) and isinstance(to, Tup) and len(value.t.items) == len(to.items):
            name = self.temporary()
            parts = []
            for i, (a, b) in enumerate(zip(value.t.items, to.items, strict=True)):
                part = V(a, build(f"{name}[{i}]", node))
                parts.append(self.converted(part, b, node).code)
            made = placed(ast.Tuple(parts, ast.Load()), node)
            return V(to, build(f"(({name} := {{0}}), {{1}})[1]", node, value.code, made))
        if isinstance(value.t, Arr) and isinstance(to, Arr) and value.t.dtype == to.dtype and value.t.ndim == to.ndim:
            return V(to, value.code)
        raise self.fail(node, f"a value of type {value.t} cannot become {to}")

    def as_optional(self, value: V, to: Opt, node: ast.AST) -> V:
        if value.t == NONE:
            return V(to, value.code)
        if not isinstance(value.t, Opt):
            return V(to, self.converted(value, to.of, node).code)
        name = self.temporary()
        inner = self.converted(V(value.t.of, build(name, node)), to.of, node)
        return V(to, build(f"(None if ({name} := {{0}}) is None else {{1}})", node, value.code, inner.code))

    def held(self, value: V, node: ast.AST) -> V:
        """What is in an Optional. In a kernel that comes here with None, that is an error."""
        if not isinstance(value.t, Opt):
            return value
        where = self.keep((self.function.__name__, self.filename))
        what = constant(f"expected {value.t.of}, got None", node)
        code = build(f"{self.keep(faults.held)}(_w, {{0}}, {where}, {{1}}, {{2}})", node, value.code,
                     constant(getattr(node, "lineno", 0), node), what)  # fmt: skip
        return V(value.t.of, code)

    def typed_constant(self, value: Any, t: Num, node: ast.AST) -> V:
        if type(value) in (bool, int) or (type(value) is float and value == value and abs(value) != ops.INF):
            return V(t, constant(value, node), value)
        return V(t, placed(ast.Name(self.keep(value), ast.Load()), node), value)

    def truth(self, value: V, node: ast.AST) -> V:
        """A value as a condition."""
        if value.t is UNKNOWN:
            return V(BOOL, value.code)
        if isinstance(value.t, Known):
            known = bool(value.t.value)
            return V(BOOL, constant(known, node), known)
        if isinstance(value.t, Num):
            if value.const is not NOT_CONSTANT:
                known = bool(value.const)
                return V(BOOL, constant(known, node), known)
            return V(BOOL, value.code)
        if isinstance(value.t, Tup):
            return V(BOOL, constant(bool(value.t.items), node), bool(value.t.items))
        raise self.fail(node, f"a value of type {value.t} is no condition")

    def as_index(self, value: V, node: ast.AST) -> V:
        if not is_int(value.t):
            raise self.fail(node, f"an index of type {value.t}; must be an integer")
        return value

    # --- calls and loops --------------------------------------------------------------------------------------------

    def of_Call(self, node: ast.Call) -> V:
        from .calls import call

        return call(self, node)

    def iterable(self, node: ast.expr) -> V:
        """What a `for` goes through: its type is an Iter; const: a list of values, if the loop is written out."""
        value = self.held(self.value(node), node)
        if isinstance(value.t, Iter):
            return value
        if isinstance(value.t, Known) and isinstance(value.t.value, tuple):
            value = self.known(value.t.value, node)
        if isinstance(value.t, Arr):
            t = value.t
            inner: Any = Num(t.dtype) if t.ndim == 1 else Arr(t.dtype, t.ndim - 1, t.layout, t.is_const)
            if t.ndim == 1 and t.dtype.names:
                inner = Rec(t.dtype)
            return V(Iter(inner), build("{0}.items(_t)", node, value.code))
        if isinstance(value.t, Tup):
            kinds = set(value.t.items)
            if len(kinds) == 1 and not isinstance(next(iter(kinds)), Known):
                return V(Iter(kinds.pop()), value.code)
            items = [self.tuple_item(value, self.number(i, node), node) for i in range(len(value.t.items))]
            return V(Iter(None), value.code, items)
        raise self.fail(node, f"a loop over {value.t} is not supported in kernels")
