"""What is known of a kernel's variables at a point of it, and how that of two paths becomes one."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, NamedTuple

from .code import build
from .types import NONE, Known, Num, Opt, Tup, is_int, unify

NOT_CONSTANT: Any = object()
FULL = 64  # bits that an integer may have, if nothing is known of it


class Conflict:
    """The type of a variable that has two types which do not go together."""

    def __init__(self, *types: Any):
        self.types = types

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conflict)

    def __hash__(self) -> int:
        return 0


class V:
    """A value in a kernel: its type, the code that computes it, the value if it is known.

    bits: at most, of an integer without its sign: what saves the reduction to 64 bits
    """

    __slots__ = ("bits", "code", "const", "t")

    def __init__(self, t: Any, code: ast.expr, const: Any = NOT_CONSTANT, bits: int = FULL):
        self.t = t
        self.code = code
        self.const = const
        self.bits = bits
        if const is not NOT_CONSTANT and type(const) in (int, bool):
            self.bits = int(const).bit_length()
        elif bits == FULL and isinstance(t, Num) and is_int(t):
            self.bits = bits_of(t)

    @property
    def is_known(self) -> bool:
        return self.const is not NOT_CONSTANT or isinstance(self.t, Known)

    @property
    def known(self) -> Any:
        return self.t.value if isinstance(self.t, Known) else self.const


def called(function: str | ast.expr, *args: str | ast.expr | V) -> ast.expr:
    """The code of a call. args: values, or their code"""
    codes = [build(one) if isinstance(one, str) else one.code if isinstance(one, V) else one for one in args]
    return ast.Call(build(function) if isinstance(function, str) else function, codes, [])


def invoked(array: ast.expr, method: str, *args: str | ast.expr | V) -> ast.expr:
    """The code of a call of an array's method that is passed the thread."""
    return called(ast.Attribute(array, method, ast.Load()), "_t", *args)


def calls(code: ast.AST, method: str) -> bool:
    """Whether code is a call of such a method."""
    return isinstance(code, ast.Call) and isinstance(code.func, ast.Attribute) and code.func.attr == method


class Var(NamedTuple):
    """A variable. is_mixed: its value may still be of another type, as on the way here; it is converted when used."""

    t: Any
    is_mixed: bool = False
    bits: int = FULL
    const: Any = NOT_CONSTANT


Env = dict[str, Var]


def bits_of(t: Num) -> int:
    size = 8 * t.dtype.itemsize
    return 1 if t.dtype.kind == "b" else size - (t.dtype.kind == "i")


def representation(t: Any) -> Any:
    """What values of a type are in Python."""
    if is_int(t):
        return "int"
    if isinstance(t, Opt):
        return representation(t.of)
    if isinstance(t, Num):
        return t.dtype.str
    if isinstance(t, Tup):
        return tuple(map(representation, t.items))
    return type(t)


def _same_const(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b) and repr(a) == repr(b)
    except (TypeError, ValueError):
        return False


def join_var(a: Var, b: Var) -> Var:
    if a is b or a == b:
        return a
    if isinstance(a.t, Conflict) or isinstance(b.t, Conflict):
        return Var(Conflict(a.t, b.t))
    t = unify(a.t, b.t)
    if t is None:
        return Var(Conflict(a.t, b.t))
    const = a.const if _same_const(a.const, b.const) else NOT_CONSTANT
    is_mixed = a.is_mixed or b.is_mixed or (NONE not in (a.t, b.t) and representation(a.t) != representation(b.t))
    return Var(t, is_mixed, max(a.bits, b.bits), const)


def join(*envs: Env | None) -> Env | None:
    """What is known where several paths meet; None for a path that does not come here."""
    result: Env | None = None
    for env in envs:
        if result is None or env is None:
            result = result if env is None else dict(env)
            continue
        for name, var in env.items():
            result[name] = join_var(result[name], var) if name in result else var
    return result


def widened(before: Env, after: Env) -> Env:
    """What is known at the head of a loop, after another turn: a bound that grows has none."""

    def grows(name: str, var: Var) -> bool:
        return name in before and is_int(var.t) and var.bits > before[name].bits

    return {name: var._replace(bits=bits_of(var.t)) if grows(name, var) else var for name, var in after.items()}


def same(a: Env, b: Env) -> bool:
    def is_same(x: Var, y: Var) -> bool:
        return x is y or (x[:3] == y[:3] and _same_const(x.const, y.const))

    return a.keys() == b.keys() and all(is_same(x, b[name]) for name, x in a.items())


class Part:
    """What the parts of a compiler use of each other."""

    env: Any
    at: Any
    target_name: str | None = None
    may_be_compiled_again: bool = False  # for the values of its arguments, if it fails for their types
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
