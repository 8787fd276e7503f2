"""Types and code of expressions: names, tuples, conversions, calls, elements. Operators have a file of their own."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import ops, reports
from .code import at_place_of, build
from .env import FULL, NOT_CONSTANT, V, Var, called, calls, invoked
from .loops import silence
from .operators import Operators
from .types import (
    BF16,
    BOOL,
    F64,
    I64,
    NONE,
    UNKNOWN,
    Arr,
    Iter,
    Known,
    Num,
    Opt,
    Rec,
    Tup,
    Vec,
    is_complex,
    is_int,
    is_number,
)


class Expressions(Operators):
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
        return V(value.t.of, called(self.keep(reports.held), "_w", value, where, str(self.at.lineno), what))

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

    # --- elements ---------------------------------------------------------------------------------------------------

    def of_Slice(self, node: ast.Slice) -> V:
        parts = [None if one is None else self.value(one) for one in (node.lower, node.upper, node.step)]
        codes = [None if one is None or isinstance(one.t, Known) else one.code for one in parts]
        made = build("slice({0}, {1}, {2})", *(ast.Constant(None) if one is None else one for one in codes))
        return V(Known(slice(None)), made)

    def indices(self, node: ast.expr) -> list[V]:
        """What stands in the brackets."""
        if isinstance(node, ast.Tuple):
            return [self.value(one) for one in node.elts]
        return self.parts_of(self.value(node))

    def parts_of(self, value: V) -> list[V]:
        """The indices that one value is: a tuple is several."""
        value = self.made_real(value)
        if isinstance(value.t, Tup):
            if isinstance(value.code, ast.Tuple):
                consts = value.const if isinstance(value.const, tuple) else (NOT_CONSTANT,) * len(value.t.items)
                found = zip(value.t.items, value.code.elts, consts, strict=True)
                return [V(t, code) if isinstance(t, Known) else V(t, code, const) for t, code, const in found]
            name = self.temporary()
            first, *rest = value.t.items
            parts = [V(t, build(f"{name}[{i}]")) for i, t in enumerate(rest, 1)]
            return [V(first, build(f"({name} := {{0}})[0]", value.code)), *parts]
        if isinstance(value.t, Arr) and value.t.ndim == 1 and is_int(Num(value.t.dtype)):
            raise self.fail("an array as an index is not supported in kernels")
        return [value]

    def of_Subscript(self, node: ast.Subscript) -> V:
        return self.item(self.held(self.value(node.value)), node)

    def item(self, base: V, node: ast.Subscript) -> V:
        if isinstance(base.t, Known):
            index = self.value(node.slice)
            if index.is_known:
                return self.known(base.t.value[index.known])
            raise self.fail(f"an element of {base.t} with an index that is not known is not supported in kernels")
        indices = self.indices(node.slice)
        if isinstance(base.t, Arr):
            return self.element(base, indices)
        if isinstance(base.t, Rec):
            return self.field(base, indices[0])
        if isinstance(base.t, Tup):
            return self.tuple_item(base, indices[0])
        raise self.fail(f"a value of type {base.t} has no elements")

    def items_of(self, value: V) -> list[V]:
        """The values of a tuple."""
        return [self.tuple_item(value, self.number(i)) for i in range(len(value.t.items))]

    def apart(self, code: ast.expr, types: Sequence[Any], change: Callable[[V], V]) -> V:
        """A tuple whose items are changed. code: of a tuple of such types"""
        name = self.temporary()
        made = self.tuple_of([change(V(t, build(f"{name}[{i}]"))) for i, t in enumerate(types)])
        return V(made.t, build(f"(({name} := {{0}}), {{1}})[1]", code, made.code))

    def tuple_item(self, base: V, index: V) -> V:
        if isinstance(index.t, Known) and isinstance(index.t.value, slice):
            piece = ast.literal_eval(ast.unparse(index.code).replace("slice", "").strip())
            chosen = slice(*piece)
            const = base.const[chosen] if isinstance(base.const, tuple) else NOT_CONSTANT
            return V(Tup(base.t.items[chosen]), build("{0}[{1}]", base.code, index.code), const)
        if index.const is not NOT_CONSTANT:
            try:
                t = base.t.items[index.const]
            except IndexError:
                raise self.fail(f"index {index.const} of a tuple of {len(base.t.items)}") from None
            const = base.const[index.const] if isinstance(base.const, tuple) else NOT_CONSTANT
            if isinstance(t, Known):
                return self.known(t.value)
            if isinstance(base.code, ast.Tuple) and const is not NOT_CONSTANT:
                return V(t, base.code.elts[index.const], const)
            return V(t, build("{0}[{1}]", base.code, index.code), const)
        kinds = set(base.t.items)
        if len(kinds) != 1:
            raise self.fail(f"an element of {base.t} with an index that is not known: its items differ in type")
        return V(kinds.pop(), build("{0}[{1}]", base.code, self.as_index(index).code))

    def element(self, base: V, indices: list[V]) -> V:
        """Load of an element, or a view of several."""
        t = base.t
        if t.dtype.names and len(indices) == 1 and isinstance(indices[0].t, Known):
            if isinstance(indices[0].t.value, str):
                return self.array_field(base, indices[0].t.value)
        if self.is_element(t, indices):
            what, verb = (Rec(t.dtype), "rec") if t.dtype.names else (Num(t.dtype), "ld")
            return V(what, invoked(base.code, verb, *indices))
        numbers = sum(is_int(one.t) for one in indices)
        news = sum(isinstance(one.t, Known) and one.t.value is None for one in indices)
        layout = "C" if t.layout == "C" and numbers == len(indices) else "A"
        return V(Arr(t.dtype, t.ndim - numbers + news, layout, t.is_const), invoked(base.code, "sub", *indices))

    def is_element(self, t: Arr, indices: list[V]) -> bool:
        """Whether these indices name one element; an error if they name nothing."""
        if len(indices) == 1 and isinstance(indices[0].t, Tup) and not indices[0].t.items:
            indices.clear()
        numbers = [one for one in indices if is_int(one.t)]
        others = [one for one in indices if not is_int(one.t)]
        for one in others:
            is_new = isinstance(one.t, Known) and (one.t.value is None or one.t.value is Ellipsis)
            if not is_new and not (isinstance(one.t, Known) and isinstance(one.t.value, slice)):
                raise self.fail(f"an index of type {one.t}; must be an integer, a slice or ...")
        ellipses = sum(isinstance(one.t, Known) and one.t.value is Ellipsis for one in others)
        news = sum(isinstance(one.t, Known) and one.t.value is None for one in others)
        if len(indices) - ellipses - news > t.ndim:
            raise self.fail(f"{len(indices)} indices for an array of {t.ndim} dimensions")
        return not others and len(numbers) == t.ndim

    def field(self, base: V, index: V) -> V:
        if index.is_known and isinstance(index.known, str):
            return self.record_field(base, index.known)
        if index.is_known and type(index.known) is int:
            return self.record_field(base, base.t.dtype.names[index.known])
        raise self.fail("the field of a record must be known")

    def record_field(self, base: V, name: str) -> V:
        dtype, code, index = self.field_and_index(base, name)
        if dtype.subdtype is not None:
            return V(Arr(dtype.base, len(dtype.shape), "C"), code)
        if dtype.names:
            return V(Rec(dtype), code)
        if dtype.kind not in "biufcmM" and dtype != BF16.dtype:
            raise self.fail(f"field {name!r} is of type {dtype}, which kernels do not have")
        return V(Num(dtype), invoked(code, "ld", *index))

    def field_and_index(self, base: V, name: str) -> tuple[np.dtype, ast.expr, list[ast.expr]]:
        """The type of a field, its code, and where in it: `a[i]["x"]` is element i of field x, which all records share.

        A GPU has no loads and stores across the alignment of what they access.
        """
        if name not in (base.t.dtype.names or ()):
            raise self.fail(f"the record has no field {name!r}, it has {', '.join(base.t.dtype.names)}")
        dtype, offset = base.t.dtype.fields[name][:2]
        if dtype.base.kind in "biufcmM" and offset % (dtype.base.itemsize // (2 if dtype.base.kind == "c" else 1)):
            message = f"{base.t}.{name} of type {dtype.base} is not aligned: use np.dtype(..., align=True)"
            raise self.fail(message)
        code, index = base.code, []
        if dtype.subdtype is None and not dtype.names and calls(code, "rec"):
            code, index = code.func.value, code.args[1:]  # type: ignore[attr-defined]
        return dtype, build("{0}.field({1})", code, ast.Constant(name)), index

    def array_field(self, base: V, name: str) -> V:
        """One field of all records."""
        if name not in (base.t.dtype.names or ()):
            raise self.fail(f"the records have no field {name!r}")
        dtype = base.t.dtype.fields[name][0]
        code = build("{0}.field({1})", base.code, ast.Constant(name))
        return V(Arr(dtype.base, base.t.ndim + len(dtype.shape), "A", base.t.is_const), code)

    def store_item(self, target: ast.Subscript, value: V) -> ast.expr:
        base = self.held(self.value(target.value))
        if isinstance(base.t, Rec):
            index = self.indices(target.slice)[0]
            if index.is_known and isinstance(index.known, str):
                return self.store_field(base, index.known, value)
        if not isinstance(base.t, Arr):
            raise self.fail(f"no assignment to elements of {base.t}")
        return self.store_element(base, self.indices(target.slice), value)

    def store_element(self, base: V, indices: list[V], value: V) -> ast.expr:
        t = base.t
        if t.is_const:
            raise self.fail("the array is constant in kernels")
        value = self.held(value)
        if self.is_element(t, indices) and not t.dtype.names:
            if not isinstance(value.t, Num) and value.t is not UNKNOWN:
                raise self.fail(f"a value of type {value.t} for an element of type {t.dtype}")
            return invoked(base.code, "st", self.converted(value, Num(t.dtype)), *indices)
        if isinstance(value.t, Num):
            value = self.converted(value, Num(t.dtype))
        elif isinstance(value.t, Known) or (isinstance(value.t, Rec) and value.t.dtype.names != t.dtype.names):
            raise self.fail(f"a value of type {value.t} for elements of type {t.dtype}")
        return invoked(base.code, "assign", value, *indices)

    def store_attribute(self, target: ast.Attribute, value: V) -> ast.expr:
        base = self.held(self.value(target.value))
        if isinstance(base.t, Rec):
            return self.store_field(base, target.attr, value)
        raise self.fail(f"no assignment to attributes of {base.t}")

    def store_field(self, base: V, name: str, value: V) -> ast.expr:
        dtype, code, index = self.field_and_index(base, name)
        if dtype.subdtype is not None or dtype.names:
            return invoked(code, "assign", value, "Ellipsis")
        return invoked(code, "st", self.converted(value, Num(dtype)), *index)

    def augment_item(self, node: ast.AugAssign, target: ast.Subscript) -> list[ast.stmt]:
        """`a[i] += x`: a load, and a store to the same element."""
        base = self.held(self.value(target.value))
        op = type(node.op).__name__
        if isinstance(base.t, Arr):
            result: list[ast.stmt] = []

            def named(value: V) -> V:
                name = self.temporary()
                result.append(self.named(name, value.code))
                return V(value.t, build(name), NOT_CONSTANT, value.bits)

            base = named(base)
            indices = [
                one if one.is_known or not is_int(one.t) or isinstance(one.code, ast.Name) else named(one)
                for one in self.indices(target.slice)
            ]
            left = self.element(base, list(indices))
            value = self.binary(op, left, self.value(node.value))
            silence(self, value.code)
            return [*result, ast.Expr(self.store_element(base, indices, value))]
        left = self.item(base, target)
        value = self.binary(op, left, self.value(node.value))
        return [ast.Expr(self.store_item(target, value))]

    def named(self, name: str, code: ast.expr) -> ast.stmt:
        return ast.Assign([ast.Name(name, ast.Store())], code)

    # --- attributes -------------------------------------------------------------------------------------------------

    def of_Attribute(self, node: ast.Attribute) -> V:
        return self.attribute(self.held(self.value(node.value)), node.attr)

    def attribute(self, base: V, name: str) -> V:
        t = base.t
        if isinstance(t, Known):
            from .calls import attribute_of

            return attribute_of(self, t.value, name)
        if isinstance(t, Arr):
            return self.array_attribute(base, name)
        if isinstance(t, Rec):
            return self.record_field(base, name)
        if isinstance(t, Vec):
            if name in "xyzw"[: t.size]:
                return V(Num(t.dtype), build(f"{{0}}[{'xyzw'.index(name)}]", base.code))
        elif isinstance(t, Tup) and name in getattr(t.of, "_fields", ()):
            place = t.of._fields.index(name)  # type: ignore[attr-defined]
            return self.tuple_item(base, self.number(place))
        elif is_complex(t) and name in ("real", "imag"):
            part = F64 if t.dtype.itemsize == 16 else Num(np.dtype("f4"))
            return V(part, build(f"{{0}}.{name}", base.code))
        elif is_number(t) and name == "real":
            return base
        elif is_number(t) and name == "imag":
            return self.converted(self.number(0), t)
        elif isinstance(t, Num) and name in ("value",):
            return base
        raise self.fail(f"a value of type {t} has no attribute {name!r} in kernels")

    def array_attribute(self, base: V, name: str) -> V:
        t = base.t
        if name in (t.dtype.names or ()):
            return self.array_field(base, name)
        if name in ("shape", "strides"):
            return V(Tup((I64,) * t.ndim), build(f"{{0}}.{name}", base.code))
        if name in ("size", "nbytes", "itemsize"):
            return V(I64, build(f"{{0}}.{name}", base.code), NOT_CONSTANT, 48)
        if name == "ndim":
            return self.number(t.ndim)
        if name == "dtype":
            return V(Known(t.dtype), ast.Constant(None))
        if name == "T":
            layout = {"C": "F", "F": "C"}.get(t.layout, "A")
            return V(Arr(t.dtype, t.ndim, layout, t.is_const), build("{0}.T", base.code))
        if name in ("real", "imag") and t.dtype.kind == "c":
            part = np.dtype(f"f{t.dtype.itemsize // 2}")
            return V(Arr(part, t.ndim, "A", t.is_const), build(f"{{0}}.part({name!r})", base.code))
        raise self.fail(f"an array has no attribute {name!r} in kernels")
