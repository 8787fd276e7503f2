"""Types and code of elements and attributes: of arrays, records, tuples and vectors."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .code import build
from .env import NOT_CONSTANT, Part, V, calls, invoked
from .loops import silence
from .types import (
    BF16,
    F64,
    I64,
    UNKNOWN,
    Arr,
    Known,
    Num,
    Rec,
    Tup,
    Vec,
    is_complex,
    is_int,
    is_number,
)


class Elements(Part):
    """The part of a compiler that knows what is inside of values."""

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
