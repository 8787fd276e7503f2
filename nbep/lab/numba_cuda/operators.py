"""Types and code of operators: arithmetic, comparisons, conditions."""

from __future__ import annotations

import ast
import operator

import numpy as np

from . import ops
from .code import build
from .env import NOT_CONSTANT, Part, V
from .types import (
    AS_SCALARS,
    BOOL,
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
    wide,
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
INFIX = {op: f"({{0}} {symbol} {{1}})" for op, symbol in SYMBOLS.items()}
CHECKED = {  # of integers, where the right operand may be 0, or no amount of a shift
    "FloorDiv": "floordiv({0}, {1})", "Mod": "mod({0}, {1})", "LShift": "shift_left({0}, {1})",
    "RShift": "shift_right({0}, {1})", "Pow": "int_pow({0}, {1})",
}  # fmt: skip
POWERS = {
    "f8": "float_pow({0}, {1})", "f4": "f32_pow({0}, {1})", "c8": "c64(complex_pow({0}, {1}))",
    "c16": "complex_pow({0}, {1})",
}  # fmt: skip
NOTHING_FOR = "No implementation of function Function for these types"  # as Numba says it
COMPARISONS = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt,
    "GtE": operator.ge,
}  # fmt: skip
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_U64 = (1 << 64) - 1
_MANY = 65  # bits: more than any type has


