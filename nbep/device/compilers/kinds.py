"""What both compilers say of the kinds of a primitive's arguments and results.

Their types have the same names and live in different packages, so the functions take the module.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

from ..diagnosis import outwards, place_of
from ..jit import ComputeCapability, PrimitiveSpec
from ..types import param_type

WORDS = {"v2": 2, "v4": 4}
BITS = {"s32": 32, "u32": 32, "u8": 32, "pred": 32, "smem": 32, "s64": 64}  # of the register; f32 is a float
DYNAMIC_SHARED = "nbep_dynamic_shared"
DYNAMIC_SHARED_ALIGNMENT = 1024


def result_kinds(spec: PrimitiveSpec) -> list[str]:
    """The kind of each register that comes back."""
    if spec.returns is None:
        return []
    if isinstance(spec.returns, tuple):
        return list(spec.returns)
    return ["u32"] * WORDS[spec.returns] if spec.returns in WORDS else [spec.returns]


def constraint(kind: str) -> str:
    """The letter of the register that a kind is in."""
    return "f" if kind == "f32" else {32: "r", 64: "l"}[BITS[kind]]


def constraints(spec: PrimitiveSpec) -> str:
    """What inline PTX says of its operands. What is not pure clobbers memory: no access is moved across it."""
    operands = [kind for given in spec.args for kind in (["u32"] * WORDS[given] if given in WORDS else [given])]
    letters = [f"={constraint(kind)}" for kind in result_kinds(spec)] + [constraint(kind) for kind in operands]
    return ",".join(letters if spec.effect == "pure" else [*letters, "~{memory}"])


class Kinds:
    """The same in the types of one compiler."""

    def __init__(self, types: Any, error: type[Exception]):
        self.types = types
        self.error = error

    def type_of(self, kind: str):
        """The type of a result. All integers are int64: uint64 and int64 would meet as float64."""
        if kind in WORDS:
            return self.types.UniTuple(self.types.int64, WORDS[kind])
        return {"f32": self.types.float32, "pred": self.types.boolean}.get(kind, self.types.int64)

    def result_type(self, returns):
        if returns is None:
            return self.types.none
        if isinstance(returns, tuple):
            return self.types.UniTuple(self.type_of(returns[0]), len(returns))
        return self.type_of(returns)

    def parameter_type(self, hint: Any):
        """The type of a kernel's parameter, by its annotation."""
        leaf = param_type(hint)
        if leaf is not None:
            return {"q": self.types.int64, "i": self.types.int32, "f": self.types.float32}[leaf.code]
        fields = get_type_hints(hint, include_extras=True)
        return self.types.BaseTuple.from_types([self.parameter_type(field) for field in fields.values()], hint)

    def argument_type(self, spec: PrimitiveSpec, kind: str, given):
        """The type that an argument is cast to, after a check that the cast loses nothing by surprise."""
        types = self.types
        given = types.unliteral(given)
        if kind == "any" and isinstance(given, (types.Number, types.Boolean)):
            assert isinstance(spec.returns, str)
            return self.type_of(spec.returns)
        if kind in WORDS:
            if isinstance(given, types.BaseTuple) and len(given) == WORDS[kind]:
                if all(isinstance(types.unliteral(item), types.Integer) for item in given):
                    return types.UniTuple(types.int64, WORDS[kind])
            raise self._error(spec, f"needs a tuple of {WORDS[kind]} integers, not {given}")
        if kind == "f32":
            if given == types.float32:
                return given
            raise self._error(
                spec,
                f"needs float32, not {given}: a float constant or an integer makes float64 of the float32 that it "
                f"meets; write f32(0.5), f32(n)",
            )
        if kind == "pred" and isinstance(given, types.Boolean):
            return given
        if isinstance(given, (types.Integer, types.Boolean)):
            return types.int64
        raise self._error(spec, f"needs an integer, not {given}")

    def _error(self, spec: PrimitiveSpec, text: str) -> Exception:
        """The error, with the line of the kernel or its helper, which Numba leaves out."""
        place = place_of(outwards(sys._getframe(1)))
        return self.error(f"{spec.name} {text}" + ("" if place is None else f" (at {place[0]}:{place[1]})"))


def with_parameters(function: Callable, source: str, names: dict[str, Any]) -> Callable:
    """The function `made` that the source defines; {0} stands for the function's parameters, which Numba matches by."""
    exec(source.format(", ".join(inspect.signature(function).parameters)), names)
    made = names["made"]
    made.__name__ = made.__qualname__ = function.__name__
    made.__doc__ = function.__doc__
    return made


def version_by_type(function: Any) -> Callable:
    """For a function that is written `by_type`: what Numba asks, with the types of the arguments, for the version."""
    first = next(iter(inspect.signature(function).parameters))
    kind = f"{first}.types[{first}.fields.index({function.field!r})]" if function.field else first
    source = f"def made({{0}}): return versions[{kind}.instance_class]"
    return with_parameters(function, source, {"versions": function.versions})


_registered_for: list[ComputeCapability] = []


def hold_to(compute_capability: ComputeCapability) -> None:
    """A compiler keeps what it has compiled, so one process compiles for one compute capability.

    Raises: RuntimeError if an earlier call named another one
    """
    if _registered_for and _registered_for[0] != compute_capability:
        raise RuntimeError(
            f"this process compiles for sm_{_registered_for[0][0]}{_registered_for[0][1]}; compile for "
            f"sm_{compute_capability[0]}{compute_capability[1]} in another process"
        )
    _registered_for[:] = [compute_capability]
