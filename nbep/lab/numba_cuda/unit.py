"""A kernel compiled for arguments of certain types, with the device functions that it calls."""

from __future__ import annotations

import ast
import enum
import inspect
import types as python
from typing import Any

import numpy as np

from .code import KernelTypeError, at_place_of
from .env import NOT_CONSTANT, V, called
from .types import BOOL, C128, F32, F64, UNKNOWN, Arr, Known, Num, Rec, Tup, is_complex, type_of_int

MAX_DEPTH = 40


class Unit:
    """What is compiled together. constants: arrays as they were then; sites: calls of cuda.shared.array

    successor: as numba-cuda-mlir compiles it: arrays of a size known at run time, and expressions of arrays
    """

    def __init__(self, debug: bool = False, fastmath: Any = False, successor: bool = False) -> None:
        self.debug, self.successor = debug, successor
        self.fastmath = bool(fastmath)
        self.functions: dict[Any, Any] = {}
        self.shared_sites: dict[Any, Any] = {}
        self.sites: list[Any] = []
        self.constants: dict[int, tuple[Any, np.ndarray]] = {}
        self.uses: set[str] = set()
        self.depth = 0
        self.code: Any = None  # what makes its machine code, or why there is none
        self.captured: list[Any] = []  # arrays of the device that are globals of that, with their types
        self.by_python = 0  # how many primitive calls Python has run in waits for it
        self.by_constants: set[Any] = set()  # functions that must know the values of arguments

    def function(self, function: python.FunctionType, types: dict[str, Any], is_kernel: bool = False) -> Any:
        """A kernel or a device function for arguments of these types."""
        from .statements import Compiled, FunctionCompiler

        compiled = Compiled(function.__name__)
        compiled.uses, compiled.is_kernel, compiled.keep = self.uses, is_kernel, function
        FunctionCompiler(self, function, types, compiled).compile()
        if is_kernel and compiled.returns != Known(None):
            raise KernelTypeError(f"{function.__name__}: a kernel returns {compiled.returns}; it must return nothing")
        return compiled

    def division_raises(self, op: str, t: Num) -> bool:
        """Whether a zero on the right of an operator is an error, as Numba has it for kernels with `debug=True`."""
        exact = self.debug and not (self.fastmath and op == "Div" and t == F32)
        return exact and op in ("Div", "FloorDiv", "Mod") and not is_complex(t)

    def frozen(self, array: np.ndarray) -> np.ndarray:
        if id(array) not in self.constants:
            self.constants[id(array)] = (array, array.copy(order="K"))
        return self.constants[id(array)][1]

    # --- device functions -------------------------------------------------------------------------------------------

    def call_function(self, c: Any, function: Any, args: list[V], kwargs: dict[str, V]) -> V:
        """A call of a device function: it is compiled for the types of these arguments."""
        from .statements import Compiled, FunctionCompiler, LocalFunction

        is_local = isinstance(function, LocalFunction)
        if not getattr(function, "_can_compile", True):
            name = function.py_func.__name__
            raise c.fail(f"Untyped global name {name!r}: using cpu function on device, with a signature of its own")
        source = function.compiler.function if is_local else function.py_func
        signature = _signature_of(function.node) if is_local else inspect.signature(source)
        name = getattr(function.node, "name", "lambda") if is_local else source.__name__
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise c.fail(f"{name}: {error}") from None
        bound.apply_defaults()
        values: dict[str, V] = {}
        for parameter, given in bound.arguments.items():
            if signature.parameters[parameter].kind is inspect.Parameter.VAR_POSITIONAL:
                given = c.tuple_of(list(given))
            elif not isinstance(given, V):
                given = c.value(given) if isinstance(given, ast.expr) else c.known(given)
            values[parameter] = given
        declared = getattr(function, "declared", None)
        if declared is not None:
            for (parameter, value), t in zip(list(values.items()), declared[1], strict=True):
                values[parameter] = c.converted(value, t)
        extra: dict[str, V] = {}
        if is_local:
            for free in _free_names(function.node):
                var = function.compiler.env.get(free) or function.env.get(free)
                if var is not None and not isinstance(var.t, Known) and function.compiler is c:
                    extra[free] = c.look_up(free)
        types = {parameter: value.t for parameter, value in (values | extra).items()}
        key = (id(function.node if is_local else function), *types.items())
        consts: dict[str, Any] = {}
        if key in self.by_constants:
            consts = {n: v.const for n, v in values.items() if v.const is not NOT_CONSTANT}
            key = (*key, *((n, repr(v)) for n, v in consts.items()))
        compiled = self.functions.get(key)
        if compiled is None and self.depth > MAX_DEPTH:
            message = f"{name}: more than {MAX_DEPTH} functions inside each other, each for new types"
            raise c.fail(f"{message}. Return type of recursive function does not converge")
        if compiled is None:
            compiled = self.functions[key] = Compiled(name)
            compiled.uses = self.uses
            if is_local:
                scope = function.compiler
                inner = FunctionCompiler(self, source, types, compiled, _with_extra(function.node, list(extra)))
                known = {n: v.t.value for n, v in {**scope.env, **function.env}.items() if isinstance(v.t, Known)}
                outer = {n: v.const for n, v in function.env.items() if v.const is not NOT_CONSTANT and n not in extra}
                inner.scope = {**scope.scope, **outer, **known}
            else:
                inner = FunctionCompiler(self, source, types, compiled)
            inner.consts = consts
            inner.may_be_compiled_again = not consts and any(v.const is not NOT_CONSTANT for v in values.values())
            self.depth += 1
            try:
                inner.compile()
            except KernelTypeError:
                del self.functions[key]
                if not inner.may_be_compiled_again:
                    raise
                self.by_constants.add(key)  # as Numba does: once more, with the values of arguments that are literals
                return self.call_function(c, function, args, kwargs)
            finally:
                self.depth -= 1
            compiled.keep = function
        made = V(compiled.returns, called(f"{c.keep(compiled)}.run", "_t", "_w", *(values | extra).values()))
        if declared is not None and declared[0] is not None and made.t is not UNKNOWN and made.t != Known(None):
            made = c.converted(made, declared[0])
        return made


