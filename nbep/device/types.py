"""The annotations of kernel parameters, and the flat list of leaves they amount to.

A kernel's parameters are scalars and NamedTuples of scalars. Every leaf is annotated with one of

    In     address of an array that the kernel only reads
    Out    address of an array that the kernel writes
    InOut  address of an array that the kernel reads and writes
    Sym    address in symmetric memory, or of a table of such addresses
    I32 I64 F32   plain numbers

so one signature says who owns each pointer, how the emulator maps it, and how CUDA packs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

ADDRESS_ROLES = ("in", "out", "inout", "sym")


@dataclass(frozen=True)
class ParamType:
    """What one leaf of a kernel's parameters is: its role, and its code in the struct module (q, i or f)."""

    role: str
    code: str

    @property
    def is_address(self) -> bool:
        return self.role in ADDRESS_ROLES

    @property
    def is_writable(self) -> bool:
        return self.role in ("out", "inout", "sym")


In = Annotated[int, ParamType("in", "q")]
Out = Annotated[int, ParamType("out", "q")]
InOut = Annotated[int, ParamType("inout", "q")]
Sym = Annotated[int, ParamType("sym", "q")]
I32 = Annotated[int, ParamType("i32", "i")]
I64 = Annotated[int, ParamType("i64", "q")]
F32 = Annotated[float, ParamType("f32", "f")]


@dataclass(frozen=True)
class Param:
    """A leaf: `path` is its dotted name ("sizes.num_tokens"), `type` its ParamType."""

    path: str
    type: ParamType


def param_type(hint: Any) -> ParamType | None:
    """The ParamType of an annotation such as `In`, or None where there is none."""
    if get_origin(hint) is Annotated:
        return next((extra for extra in get_args(hint)[1:] if isinstance(extra, ParamType)), None)
    return None


def is_named_tuple(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def parameter_hints(function: Callable) -> dict[str, Any]:
    """Parameter name -> annotation, in order. A parameter without an annotation is a TypeError."""
    hints = get_type_hints(function, include_extras=True)
    missing = [name for name in inspect.signature(function).parameters if name not in hints]
    if missing:
        raise TypeError(f"{function.__name__}: parameters without a type: {', '.join(missing)}")
    return {name: hints[name] for name in inspect.signature(function).parameters}


def flatten_params(function: Callable) -> tuple[Param, ...]:
    """The leaves of a kernel's signature, in the order in which CUDA receives them.

    Raises: TypeError for a leaf that is annotated with none of this module's types
    """

    def leaf(path: str, hint: Any) -> Param:
        found = param_type(hint)
        if found is None:
            raise TypeError(
                f"{function.__name__}: {path} must be In, Out, InOut, Sym, I32, I64, F32 or a NamedTuple of them"
            )
        return Param(path, found)

    params: list[Param] = []
    for name, hint in parameter_hints(function).items():
        if is_named_tuple(hint):
            fields = get_type_hints(hint, include_extras=True)
            params += (leaf(f"{name}.{field}", field_hint) for field, field_hint in fields.items())
        else:
            params.append(leaf(name, hint))
    return tuple(params)


def flatten_args(args: tuple) -> list[Any]:
    """The leaves of the arguments of a call, in the order of `flatten_params`."""
    flat: list[Any] = []
    for arg in args:
        if isinstance(arg, tuple):
            flat += arg
        else:
            flat.append(arg)
    return flat


def unflatten_args(function: Callable, flat: list[Any]) -> tuple:
    """The arguments of a call, rebuilt from their leaves: the inverse of `flatten_args`."""
    leaves = iter(flat)
    return tuple(
        hint(*(next(leaves) for _ in hint._fields)) if is_named_tuple(hint) else next(leaves)
        for hint in parameter_hints(function).values()
    )


def param_format(params: tuple[Param, ...]) -> str:
    """The struct format of CUDA's parameter block: each leaf at its natural alignment."""
    return "@" + "".join(param.type.code for param in params)
