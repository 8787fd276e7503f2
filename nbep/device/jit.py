"""The decorators of device code. Each one records a function and returns it unchanged.

    @primitive        one PTX instruction; the Python body is what the emulator does
    @device_function  Python code called by kernels
    @by_type          a device function of which the type of an argument has its own version
    @external         a function of a library that a kernel is linked with
    @kernel           an entry point

A recorded function stays a plain Python function, which the emulator calls. A compiler is imported by
`nbep.device.compilers`, and only when something is compiled.

A kernel's spec belongs to its function: two kernels may have the same name, and one that is defined again, as a cell of
a notebook is, is another kernel. Only nbep's own have names that mean something, in KERNELS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, wraps
from types import FunctionType
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from nbep.emulator import current_thread
from nbep.emulator.machine.source import no_kernel_in

from .cards import ComputeCapability, has_bulk_copies
from .types import Param, flatten_params, parameter_hints

no_kernel_in(__file__)
F = TypeVar("F", bound=Callable[..., Any])


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
    emit        what it is instead of PTX: same, udiv, urem or dynamic_shared; a compiler says how
    symbol      a function of a library instead of PTX, by its name; see `external`
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
    emit: str = ""
    symbol: str = ""
    constant: Callable[[ComputeCapability], bool] | None = None

    @property
    def name(self) -> str:
        return self.function.__name__


TRAP = PrimitiveSpec(lambda: None, "trap;")  # what a card gets for a primitive that it lacks


class LinkInput(NamedTuple):
    """What kernels are linked with: PTX text, or an archive of objects for the device."""

    name: str
    data: bytes
    is_archive: bool


@dataclass(frozen=True)
class KernelSpec:
    """One kernel. `max_threads` a block and `min_blocks` an SM bound the compiler's use of registers.

    clusters: numbers of blocks that a GPU of sm_90 or above may place side by side, in one GPC; the best first
    base: the kernel that it is a variant of: see `over` and `for_blocks_of`
    """

    name: str
    function: Callable
    max_threads: int = 1024
    min_blocks: int = 1
    clusters: tuple[int, ...] = ()
    max_threads_before_sm90: int = 1024
    base: Callable | None = None

    def threads_on(self, cc: ComputeCapability) -> int:
        """Most threads a block on a card: where the copy engine is missing, its work takes registers."""
        return self.max_threads if has_bulk_copies(cc) else min(self.max_threads, self.max_threads_before_sm90)

    @cached_property
    def params(self) -> tuple[Param, ...]:
        """The flattened parameters: a path and a ParamType for each leaf."""
        return flatten_params(self.function)

    @cached_property
    def hints(self) -> dict[str, Any]:
        """Parameter name -> annotation, in order."""
        return parameter_hints(self.function)

    @cached_property
    def kinds(self) -> dict[str, type]:
        """The parameters that have another type than in the signature, in its order."""
        usual = self.hints if self.base is None else spec_of(self.base).hints
        return {name: hint for name, hint in self.hints.items() if hint is not usual[name]}

    @property
    def label(self) -> str:
        """The name, and what distinguishes it from its variants."""
        threads = () if self.base is None or self.max_threads == spec_of(self.base).max_threads else (self.max_threads,)
        return "-".join((self.name, *map(str, threads), *(kind.__name__ for kind in self.kinds.values())))

    @property
    def full_name(self) -> str:
        """A name as of C++: low_latency_dispatch of nbep's folder low_latency is nbep::low_latency::dispatch.

        A kernel of another module has its own name, and no more.
        """
        if not self.is_own:
            return self.name
        folder = self.function.__module__.split(".")[-2]
        if folder == "kernels":  # it belongs to no mode
            return f"nbep::{self.name}"
        return f"nbep::{folder}::{self.name.removeprefix(f'{folder}_')}"

    @property
    def entry_name(self) -> str:
        """What the kernel is called in PTX and machine code: of nbep's own, the full name as C++ mangles it.

        Profilers write such names as C++ has them: nbep::low_latency::dispatch().
        """
        if not self.is_own:
            return self.name
        return f"_ZN{''.join(f'{len(word)}{word}' for word in self.full_name.split('::'))}Ev"

    @property
    def libraries(self) -> Callable[[ComputeCapability], Sequence[LinkInput]] | None:
        """What the kernel is linked with for a card, which its network says; None if nothing."""
        return LIBRARIES.get(self.hints.get("network"))

    @property
    def is_own(self) -> bool:
        """Whether the kernel is nbep's: then it calls nothing outside of nbep.device."""
        return self.function.__module__.startswith(OWN_MODULES)


OWN_MODULES = "nbep.device."
MAX_CLUSTER = 8  # blocks that whole GPUs of sm_90 or above can place side by side
PRIMITIVES: dict[str, PrimitiveSpec] = {}
DEVICE_FUNCTIONS: list[Callable] = []
FUNCTIONS_BY_TYPE: list[Any] = []
EXTERNALS: list[PrimitiveSpec] = []
LIBRARIES: dict[Any, Callable[[ComputeCapability], Sequence[LinkInput]]] = {}  # by the type of the network
KERNELS: dict[str, KernelSpec] = {}  # nbep's own, those of the modules that are imported


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
        spec = PrimitiveSpec(function, ptx, returns, kinds, **options)
        if spec.below is not None:
            spec = replace(spec, function=_with_stand_in(spec))
        PRIMITIVES[spec.name] = spec
        return cast(F, spec.function)

    return record


