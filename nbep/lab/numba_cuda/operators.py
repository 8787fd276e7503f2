"""Types and code of operators: arithmetic, comparisons, conditions."""

from __future__ import annotations

import ast
import operator
from typing import Any

import numpy as np

from . import ops
from .code import build, constant, placed
from .env import NOT_CONSTANT, Part, V
from .types import (
    AS_SCALARS,
    BOOL,
    F64,
    I64,
    NONE,
    U64,
    UNKNOWN,
    Arr,
    Iter,
    Known,
    Num,
    Opt,
    Tup,
    Vec,
    compared,
    is_complex,
    is_int,
    is_number,
    result_of,
    unify,
)

SYMBOLS = {
    "Add": "+", "Sub": "-", "Mult": "*", "Div": "/", "FloorDiv": "//", "Mod": "%", "Pow": "**", "LShift": "<<",
    "RShift": ">>", "BitAnd": "&", "BitOr": "|", "BitXor": "^",
}  # fmt: skip
FOLDED = {
    "Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "FloorDiv": operator.floordiv, "Mod": operator.mod,
    "Div": operator.truediv, "LShift": operator.lshift, "RShift": operator.rshift, "BitAnd": operator.and_,
    "BitOr": operator.or_, "BitXor": operator.xor, "Pow": operator.pow,
}  # fmt: skip
NOTHING_FOR = "No implementation of function Function for these types"  # as Numba says it
COMPARISONS = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge,
}  # fmt: skip
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_U64 = (1 << 64) - 1


