"""Types and code of expressions: names, tuples, conversions, calls. Operators and elements have files of their own."""

from __future__ import annotations

import ast
import math
from typing import Any

from . import faults, ops
from .code import at_place_of, build
from .elements import Elements
from .env import FULL, NOT_CONSTANT, V, Var, called, invoked
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
            raise self.fail(f"{type(node).__name__} is not supported in kernels")
        before, self.at = self.at, node
        value = method(node)
        at_place_of(value.code, node)
        self.at = before
        return value

    def of_Constant(self, node: ast.Constant) -> V:
        if isinstance(node.value, (bool, int, float, complex)):
            return self.number(node.value)
        return V(Known(node.value), ast.Constant(node.value))

    def of_Name(self, node: ast.Name) -> V:
        return self.look_up(node.id)

    def of_NamedExpr(self, node: ast.NamedExpr) -> V:
        value = self.value(node.value)
        self.env = {**self.env, node.target.id: Var(value.t, False, value.bits, value.const)}
        store = ast.Name(node.target.id, ast.Store())
        return V(value.t, ast.NamedExpr(store, value.code), value.const, value.bits)

    def of_Tuple(self, node: ast.Tuple | ast.List) -> V:
        return self.tuple_of([self.value(one) for one in node.elts])

    def of_List(self, node: ast.List) -> V:
        made = self.of_Tuple(node)
        return V(Tup(made.t.items, list), made.code, made.const)

    def tuple_of(self, values: list[V]) -> V:
        const = tuple(one.known for one in values) if all(one.is_known for one in values) else NOT_CONSTANT
        return V(Tup(tuple(one.t for one in values)), ast.Tuple([one.code for one in values], ast.Load()), const)

    def of_JoinedStr(self, node: ast.JoinedStr) -> V:
        parts = []
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                one = ast.FormattedValue(self.value(one.value).code, one.conversion, one.format_spec)
            parts.append(one)
        return V(Known("..."), ast.JoinedStr(parts))

    def of_Lambda(self, node: ast.Lambda) -> V:
        from .statements import LocalFunction

        return V(Known(LocalFunction(node, self)), ast.Constant(None))

    # --- conversions ------------------------------------------------------------------------------------------------

    def made_real(self, value: V) -> V:
        """A known tuple as a value."""
        is_tuple = isinstance(value.t, Known) and isinstance(value.t.value, tuple)
        return self.known(value.t.value) if is_tuple else value

    def converted(self, value: V, to: Any) -> V:
        """A value as one of another type."""
        if value.t == to or value.t is UNKNOWN or to is UNKNOWN:
            return value
        if isinstance(to, Opt):
            return self.as_optional(value, to)
        value = self.held(value)
        if value.t == to:
            return value
        if isinstance(value.t, Num) and isinstance(to, Num):
            if value.const is not NOT_CONSTANT and is_number(to) and is_number(value.t):
                if ops.conversion(value.t, to) is not None:
                    return self.typed_constant(ops.convert(value.const, value.t, to), to)
            template = ops.conversion(value.t, to)
            if template is None:
                raise self.fail(f"{value.t} cannot become {to}")
            if is_int(to) and is_int(value.t) and value.bits <= 8 * to.dtype.itemsize - (to.dtype.kind == "i"):
                if value.t.dtype.kind != "i" or to.dtype.kind == "i":
                    template = "int({0})" if value.t == BOOL else ""
            bits = min(value.bits, FULL) if is_int(to) and is_int(value.t) else FULL
            if not template:
                return V(to, value.code, NOT_CONSTANT, bits)
            return V(to, build(template, value.code), NOT_CONSTANT, bits if "wrap" not in template else FULL)
        if isinstance(value.t, Tup) and isinstance(to, Tup) and len(value.t.items) == len(to.items):
            wanted = iter(to.items)
            return self.apart(value.code, value.t.items, lambda part: self.converted(part, next(wanted)))
        if isinstance(value.t, Arr) and isinstance(to, Arr) and value.t.dtype == to.dtype and value.t.ndim == to.ndim:
            return V(to, value.code)
        raise self.fail(f"a value of type {value.t} cannot become {to}")

    def as_optional(self, value: V, to: Opt) -> V:
        if value.t == NONE:
            return V(to, value.code)
        if not isinstance(value.t, Opt):
            return V(to, self.converted(value, to.of).code)
        name = self.temporary()
        inner = self.converted(V(value.t.of, build(name)), to.of)
        return V(to, build(f"(None if ({name} := {{0}}) is None else {{1}})", value.code, inner.code))

    def held(self, value: V) -> V:
        """What is in an Optional. In a kernel that comes here with None, that is an error."""
        if not isinstance(value.t, Opt):
            return value
        where = self.keep((self.function.__name__, self.filename))
        what = repr(f"expected {value.t.of}, got None")
        return V(value.t.of, called(self.keep(faults.held), "_w", value, where, str(self.at.lineno), what))

    def typed_constant(self, value: Any, t: Num) -> V:
        is_plain = type(value) in (bool, int) or (type(value) is float and math.isfinite(value))
        return V(t, ast.Constant(value) if is_plain else build(self.keep(value)), value)

    def truth(self, value: V) -> V:
        """A value as a condition."""
        if isinstance(value.t, Tup):
            return self.number(bool(value.t.items))
        if isinstance(value.t, Known) or (isinstance(value.t, Num) and value.const is not NOT_CONSTANT):
            return self.number(bool(value.known))
        if isinstance(value.t, Num) or value.t is UNKNOWN:
            return V(BOOL, value.code)
        raise self.fail(f"a value of type {value.t} is no condition")

    def as_index(self, value: V) -> V:
        if not is_int(value.t):
            raise self.fail(f"an index of type {value.t}; must be an integer")
        return value

    # --- calls and loops --------------------------------------------------------------------------------------------

    def of_Call(self, node: ast.Call) -> V:
        from .calls import call

        return call(self, node)

    def iterated(self, value: V, unrolls: bool = False) -> V:
        """What a `for` goes through: its type is an Iter; const: a list of values, if the loop is to be written out."""
        value = self.made_real(value)
        t = value.t
        if isinstance(t, Iter):
            return value
        if isinstance(t, Arr):
            inner: Any = Num(t.dtype) if t.ndim == 1 else Arr(t.dtype, t.ndim - 1, t.layout, t.is_const)
            if t.ndim == 1 and t.dtype.names:
                inner = Rec(t.dtype)
            return V(Iter(inner), invoked(value.code, "items"))
        if isinstance(t, Tup) and len(set(t.items)) == 1 and not isinstance(t.items[0], Known):
            return V(Iter(t.items[0]), value.code)
        if isinstance(t, Tup) and unrolls:
            return V(Iter(None), value.code, self.items_of(value))
        raise self.fail(f"a loop over {t} is not supported in kernels")