def _signature_of(node: Any) -> inspect.Signature:
    """The parameters of a function that a kernel defines; their defaults are expressions."""
    kinds = inspect.Parameter
    names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
    defaults = [kinds.empty] * (len(names) - len(node.args.defaults)) + node.args.defaults
    pairs = zip(names, defaults, strict=True)
    return inspect.Signature([kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=one) for name, one in pairs])


def _free_names(node: Any) -> list[str]:
    names = [one for part in ast.iter_child_nodes(node) for one in ast.walk(part) if isinstance(one, ast.Name)]
    stores = {one.arg for one in (*node.args.posonlyargs, *node.args.args)}
    stores |= {one.id for one in names if isinstance(one.ctx, ast.Store)}
    return [name for name in dict.fromkeys(one.id for one in names) if name not in stores]


def _with_extra(node: Any, names: list[str]) -> Any:
    """The same function, with more parameters."""
    if not names:
        return node
    parameters = [*node.args.args, *(ast.arg(name) for name in names)]
    arguments = ast.arguments(node.args.posonlyargs, parameters, None, [], [], None, [])
    if isinstance(node, ast.Lambda):
        return at_place_of(ast.Lambda(arguments, node.body), node)
    new: Any = ast.FunctionDef(name=node.name, args=arguments, body=node.body, decorator_list=[])
    return at_place_of(new, node)


def type_of(value: Any) -> Any:
    """The type of an argument of a kernel, as Numba has it."""
    if value is None:
        return Known(None)
    if isinstance(value, (bool, np.bool_)):
        return BOOL
    if isinstance(value, enum.IntEnum):
        return type_of_int(int(value))
    if isinstance(value, enum.Enum):
        return Known(value)
    if isinstance(value, np.void) or hasattr(value, "is_record"):
        return Rec(value.dtype)
    if isinstance(value, np.generic):
        return Num(value.dtype)
    if isinstance(value, (int, float, complex)):
        return type_of_int(value) if isinstance(value, int) else F64 if isinstance(value, float) else C128
    if isinstance(value, tuple):
        return Tup(tuple(map(type_of, value)), type(value))
    if hasattr(value, "__cuda_array_interface__") and not hasattr(value, "_nd"):
        from .memory import as_device

        value = as_device(value)
    if isinstance(value, np.ndarray) or hasattr(value, "_nd"):
        nd = value if isinstance(value, np.ndarray) else value._nd
        layout = "C" if nd.flags.c_contiguous else "F" if nd.flags.f_contiguous else "A"
        return Arr(nd.dtype, nd.ndim, layout, not nd.flags.writeable)
    if hasattr(value, "py_func"):
        return Known(value)
    raise TypeError(f"an argument of type {type(value).__name__} is not supported in kernels")