class Operators(Part):
    """The part of a compiler that knows operators."""

    def of_BinOp(self, node: ast.BinOp) -> V:
        return self.binary(type(node.op).__name__, self.value(node.left), self.value(node.right), node)

    def binary(self, op: str, a: V, b: V, node: ast.AST) -> V:
        a, b = self.held(a, node), self.held(b, node)
        if a.t is UNKNOWN or b.t is UNKNOWN:
            t = UNKNOWN if a.t is b.t else (b.t if a.t is UNKNOWN else a.t)
            return V(t, build("({0}, {1})[0]", node, a.code, b.code))
        if isinstance(a.t, Tup) and isinstance(b.t, Tup) and op == "Add":
            const = a.const + b.const if a.is_known and b.is_known else NOT_CONSTANT
            return V(Tup(a.t.items + b.t.items), build("({0} + {1})", node, a.code, b.code), const)
        if not (isinstance(a.t, Num) and isinstance(b.t, Num)):
            if self.unit.successor and (isinstance(a.t, Arr) or isinstance(b.t, Arr)):
                from . import math_rules

                return math_rules.ufunc(self, math_rules.ARRAY_OPERATORS[op], [a, b], {}, node)
            vectors = [one.t for one in (a, b) if isinstance(one.t, Vec)]
            if self.unit.successor and (len(vectors) == 1 or (vectors[1:] == vectors[:1] and op in ("Add", "Sub"))):
                from .calls import of_vectors

                return of_vectors(self, vectors[0], [a, b], lambda x, y: self.binary(op, x, y, node), node)
            known = isinstance(a.t, Known) and isinstance(b.t, Known)
            if known and op in FOLDED:
                return self.known(FOLDED[op](a.t.value, b.t.value), node)
            raise self.fail(node, f"no {SYMBOLS.get(op, op)} of {a.t} and {b.t}: {NOTHING_FOR}")
        if a.t.dtype.kind in "mM" or b.t.dtype.kind in "mM":
            return self.of_times(op, a, b, node)
        t = result_of(op, a.t, b.t)
        if t is None:
            raise self.fail(node, f"no {SYMBOLS.get(op, op)} of {a.t} and {b.t}")
        folded = self.folded(op, a, b, t, node)
        if folded is not None:
            return folded
        if self.unit.division_raises(op, t):
            b = V(b.t, build(f"{self.keep(ops.not_zero)}({{0}})", node, b.code), b.const, b.bits)
        if is_int(t):
            return self.int_binary(op, a, b, t, node)
        if op == "Pow" and is_int(b.t) and not is_complex(t):
            a = self.converted(a, t, node)
            b = self.converted(b, I64, node) if b.t == BOOL else b
            if b.const == 2 and isinstance(a.code, (ast.Name, ast.Constant)):
                return V(t, build("({0} * {1})", node, a.code, a.code))
            return V(t, build("float_pow({0}, {1})" if t == F64 else "f32_pow({0}, {1})", node, a.code, b.code))
        if op == "Div" and is_int(a.t) and is_int(b.t):
            if b.const is not NOT_CONSTANT and b.const != 0:
                return V(t, build("({0} / {1})", node, a.code, b.code))
            return V(t, build("div({0}, {1})", node, a.code, b.code))
        a, b = self.converted(a, t, node), self.converted(b, t, node)
        template = "({0} " + SYMBOLS[op] + " {1})"
        if op == "Div" and t.dtype.str[1:] not in AS_SCALARS:
            if b.const is NOT_CONSTANT or b.const == 0:
                template = "div({0}, {1})"
        elif op in ("FloorDiv", "Mod"):
            template = "float_floordiv({0}, {1})" if op == "FloorDiv" else "float_mod({0}, {1})"
        elif op == "Pow":
            template = {
                "f8": "float_pow({0}, {1})",
                "f4": "f32_pow({0}, {1})",
                "c8": "c64(complex_pow({0}, {1}))",
                "c16": "complex_pow({0}, {1})",
            }[t.dtype.str[1:]]
        return V(t, build(template, node, a.code, b.code))

    def of_times(self, op: str, a: V, b: V, node: ast.AST) -> V:
        """Dates and durations, as NumPy has them."""

        def sample(v: V) -> Any:
            return np.ones((), v.t.dtype)[()]

        try:
            result = FOLDED[op](sample(a), sample(b))
        except (TypeError, KeyError):
            raise self.fail(node, f"no {SYMBOLS.get(op, op)} of {a.t} and {b.t}") from None
        code = build("({0} " + SYMBOLS[op] + " {1})", node, a.code, b.code)
        t = Num(np.asarray(result).dtype)
        return V(t, code if t.dtype.kind in "mM" else build("({0}).item()", node, code))

    def folded(self, op: str, a: V, b: V, t: Num, node: ast.AST) -> V | None:
        """The value, if both operands are known."""
        if a.const is NOT_CONSTANT or b.const is NOT_CONSTANT or not (is_int(a.t) and is_int(b.t)):
            return None
        try:
            if op in ("LShift", "RShift", "Pow") and not 0 <= b.const < 64:
                return None
            value = FOLDED[op](a.const, b.const)
        except (ZeroDivisionError, OverflowError, ValueError):
            return None
        if is_int(t) and t != BOOL:
            value = ops.wrap(value, 64, t == I64)
        return self.typed_constant(value, t, node)

    def int_binary(self, op: str, a: V, b: V, t: Num, node: ast.AST) -> V:
        if t == BOOL:
            return V(BOOL, build("({0} " + SYMBOLS[op] + " {1})", node, a.code, b.code))
        if op in ("Add", "Sub", "Mult", "FloorDiv", "Mod", "BitAnd", "BitOr", "BitXor", "Pow"):
            a, b = self.converted(a, t, node), self.converted(b, t, node)
        elif op in ("LShift", "RShift"):
            a = self.converted(a, t, node)
            b = self.converted(b, I64, node) if b.t == BOOL else b
        x, y = a.bits, b.bits
        room = 63 if t == I64 else 64
        if op in ("Add", "Sub", "Mult"):
            bits = x + y if op == "Mult" else max(x, y) + 1
            code = build("({0} " + SYMBOLS[op] + " {1})", node, a.code, b.code)
            if bits <= room and not (t == U64 and op == "Sub"):
                return V(t, code, NOT_CONSTANT, bits)
            return self.reduced(code, t, node)
        if op in ("FloorDiv", "Mod"):
            sure = b.const is not NOT_CONSTANT and b.const > 0
            name = "floordiv" if op == "FloorDiv" else "mod"
            code = build("({0} " + SYMBOLS[op] + " {1})" if sure else name + "({0}, {1})", node, a.code, b.code)
            if op == "FloorDiv" and not sure and x >= room:
                return self.reduced(code, t, node)
            return V(t, code, NOT_CONSTANT, x if op == "FloorDiv" else y)
        if op in ("BitAnd", "BitOr", "BitXor"):
            code = build("({0} " + SYMBOLS[op] + " {1})", node, a.code, b.code)
            bits = max(x, y)
            for one in (a, b):
                if op == "BitAnd" and one.const is not NOT_CONSTANT and one.const >= 0:
                    bits = min(bits, one.bits)
            return V(t, code, NOT_CONSTANT, bits)
        if op == "LShift":
            if b.const is not NOT_CONSTANT and 0 <= b.const < 64:
                code = build("({0} << {1})", node, a.code, b.code)
                if x + b.const <= room:
                    return V(t, code, NOT_CONSTANT, x + b.const)
                return self.reduced(code, t, node)
            return self.reduced(build("shift_left({0}, {1})", node, a.code, b.code), t, node)
        if op == "RShift":
            sure = b.const is not NOT_CONSTANT and 0 <= b.const < 64
            return V(
                t, build("({0} >> {1})" if sure else "shift_right({0}, {1})", node, a.code, b.code), NOT_CONSTANT, x
            )
        return self.reduced(build("int_pow({0}, {1})", node, a.code, b.code), t, node)

    def reduced(self, code: ast.expr, t: Num, node: ast.AST) -> V:
        """A result reduced to 64 bits."""
        if t == U64:
            return V(t, build(f"({{0}} & {_U64:#x})", node, code))
        name = self.temporary()
        template = f"({name} if {_LEAST} <= ({name} := {{0}}) <= {_MOST} else wrap_i64({name}))"
        return V(t, build(template, node, code))

    def of_UnaryOp(self, node: ast.UnaryOp) -> V:
        return self.unary(type(node.op).__name__, self.value(node.operand), node)

    def unary(self, op: str, a: V, node: ast.AST) -> V:
        a = self.held(a, node)
        if op == "Not":
            truth = self.truth(a, node)
            if truth.const is not NOT_CONSTANT:
                return V(BOOL, constant(not truth.const, node), not truth.const)
            return V(BOOL, build("(not {0})", node, truth.code))
        if a.t is UNKNOWN:
            return a
        if isinstance(a.t, Vec) and self.unit.successor:
            from .calls import of_vectors

            return of_vectors(self, a.t, [a], lambda one: self.unary(op, one, node), node)
        if not isinstance(a.t, Num):
            raise self.fail(node, f"no unary {op} of {a.t}")
        if is_int(a.t):
            if op == "Invert" and a.t == BOOL:
                return V(BOOL, build("(not {0})", node, a.code))
            t = I64 if a.t.dtype.kind in "ib" else U64
            a = self.converted(a, t, node)
            if a.const is not NOT_CONSTANT:
                value = {"USub": -a.const, "UAdd": a.const, "Invert": ~a.const}[op]
                if op == "USub" and a.t == U64 and a.const == 1 << 63:
                    return self.number(-(1 << 63), node)
                return self.typed_constant(ops.wrap(value, 64, t == I64), t, node)
            symbol = {"USub": "-", "UAdd": "+", "Invert": "~"}[op]
            code = build("(" + symbol + "{0})", node, a.code)
            if op == "UAdd" or (t == I64 and (a.bits < 63 or op == "Invert")):
                return V(t, code, NOT_CONSTANT, a.bits)
            return self.reduced(code, t, node)
        if op == "Invert":
            raise self.fail(node, f"no ~ of {a.t}")
        if a.const is not NOT_CONSTANT and op == "USub" and isinstance(a.const, float):
            return self.typed_constant(-a.const, a.t, node)
        return V(a.t, a.code if op == "UAdd" else build("(-{0})", node, a.code))

    def of_BoolOp(self, node: ast.BoolOp) -> V:
        values: list[V] = []
        is_and = isinstance(node.op, ast.And)
        for one in node.values:
            value = self.value(one)
            truth = self.truth(value, one)
            if truth.const is not NOT_CONSTANT and isinstance(value.t, (Known, Num)):
                if bool(truth.const) is not is_and:  # it decides
                    values.append(truth if values else value)
                    break
                if one is not node.values[-1]:
                    continue
            values.append(value)
        if len(values) == 1:
            return values[0]
        t = values[0].t
        for value in values[1:]:
            joined = unify(t, value.t)
            if joined is None:
                values = [self.truth(one, node) for one in values]
                t = BOOL
                break
            t = joined
        codes = [self.converted(one, t, node).code if isinstance(t, (Num, Opt)) else one.code for one in values]
        return V(t, placed(ast.BoolOp(node.op, codes), node))

    def of_IfExp(self, node: ast.IfExp) -> V:
        test = self.truth(self.value(node.test), node.test)
        if test.const is not NOT_CONSTANT:
            return self.value(node.body if test.const else node.orelse)
        a, b = self.value(node.body), self.value(node.orelse)
        if isinstance(a.t, Known) or isinstance(b.t, Known):
            a, b = self.made_real(a, node), self.made_real(b, node)
        t = unify(a.t, b.t)
        if t is None:
            raise self.fail(node, f"the branches are of types {a.t} and {b.t}, which have no common type")
        a, b = self.converted(a, t, node), self.converted(b, t, node)
        return V(t, placed(ast.IfExp(test.code, a.code, b.code), node), NOT_CONSTANT, max(a.bits, b.bits))

    def of_Compare(self, node: ast.Compare) -> V:
        left = self.value(node.left)
        result: V | None = None
        for i, (op, right_node) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self.value(right_node)
            again = right
            if i + 1 < len(node.ops) and not isinstance(right.code, (ast.Name, ast.Constant)):
                name = self.temporary()
                store = placed(ast.Name(name, ast.Store()), node)
                again = V(right.t, placed(ast.Name(name, ast.Load()), node), right.const, right.bits)
                right = V(right.t, placed(ast.NamedExpr(store, right.code), node), right.const, right.bits)
            one = self.compare(type(op).__name__, left, right, node)
            if result is None:
                result = one
            elif result.const is not NOT_CONSTANT or one.const is not NOT_CONSTANT:
                result = one if result.const is True else result
            else:
                result = V(BOOL, placed(ast.BoolOp(ast.And(), [result.code, one.code]), node))
            left = again
        assert result is not None
        return result

    def compare(self, op: str, a: V, b: V, node: ast.AST) -> V:
        if op in ("Is", "IsNot", "Eq", "NotEq") and NONE in (a.t, b.t) and Opt in (type(a.t), type(b.t)):
            test = "({0} is None)" if op in ("Is", "Eq") else "({0} is not None)"
            return V(BOOL, build(test, node, (b if a.t == NONE else a).code))
        if op not in ("Is", "IsNot"):
            a, b = self.held(a, node), self.held(b, node)
        if op in ("Is", "IsNot"):
            if isinstance(a.t, Known) and isinstance(b.t, Known):
                same = a.t.value is b.t.value  # as for members of an enumeration
            elif isinstance(a.t, Known) or isinstance(b.t, Known):
                same = False
            elif isinstance(a.t, Num) and isinstance(b.t, Num):
                return self.compare("Eq" if op == "Is" else "NotEq", a, b, node)
            else:
                raise self.fail(node, f"`is` of {a.t} and {b.t} is not supported in kernels")
            same = same if op == "Is" else not same
            return V(BOOL, constant(same, node), same)
        if op in ("In", "NotIn"):
            return self.membership(op, a, b, node)
        if a.t is UNKNOWN or b.t is UNKNOWN:
            return V(BOOL, build("({0}, {1})[0]", node, a.code, b.code))
        if isinstance(a.t, Known) and isinstance(b.t, Known):
            value = bool(COMPARISONS[op](a.t.value, b.t.value))
            return V(BOOL, constant(value, node), value)
        placed_op = getattr(ast, op)()
        if isinstance(a.t, Tup) and isinstance(b.t, Tup):
            return V(BOOL, placed(ast.Compare(a.code, [placed_op], [b.code]), node))
        if not (isinstance(a.t, Num) and isinstance(b.t, Num)):
            if op in ("Eq", "NotEq") and (isinstance(a.t, Known) or isinstance(b.t, Known)):
                return V(BOOL, constant(op == "NotEq", node), op == "NotEq")
            raise self.fail(node, f"{a.t} and {b.t} cannot be compared")
        if a.const is not NOT_CONSTANT and b.const is not NOT_CONSTANT:
            value = bool(COMPARISONS[op](a.const, b.const))
            return V(BOOL, constant(value, node), value)
        if is_number(a.t) and is_number(b.t) and not (is_int(a.t) and is_int(b.t)):
            t = compared(a.t, b.t)
            if t is None:
                raise self.fail(node, f"{a.t} and {b.t} cannot be compared")
            if is_complex(t) and op not in ("Eq", "NotEq"):
                raise self.fail(node, f"{a.t} and {b.t} have no order")
            if t.dtype.str[1:] in AS_SCALARS or any(x.t.dtype.str[1:] in AS_SCALARS for x in (a, b)):
                a, b = self.converted(a, t, node), self.converted(b, t, node)
        return V(BOOL, placed(ast.Compare(a.code, [placed_op], [b.code]), node))

    def membership(self, op: str, a: V, b: V, node: ast.AST) -> V:
        if isinstance(b.t, Known) and isinstance(a.t, Known):
            value = (a.t.value in b.t.value) == (op == "In")
            return V(BOOL, constant(value, node), value)
        if isinstance(b.t, Arr) and b.t.ndim == 1:
            code = build("any(_x == {0} for _x in {1}.items(_t))", node, a.code, b.code)
        elif isinstance(b.t, (Tup, Iter)):
            code = build("({0} in {1})", node, a.code, b.code)
        else:
            raise self.fail(node, f"`in` of {b.t} is not supported in kernels")
        return V(BOOL, code if op == "In" else build("(not {0})", node, code))
