"""The decorators of device code. Each one records a function and returns it unchanged.

    @primitive        one PTX instruction; the Python body is what the emulator does
    @device_function  Python code called by kernels
    @kernel           an entry point

A recorded function stays a plain Python function, which the emulator calls. Numba is imported by
`nbep.device.lowering`, and only when something is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from .types import Param, flatten_params

F = TypeVar("F", bound=Callable[..., Any])
ComputeCapability = tuple[int, int]


@dataclass(frozen=True)
class PrimitiveSpec:
    """One primitive: the Python meaning and what it compiles to.

    function    the Python body
    ptx         inline assembly with $0.. for results, then arguments; "" if `emit` or `constant` says it
    returns     None, one kind or a tuple of kinds
    args        a kind for each argument
    effect      "memory"    keeps its place among memory accesses (volatile, clobbers memory)
                "converge"  as memory, and control flow around it must not be changed
                "pure"      depends on its arguments alone: may be merged or moved
    since       lowest compute capability that has the instruction
    below       function that stands in for it on older cards; None traps there
    emit        LLVM instructions instead of PTX: emit(builder, *values) -> value
    constant    constant(compute_capability) -> bool: known when compiling

    Kinds: s32 u32 s64 (any integer; results are int64 in the range of their kind), u8, f32, pred (a truth value),
    smem (a shared-memory address), v2 v4 (2 or 4 u32 words as one tuple), any (converted to the first result's kind).
    """

    function: Callable
    ptx: str = ""
    returns: str | tuple[str, ...] | None = None
    args: tuple[str, ...] = ()
    effect: str = "memory"
    since: ComputeCapability = (0, 0)
    below: Callable | None = None
    emit: Callable | None = None
    constant: Callable[[ComputeCapability], bool] | None = None

    @property
    def name(self) -> str:
        return self.function.__name__


@dataclass(frozen=True)
class KernelSpec:
    """One kernel. `max_threads` a block and `min_blocks` an SM bound the compiler's use of registers."""

    name: str
    function: Callable
    max_threads: int = 1024
    min_blocks: int = 1

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The flattened parameters: a path and a ParamType for each leaf."""
        return flatten_params(self.function)


PRIMITIVES: dict[str, PrimitiveSpec] = {}
DEVICE_FUNCTIONS: list[Callable] = []
KERNELS: dict[str, KernelSpec] = {}


def primitive(
    ptx: str = "",
    returns: str | tuple[str, ...] | None = None,
    args: tuple[str, ...] | str = (),
    **options: Any,
) -> Callable[[F], F]:
    """Record a primitive; see PrimitiveSpec for the arguments. The decorated body is what the emulator does.

    Register constraints follow from the kinds of results and arguments.
    """

    def record(function: F) -> F:
        kinds = (args,) if isinstance(args, str) else args
        PRIMITIVES[function.__name__] = PrimitiveSpec(function, ptx, returns, kinds, **options)
        return function

    return record


def device_function(function: F) -> F:
    """Record a function that kernels call."""
    DEVICE_FUNCTIONS.append(function)
    return function


def kernel(*, max_threads: int = 1024, min_blocks: int = 1) -> Callable[[F], F]:
    """Record an entry point under its own name in KERNELS.

    Raises: ValueError if another module has a kernel of that name
    """

    def record(function: F) -> F:
        name = function.__name__
        known = KERNELS.get(name)
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(f"kernel {name} is defined in {known.function.__module__} and in {function.__module__}")
        KERNELS[name] = KernelSpec(name, function, max_threads, min_blocks)
        return function

    return record