class Operators(Part):
    """The part of a compiler that knows operators."""

    def of_BinOp(self, node: ast.BinOp) -> V:
        return self.binary(type(node.op).__name__, self.value(node.left), self.value(node.right))

    def binary(self, op: str, a: V, b: V) -> V:
        a, b = self.held(a), self.held(b)
        if a.t is UNKNOWN or b.t is UNKNOWN:
            t = UNKNOWN if a.t is b.t else (b.t if a.t is UNKNOWN else a.t)
            return V(t, build("({0}, {1})[0]", a.code, b.code))
        if isinstance(a.t, Tup) and isinstance(b.t, Tup) and op == "Add":
            const = a.const + b.const if a.is_known and b.is_known else NOT_CONSTANT
            return V(Tup(a.t.items + b.t.items), build("({0} + {1})", a.code, b.code), const)
        if not (isinstance(a.t, Num) and isinstance(b.t, Num)):
            return self.of_others(op, a, b)
        if a.t.dtype.kind in "mM" or b.t.dtype.kind in "mM":
            return self.of_times(op, a, b)
        t = result_of(op, a.t, b.t)
        if t is None:
            raise self.fail(f"no {SYMBOLS.get(op, op)} of {a.t} and {b.t}")
        folded = self.folded(op, a, b, t)
        if folded is not None:
            return folded
        if self.unit.division_raises(op, t):
            b = V(b.t, build(f"{self.keep(ops.not_zero)}({{0}})", b.code), b.const, b.bits)
        if is_int(t):
            return self.int_binary(op, a, b, t)
        if op == "Pow" and is_int(b.t) and not is_complex(t):
            a = self.converted(a, t)
            b = self.converted(b, I64) if b.t == BOOL else b
            if b.const == 2 and isinstance(a.code, (ast.Name, ast.Constant)):
                return V(t, build("({0} * {1})", a.code, a.code))
        elif not (op == "Div" and is_int(a.t) and is_int(b.t)):
            a, b = self.converted(a, t), self.converted(b, t)
        template = INFIX[op]
        if op == "Div" and t.dtype.str[1:] not in AS_SCALARS:
            template = template if b.const is not NOT_CONSTANT and b.const != 0 else "div({0}, {1})"
        elif op in ("FloorDiv", "Mod"):
            template = f"float_{CHECKED[op]}"
        elif op == "Pow":
            template = POWERS[t.dtype.str[1:]]
        return V(t, build(template, a.code, b.code))

    def of_others(self, op: str, a: V, b: V) -> V:
        """An operator of what are not both numbers."""
        if self.unit.successor:
            from .calls import of_vectors
            from .math_rules import ARRAY_OPERATORS, ufunc

            if isinstance(a.t, Arr) or isinstance(b.t, Arr):
                return ufunc(self, ARRAY_OPERATORS[op], [a, b])
            vectors = [one.t for one in (a, b) if isinstance(one.t, Vec)]
            if len(vectors) == 1 or (vectors[1:] == vectors[:1] and op in ("Add", "Sub")):
                return of_vectors(self, vectors[0], [a, b], lambda x, y: self.binary(op, x, y))
        if isinstance(a.t, Known) and isinstance(b.t, Known) and op in FOLDED:
            return self.known(FOLDED[op](a.t.value, b.t.value))
        raise self.fail(f"no {SYMBOLS.get(op, op)} of {a.t} and {b.t}: {NOTHING_FOR}")

    def of_times(self, op: str, a: V, b: V) -> V:
        """Dates and durations, as NumPy has them."""
        try:
            result = FOLDED[op](*(np.ones((), one.t.dtype)[()] for one in (a, b)))
        except (TypeError, KeyError):
            raise self.fail(f"no {SYMBOLS.get(op, op)} of {a.t} and {b.t}") from None
        code = build(INFIX[op], a.code, b.code)
        t = Num(np.asarray(result).dtype)
        return V(t, code if t.dtype.kind in "mM" else build("({0}).item()", code))

    def folded(self, op: str, a: V, b: V, t: Num) -> V | None:
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
        return self.typed_constant(value, t)

    def int_binary(self, op: str, a: V, b: V, t: Num) -> V:
        shifts = op in ("LShift", "RShift")
        if t != BOOL:
            a = self.converted(a, t)
            b = self.converted(b, t) if not shifts else self.converted(b, I64) if b.t == BOOL else b
        x, y = a.bits, b.bits
        is_sure = op not in CHECKED or (b.const is not NOT_CONSTANT and op != "Pow")
        if is_sure and op in CHECKED:
            is_sure = 0 <= b.const < 64 if shifts else b.const > 0
        bits = {
            "Mult": x + y, "FloorDiv": x + (not is_sure), "Mod": y, "RShift": x, "Pow": _MANY,
            "LShift": x + b.const if shifts and is_sure else _MANY,
        }.get(op, max(x, y))  # fmt: skip
        if op in ("Add", "Sub"):
            bits = _MANY if t == U64 and op == "Sub" else bits + 1
        elif op == "BitAnd":
            bits = min([bits, *(one.bits for one in (a, b) if one.const is not NOT_CONSTANT and one.const >= 0)])
        code = build(INFIX[op] if is_sure else CHECKED[op], a.code, b.code)
        return V(t, code, NOT_CONSTANT, bits) if bits <= (63 if t == I64 else 64) else self.reduced(code, t)

    def reduced(self, code: ast.expr, t: Num) -> V:
        """A result reduced to 64 bits."""
        if t == U64:
            return V(t, build(f"({{0}} & {_U64:#x})", code))
        name = self.temporary()
        template = f"({name} if {_LEAST} <= ({name} := {{0}}) <= {_MOST} else wrap_i64({name}))"
        return V(t, build(template, code))

    def of_UnaryOp(self, node: ast.UnaryOp) -> V:
        return self.unary(type(node.op).__name__, self.value(node.operand))

    def unary(self, op: str, a: V) -> V:
        a = self.held(a)
        if op == "Not":
            truth = self.truth(a)
            if truth.const is not NOT_CONSTANT:
                return self.number(not truth.const)
            return V(BOOL, build("(not {0})", truth.code))
        if a.t is UNKNOWN:
            return a
        if isinstance(a.t, Vec) and self.unit.successor:
            from .calls import of_vectors

            return of_vectors(self, a.t, [a], lambda one: self.unary(op, one))
        if not isinstance(a.t, Num):
            raise self.fail(f"no unary {op} of {a.t}")
        if is_int(a.t):
            if op == "Invert" and a.t == BOOL:
                return V(BOOL, build("(not {0})", a.code))
            t = wide(a.t)
            a = self.converted(a, t)
            if a.const is not NOT_CONSTANT:
                value = {"USub": -a.const, "UAdd": a.const, "Invert": ~a.const}[op]
                if op == "USub" and a.t == U64 and a.const == 1 << 63:
                    return self.number(-(1 << 63))
                return self.typed_constant(ops.wrap(value, 64, t == I64), t)
            code = build({"USub": "(-{0})", "UAdd": "(+{0})", "Invert": "(~{0})"}[op], a.code)
            if op == "UAdd" or (t == I64 and (a.bits < 63 or op == "Invert")):
                return V(t, code, NOT_CONSTANT, a.bits)
            return self.reduced(code, t)
        if op == "Invert":
            raise self.fail(f"no ~ of {a.t}")
        if a.const is not NOT_CONSTANT and op == "USub" and isinstance(a.const, float):
            return self.typed_constant(-a.const, a.t)
        return V(a.t, a.code if op == "UAdd" else build("(-{0})", a.code))

    def of_BoolOp(self, node: ast.BoolOp) -> V:
        values: list[V] = []
        is_and = isinstance(node.op, ast.And)
        for one in node.values:
            value = self.value(one)
            truth = self.truth(value)
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
                values = [self.truth(one) for one in values]
                t = BOOL
                break
            t = joined
        codes = [self.converted(one, t).code if isinstance(t, (Num, Opt)) else one.code for one in values]
        return V(t, ast.BoolOp(node.op, codes))

    def of_IfExp(self, node: ast.IfExp) -> V:
        test = self.truth(self.value(node.test))
        if test.const is not NOT_CONSTANT:
            return self.value(node.body if test.const else node.orelse)
        a, b = self.value(node.body), self.value(node.orelse)
        if isinstance(a.t, Known) or isinstance(b.t, Known):
            a, b = self.made_real(a), self.made_real(b)
        t = unify(a.t, b.t)
        if t is None:
            raise self.fail(f"the branches are of types {a.t} and {b.t}, which have no common type")
        a, b = self.converted(a, t), self.converted(b, t)
        return V(t, ast.IfExp(test.code, a.code, b.code), NOT_CONSTANT, max(a.bits, b.bits))

    def of_Compare(self, node: ast.Compare) -> V:
        left = self.value(node.left)
        result: V | None = None
        for i, (op, right_node) in enumerate(zip(node.ops, node.comparators, strict=True)):
            right = self.value(right_node)
            again = right
            if i + 1 < len(node.ops) and not isinstance(right.code, (ast.Name, ast.Constant)):
                name = self.temporary()
                again = V(right.t, build(name), right.const, right.bits)
                right = V(right.t, build(f"({name} := {{0}})", right.code), right.const, right.bits)
            one = self.compare(type(op).__name__, left, right)
            if result is None:
                result = one
            elif result.const is not NOT_CONSTANT or one.const is not NOT_CONSTANT:
                result = one if result.const is True else result
            else:
                result = V(BOOL, ast.BoolOp(ast.And(), [result.code, one.code]))
            left = again
        assert result is not None
        return result

    def compare(self, op: str, a: V, b: V) -> V:
        if op in ("Is", "IsNot", "Eq", "NotEq") and NONE in (a.t, b.t) and Opt in (type(a.t), type(b.t)):
            test = "({0} is None)" if op in ("Is", "Eq") else "({0} is not None)"
            return V(BOOL, build(test, (b if a.t == NONE else a).code))
        if op in ("Is", "IsNot"):
            if not isinstance(a.t, Known) and not isinstance(b.t, Known):
                if not (isinstance(a.t, Num) and isinstance(b.t, Num)):
                    raise self.fail(f"`is` of {a.t} and {b.t} is not supported in kernels")
                return self.compare("Eq" if op == "Is" else "NotEq", a, b)
            same = isinstance(a.t, Known) and isinstance(b.t, Known) and a.t.value is b.t.value  # as members of an Enum
            return self.number(same is (op == "Is"))
        a, b = self.held(a), self.held(b)
        if op in ("In", "NotIn"):
            return self.membership(op, a, b)
        if a.t is UNKNOWN or b.t is UNKNOWN:
            return V(BOOL, build("({0}, {1})[0]", a.code, b.code))
        if a.is_known and b.is_known and type(a.t) is type(b.t) and isinstance(a.t, (Known, Num)):
            return self.number(bool(COMPARISONS[op](a.known, b.known)))
        if isinstance(a.t, Tup) and isinstance(b.t, Tup):
            return V(BOOL, ast.Compare(a.code, [getattr(ast, op)()], [b.code]))
        if not (isinstance(a.t, Num) and isinstance(b.t, Num)):
            if op in ("Eq", "NotEq") and (isinstance(a.t, Known) or isinstance(b.t, Known)):
                return self.number(op == "NotEq")
            raise self.fail(f"{a.t} and {b.t} cannot be compared")
        if is_number(a.t) and is_number(b.t) and not (is_int(a.t) and is_int(b.t)):
            t = compared(a.t, b.t)
            if t is None:
                raise self.fail(f"{a.t} and {b.t} cannot be compared")
            if is_complex(t) and op not in ("Eq", "NotEq"):
                raise self.fail(f"{a.t} and {b.t} have no order")
            if t.dtype.str[1:] in AS_SCALARS or any(x.t.dtype.str[1:] in AS_SCALARS for x in (a, b)):
                a, b = self.converted(a, t), self.converted(b, t)
        return V(BOOL, ast.Compare(a.code, [getattr(ast, op)()], [b.code]))

    def membership(self, op: str, a: V, b: V) -> V:
        if isinstance(b.t, Known) and isinstance(a.t, Known):
            return self.number((a.t.value in b.t.value) == (op == "In"))
        if isinstance(b.t, Arr) and b.t.ndim == 1:
            code = build("any(_x == {0} for _x in {1}.items(_t))", a.code, b.code)
        elif isinstance(b.t, (Tup, Iter)):
            code = build("({0} in {1})", a.code, b.code)
        else:
            raise self.fail(f"`in` of {b.t} is not supported in kernels")
        return V(BOOL, code if op == "In" else build("(not {0})", code))