def _with_stand_in(spec: PrimitiveSpec) -> Callable:
    """The primitive on the emulator: the stand-in, if the world's card is older than the instruction."""
    body, stand_in, since = spec.function, cast(Callable, spec.below), spec.since

    @wraps(body)
    def chosen(*args):
        thread = current_thread()  # there is none outside of kernels
        return body(*args) if thread is None or thread.world.compute_capability >= since else stand_in(*args)

    return chosen


def device_function(function: F) -> F:
    """Record a function that kernels call."""
    DEVICE_FUNCTIONS.append(function)
    return function


def external(
    symbol: str, returns: str | None = None, args: tuple[str, ...] | str = (), effect: str = "converge"
) -> Callable[[F], F]:
    """Record a function of a library that a kernel is linked with; see LIBRARIES. Its body is what the emulator does.

    Args: symbol  its name there; it has the ABI of C, and takes its arguments by value
          returns, args, effect  see PrimitiveSpec: one result or none
    """

    def record(function: F) -> F:
        kinds = (args,) if isinstance(args, str) else args
        EXTERNALS.append(PrimitiveSpec(function, "", returns, kinds, effect, symbol=symbol))
        return function

    return record


class ByType(Protocol):
    """A function that has a version for each type of what chooses among them."""

    __name__: str
    versions: dict[type, Callable]

    def __call__(self, *args: Any) -> Any: ...


def by_type(field: str = "", *own: type) -> Callable[[Callable], ByType]:
    """Record a function of which the type of its first argument, or of a field of that, says which version is meant.

    A network, for one: each has its own `put_nbi_warp`. `versions` of the result maps a type to its version.

    field  "" if it is the type of the argument itself
    own    the types of which the decorated body is the version; if there are none it says what all versions do
    """

    def record(function: Callable) -> ByType:
        versions: dict[type, Callable] = dict.fromkeys(own, function)

        @wraps(function)
        def chosen(first, *args):
            return versions[type(getattr(first, field) if field else first)](first, *args)

        chosen.versions, chosen.field = versions, field  # type: ignore[attr-defined]
        FUNCTIONS_BY_TYPE.append(chosen)
        return cast(ByType, chosen)

    return record


def kernel(
    *bare: Callable,
    max_threads: int = 1024,
    min_blocks: int = 1,
    clusters: Sequence[int] = (),
    max_threads_before_sm90: int = 1024,
) -> Callable[[F], F]:
    """Record an entry point.

    Args:
        max_threads: most threads a block that it is launched with; fewer leave the compiler more registers
        min_blocks: blocks that an SM should hold at once, which bounds the registers
        clusters: sizes of 2 to 8 blocks: with n, blocks 0 to n - 1, n to 2 n - 1, and so on run side by side. A launch
            takes the first size that divides its grid and for which there is room, or none. It is about speed alone;
            the emulator places nothing.
        max_threads_before_sm90: the same as max_threads for cards without the copy engine, if it is less

    Raises:
        TypeError: if it is written without parentheses
        ValueError: for another size, or if two modules of nbep have a kernel of one name
    """
    if bare:
        raise TypeError("kernel: write @kernel() or @kernel(max_threads=...), with parentheses")
    if not all(2 <= size <= MAX_CLUSTER for size in clusters):
        raise ValueError(f"clusters: got {tuple(clusters)}; must be sizes of 2 to {MAX_CLUSTER} blocks")

    def record(function: F) -> F:
        spec = KernelSpec(
            function.__name__, function, max_threads, min_blocks, tuple(clusters), max_threads_before_sm90
        )
        function.kernel_spec = spec  # type: ignore[attr-defined]
        if spec.is_own:
            known = KERNELS.setdefault(spec.name, spec)
            if known.function.__module__ != function.__module__:
                raise ValueError(f"kernel {spec.name}: is in {known.function.__module__} and {function.__module__}")
            KERNELS[spec.name] = spec
        return function

    return record


def spec_of(function: Callable) -> KernelSpec:
    """What @kernel recorded of a function.

    Raises: TypeError if it is no kernel
    """
    spec = getattr(function, "kernel_spec", None)
    if spec is None or spec.function is not function:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{name} is no kernel: decorate it with @kernel()")
    return spec


def over(function: Callable, kind: type, parameter: str = "network") -> Callable:
    """A kernel with a parameter of another type: a `network`, if no other is named. On a GPU it is compiled anew.

    Raises:
        TypeError: if the function is no kernel
        ValueError: if it has no such parameter
    """
    spec = spec_of(function)
    if parameter not in spec.hints:
        raise ValueError(f"{spec.name}: has no parameter `{parameter}`")
    base = spec.base or function
    usual = spec_of(base).hints
    kinds = {**spec.kinds, parameter: kind}
    return variant_of(
        base,
        tuple((name, kinds[name]) for name in usual if kinds.get(name, usual[name]) is not usual[name]),
        spec.max_threads,
    )


def for_blocks_of(function: Callable, max_threads: int) -> Callable:
    """A kernel for blocks of so many threads. On a GPU it is compiled anew, with fewer registers if they are more."""
    spec = spec_of(function)
    return variant_of(spec.base or function, tuple(spec.kinds.items()), max_threads)


@cache
def variant_of(base: Callable, kinds: tuple[tuple[str, type], ...], max_threads: int) -> Callable:
    """The one variant of a kernel whose parameters have these types, for blocks of so many threads."""
    if not kinds and max_threads == spec_of(base).max_threads:
        return base
    plain: Any = base
    made = FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    made.__module__, made.__qualname__, made.__doc__ = plain.__module__, plain.__qualname__, plain.__doc__
    made.__annotations__ = {**plain.__annotations__, **dict(kinds)}
    made.kernel_spec = replace(spec_of(base), function=made, base=base, max_threads=max_threads)  # type: ignore[attr-defined]
    return made
