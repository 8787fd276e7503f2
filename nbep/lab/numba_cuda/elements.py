"""Types and code of elements and attributes: of arrays, records, tuples and vectors."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from .code import build, constant, placed
from .env import NOT_CONSTANT, Part, V
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


def holes(parts: list[Any], first: int) -> str:
    """Places in a template for more arguments."""
    return "".join(f", {{{first + i}}}" for i in range(len(parts)))


class Elements(Part):
    """The part of a compiler that knows what is inside of values."""

    def of_Slice(self, node: ast.Slice) -> V:
        parts = [None if one is None else self.value(one) for one in (node.lower, node.upper, node.step)]
        codes = [None if one is None or isinstance(one.t, Known) else one.code for one in parts]
        made = build("slice({0}, {1}, {2})", node, *(constant(None, node) if one is None else one for one in codes))
        return V(Known(slice(None)), made)

    def indices(self, node: ast.expr) -> list[V]:
        """What stands in the brackets."""
        if isinstance(node, ast.Tuple):
            return [self.value(one) for one in node.elts]
        value = self.value(node)
        if isinstance(value.t, Known) and isinstance(value.t.value, tuple):
            value = self.known(value.t.value, node)
        if isinstance(value.t, Tup):
            if isinstance(value.code, ast.Tuple):
                consts = value.const if isinstance(value.const, tuple) else (NOT_CONSTANT,) * len(value.t.items)
                parts = zip(value.t.items, value.code.elts, consts, strict=True)
                return [V(t, code) if isinstance(t, Known) else V(t, code, const) for t, code, const in parts]
            name = self.temporary()
            first = build(f"({name} := {{0}})[0]", node, value.code)
            rest = [build(f"{name}[{i}]", node) for i in range(1, len(value.t.items))]
            return [V(t, code) for t, code in zip(value.t.items, [first, *rest], strict=False)]
        if isinstance(value.t, Arr) and value.t.ndim == 1 and is_int(Num(value.t.dtype)):
            raise self.fail(node, "an array as an index is not supported in kernels")
        return [value]

    def of_Subscript(self, node: ast.Subscript) -> V:
        return self.item(self.held(self.value(node.value), node), node)

    def item(self, base: V, node: ast.Subscript) -> V:
        if isinstance(base.t, Known):
            index = self.value(node.slice)
            if index.is_known:
                return self.known(base.t.value[index.known], node)
            raise self.fail(node, f"an element of {base.t} with an index that is not known is not supported in kernels")
        indices = self.indices(node.slice)
        if isinstance(base.t, Arr):
            return self.element(base, indices, node)
        if isinstance(base.t, Rec):
            return self.field(base, indices[0], node)
        if isinstance(base.t, Tup):
            return self.tuple_item(base, indices[0], node)
        raise self.fail(node, f"a value of type {base.t} has no elements")

    def tuple_item(self, base: V, index: V, node: ast.AST) -> V:
        if isinstance(index.t, Known) and isinstance(index.t.value, slice):
            piece = ast.literal_eval(ast.unparse(index.code).replace("slice", "").strip())
            chosen = slice(*piece)
            const = base.const[chosen] if isinstance(base.const, tuple) else NOT_CONSTANT
            return V(Tup(base.t.items[chosen]), build("{0}[{1}]", node, base.code, index.code), const)
        if index.const is not NOT_CONSTANT:
            try:
                t = base.t.items[index.const]
            except IndexError:
                raise self.fail(node, f"index {index.const} of a tuple of {len(base.t.items)}") from None
            const = base.const[index.const] if isinstance(base.const, tuple) else NOT_CONSTANT
            if isinstance(t, Known):
                return self.known(t.value, node)
            if isinstance(base.code, ast.Tuple) and const is not NOT_CONSTANT:
                return V(t, base.code.elts[index.const], const)
            return V(t, build("{0}[{1}]", node, base.code, index.code), const)
        kinds = set(base.t.items)
        if len(kinds) != 1:
            raise self.fail(node, f"an element of {base.t} with an index that is not known: its items differ in type")
        return V(kinds.pop(), build("{0}[{1}]", node, base.code, self.as_index(index, node).code))

    def element(self, base: V, indices: list[V], node: ast.AST) -> V:
        """Load of an element, or a view of several."""
        t = base.t
        if t.dtype.names and len(indices) == 1 and isinstance(indices[0].t, Known):
            if isinstance(indices[0].t.value, str):
                return self.array_field(base, indices[0].t.value, node)
        if self.is_element(t, indices, node):
            codes = [one.code for one in indices]
            if t.dtype.names:
                return V(Rec(t.dtype), build(f"{{0}}.rec(_t{holes(codes, 1)})", node, base.code, *codes))
            return V(Num(t.dtype), build(f"{{0}}.ld(_t{holes(codes, 1)})", node, base.code, *codes))
        ndim, layout = self.part_shape(t, indices)
        code = build(f"{{0}}.sub(_t{holes(indices, 1)})", node, base.code, *(one.code for one in indices))
        return V(Arr(t.dtype, ndim, layout, t.is_const), code)

    def is_element(self, t: Arr, indices: list[V], node: ast.AST) -> bool:
        """Whether these indices name one element; an error if they name nothing."""
        if len(indices) == 1 and isinstance(indices[0].t, Tup) and not indices[0].t.items:
            indices.clear()
        numbers = [one for one in indices if is_int(one.t)]
        others = [one for one in indices if not is_int(one.t)]
        for one in others:
            is_new = isinstance(one.t, Known) and (one.t.value is None or one.t.value is Ellipsis)
            if not is_new and not (isinstance(one.t, Known) and isinstance(one.t.value, slice)):
                raise self.fail(node, f"an index of type {one.t}; must be an integer, a slice or ...")
        ellipses = sum(isinstance(one.t, Known) and one.t.value is Ellipsis for one in others)
        news = sum(isinstance(one.t, Known) and one.t.value is None for one in others)
        if len(indices) - ellipses - news > t.ndim:
            raise self.fail(node, f"{len(indices)} indices for an array of {t.ndim} dimensions")
        return not others and len(numbers) == t.ndim

    def part_shape(self, t: Arr, indices: list[V]) -> tuple[int, str]:
        numbers = sum(is_int(one.t) for one in indices)
        news = sum(isinstance(one.t, Known) and one.t.value is None for one in indices)
        keeps = t.layout == "C" and numbers == len(indices)
        return t.ndim - numbers + news, "C" if keeps else "A"

    def field(self, base: V, index: V, node: ast.AST) -> V:
        if index.is_known and isinstance(index.known, str):
            return self.record_field(base, index.known, node)
        if index.is_known and type(index.known) is int:
            return self.record_field(base, base.t.dtype.names[index.known], node)
        raise self.fail(node, "the field of a record must be known")

    def record_field(self, base: V, name: str, node: ast.AST) -> V:
        if name not in (base.t.dtype.names or ()):
            raise self.fail(node, f"the record has no field {name!r}, it has {', '.join(base.t.dtype.names)}")
        dtype = self.aligned_field(base.t, name, node)
        code, index = self.field_and_index(base, name, dtype, node)
        if dtype.subdtype is not None:
            return V(Arr(dtype.base, len(dtype.shape), "C"), code)
        if dtype.names:
            return V(Rec(dtype), code)
        if dtype.kind not in "biufcmM" and dtype != BF16.dtype:
            raise self.fail(node, f"field {name!r} is of type {dtype}, which kernels do not have")
        return V(Num(dtype), build(f"{{0}}.ld(_t{holes(index, 1)})", node, code, *index))

    def field_and_index(self, base: V, name: str, dtype: Any, node: ast.AST) -> tuple[ast.expr, list[ast.expr]]:
        """Code of a field, and where in it. For `a[i]["x"]` it is element i of field x, which all records share."""
        code: Any = base.code
        index: list[ast.expr] = []
        is_number = dtype.subdtype is None and not dtype.names
        if (
            is_number
            and isinstance(code, ast.Call)
            and isinstance(code.func, ast.Attribute)
            and code.func.attr == "rec"
        ):
            code, index = code.func.value, code.args[1:]
        return build("{0}.field({1})", node, code, constant(name, node)), index

    def aligned_field(self, record: Rec, name: str, node: ast.AST) -> np.dtype:
        """The type of a field. A GPU has no loads and stores across their own alignment."""
        dtype, offset = record.dtype.fields[name][:2]  # type: ignore[index]
        if dtype.base.kind in "biufcmM":
            align = dtype.base.itemsize // (2 if dtype.base.kind == "c" else 1)
            if offset % align:
                message = f"{record}.{name} of type {dtype.base} is not aligned: use np.dtype(..., align=True)"
                raise self.fail(node, message)
        return dtype

    def array_field(self, base: V, name: str, node: ast.AST) -> V:
        """One field of all records."""
        if name not in (base.t.dtype.names or ()):
            raise self.fail(node, f"the records have no field {name!r}")
        dtype = base.t.dtype.fields[name][0]
        code = build("{0}.field({1})", node, base.code, constant(name, node))
        return V(Arr(dtype.base, base.t.ndim + len(dtype.shape), "A", base.t.is_const), code)

    def store_item(self, target: ast.Subscript, value: V) -> ast.expr:
        base = self.held(self.value(target.value), target)
        if isinstance(base.t, Rec):
            index = self.indices(target.slice)[0]
            if index.is_known and isinstance(index.known, str):
                return self.store_field(base, index.known, value, target)
        if not isinstance(base.t, Arr):
            raise self.fail(target, f"no assignment to elements of {base.t}")
        return self.store_element(base, self.indices(target.slice), value, target)

    def store_element(self, base: V, indices: list[V], value: V, node: ast.AST) -> ast.expr:
        t = base.t
        if t.is_const:
            raise self.fail(node, "the array is constant in kernels")
        value = self.held(value, node)
        if self.is_element(t, indices, node) and not t.dtype.names:
            if not isinstance(value.t, Num) and value.t is not UNKNOWN:
                raise self.fail(node, f"a value of type {value.t} for an element of type {t.dtype}")
            code = self.converted(value, Num(t.dtype), node).code
            at = [one.code for one in indices]
            return build(f"{{0}}.st(_t, {{1}}{holes(at, 2)})", node, base.code, code, *at)
        if isinstance(value.t, Num):
            value = self.converted(value, Num(t.dtype), node)
        elif isinstance(value.t, Known) or (isinstance(value.t, Rec) and value.t.dtype.names != t.dtype.names):
            raise self.fail(node, f"a value of type {value.t} for elements of type {t.dtype}")
        at = [one.code for one in indices]
        return build(f"{{0}}.assign(_t, {{1}}{holes(at, 2)})", node, base.code, value.code, *at)

    def store_attribute(self, target: ast.Attribute, value: V) -> ast.expr:
        base = self.held(self.value(target.value), target)
        if isinstance(base.t, Rec):
            return self.store_field(base, target.attr, value, target)
        raise self.fail(target, f"no assignment to attributes of {base.t}")

    def store_field(self, base: V, name: str, value: V, node: ast.AST) -> ast.expr:
        if name not in (base.t.dtype.names or ()):
            raise self.fail(node, f"the record has no field {name!r}")
        dtype = self.aligned_field(base.t, name, node)
        code, index = self.field_and_index(base, name, dtype, node)
        if dtype.subdtype is not None or dtype.names:
            return build("{0}.assign(_t, {1}, Ellipsis)", node, code, value.code)
        value = self.converted(value, Num(dtype), node)
        return build(f"{{0}}.st(_t, {{1}}{holes(index, 2)})", node, code, value.code, *index)

    def augment_item(self, node: ast.AugAssign, target: ast.Subscript) -> list[ast.stmt]:
        """`a[i] += x`: a load, and a store to the same element."""
        base = self.held(self.value(target.value), target)
        op = type(node.op).__name__
        if isinstance(base.t, Arr):
            base_name = self.temporary()
            result: list[ast.stmt] = [self.named(base_name, base.code, node)]
            base = V(base.t, build(base_name, node))
            indices = []
            for one in self.indices(target.slice):
                if one.const is NOT_CONSTANT and is_int(one.t) and not isinstance(one.code, ast.Name):
                    name = self.temporary()
                    result.append(self.named(name, one.code, node))
                    one = V(one.t, build(name, node), NOT_CONSTANT, one.bits)
                indices.append(one)
            left = self.element(base, list(indices), target)
            value = self.binary(op, left, self.value(node.value), node)
            silence(self, value.code)
            return [*result, placed(ast.Expr(self.store_element(base, indices, value, node)), node)]
        left = self.item(base, target)
        value = self.binary(op, left, self.value(node.value), node)
        return [placed(ast.Expr(self.store_item(target, value)), node)]

    def named(self, name: str, code: ast.expr, node: ast.AST) -> ast.stmt:
        return placed(ast.Assign([placed(ast.Name(name, ast.Store()), node)], code), node)

    # --- attributes -------------------------------------------------------------------------------------------------

    def of_Attribute(self, node: ast.Attribute) -> V:
        return self.attribute(self.held(self.value(node.value), node), node.attr, node)

    def attribute(self, base: V, name: str, node: ast.AST) -> V:
        t = base.t
        if isinstance(t, Known):
            from .calls import attribute_of

            return attribute_of(self, t.value, name, node)
        if isinstance(t, Arr):
            return self.array_attribute(base, name, node)
        if isinstance(t, Rec):
            return self.record_field(base, name, node)
        if isinstance(t, Vec):
            if name in "xyzw"[: t.size]:
                return V(Num(t.dtype), build(f"{{0}}[{'xyzw'.index(name)}]", node, base.code))
        elif isinstance(t, Tup) and name in getattr(t.of, "_fields", ()):
            place = t.of._fields.index(name)  # type: ignore[attr-defined]
            return self.tuple_item(base, self.number(place, node), node)
        elif is_complex(t) and name in ("real", "imag"):
            part = F64 if t.dtype.itemsize == 16 else Num(np.dtype("f4"))
            return V(part, build(f"{{0}}.{name}", node, base.code))
        elif is_number(t) and name == "real":
            return base
        elif is_number(t) and name == "imag":
            return self.converted(self.number(0, node), t, node)
        elif isinstance(t, Num) and name in ("value",):
            return base
        raise self.fail(node, f"a value of type {t} has no attribute {name!r} in kernels")

    def array_attribute(self, base: V, name: str, node: ast.AST) -> V:
        t = base.t
        if name in (t.dtype.names or ()):
            return self.array_field(base, name, node)
        if name in ("shape", "strides"):
            return V(Tup((I64,) * t.ndim), build(f"{{0}}.{name}", node, base.code))
        if name in ("size", "nbytes", "itemsize"):
            return V(I64, build(f"{{0}}.{name}", node, base.code), NOT_CONSTANT, 48)
        if name == "ndim":
            return self.number(t.ndim, node)
        if name == "dtype":
            return V(Known(t.dtype), constant(None, node))
        if name == "T":
            layout = {"C": "F", "F": "C"}.get(t.layout, "A")
            return V(Arr(t.dtype, t.ndim, layout, t.is_const), build("{0}.T", node, base.code))
        if name in ("real", "imag") and t.dtype.kind == "c":
            part = np.dtype(f"f{t.dtype.itemsize // 2}")
            return V(Arr(part, t.ndim, "A", t.is_const), build(f"{{0}}.part({name!r})", node, base.code))
        raise self.fail(node, f"an array has no attribute {name!r} in kernels")
